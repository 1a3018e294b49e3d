"""Where something ran: the parts that decide its speed, and nothing that names the machine."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from toolkit.memory import memory
from toolkit.models import finds_no_gpu
from toolkit.reports.files import versions


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
        "memory_gb": round(memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_memory_gb": round(properties.total_memory / 1e9, 1)}
    return found


# What of the environment decides a run. Their values are shown; no other variable is.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE", "WORLD_SIZE",
)  # fmt: skip
_OPTIONAL = ("tensorboard", "trackio", "wandb", "mlflow", "flash-attn", "liger-kernel", "deepspeed", "vllm")


def environment() -> dict[str, str]:
    """What a bug report has to say: versions, machine, GPU, and the few variables that matter. Nothing personal."""
    found = dict(versions())
    for package in _OPTIONAL:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    found |= {name.replace("_", " "): str(value) for name, value in machine().items()}
    cuda, rocm = torch.version.cuda, torch.version.hip
    found["torch was built for"] = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPU"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(0)
        found |= {"GPUs": str(torch.cuda.device_count()), "compute capability": f"{major}.{minor}"}
        found["bfloat16"] = "yes" if torch.cuda.is_bf16_supported(including_emulation=False) else "emulated"
    elif finds_no_gpu():
        found["GPUs"] = "none that this torch can use (see nvidia-smi; a build for another CUDA: docs/running.md)"
    return found | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def device_in_words(device: torch.device) -> str:
    """`NVIDIA H100 80GB HBM3, 85.0 GB`, `CPU (AMD EPYC, 2 threads), 25.2 GB`."""
    found = machine()
    if device.type == "cuda":
        return f"{found['gpu']}, {found['gpu_memory_gb']} GB"
    return f"{device.type.upper()} ({found['processor']}, {found['threads']} threads), {found['memory_gb']} GB"
