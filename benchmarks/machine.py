"""Where a benchmark ran: the parts that decide its speed, and nothing that names the machine."""

import platform
from pathlib import Path
from typing import Any

import psutil
import torch


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():  # Linux; platform.processor() is empty there
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Processor, cores, threads that torch uses, memory in GB (10⁹ bytes), system, and the GPU where there is one."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_memory_gb": round(properties.total_memory / 1e9, 1)}
    return found
