"""What a launcher has said in the environment: how many processes it started, which this one is, and its card."""

import os
from itertools import takewhile

import torch

from toolkit.errors import ToolkitError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LAUNCHED = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK"), "")  # as `take_from_environment` found them
_OF_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # by which accelerate would divide on a CPU, too
_seen: list[str | None] = []  # that variable as `take_card` found it


def launched() -> int:
    """How many processes a launcher has started, as torch's variables say; 1 where none has.

    Raises:
        ToolkitError: no launcher sets them so.
    """
    number = os.environ.get("WORLD_SIZE", "1")
    lacking = [name for name in ("RANK", "MASTER_PORT") if not os.environ.get(name, "").isdecimal()]
    if not number.isdecimal() or number == "0" or (number != "1" and lacking):
        why = f"{lacking[0]} is no number" if number.isdecimal() and lacking else "that is no number of processes"
        wrong = f"WORLD_SIZE is {number!r} in the environment, and {why}."
        raise ToolkitError(wrong, remedy="Unset it, or start with torchrun or --processes.")
    if number != "1" and int(os.environ["RANK"]) >= int(number):
        wrong = f"RANK is {os.environ['RANK']} of WORLD_SIZE {number}, and ranks begin with 0: all would wait."
        raise ToolkitError(wrong, remedy="Start with torchrun or --processes.")
    if not os.environ.get("LOCAL_RANK", "0").isdecimal():
        wrong = f"LOCAL_RANK is {os.environ['LOCAL_RANK']!r} in the environment, which is no number."
        raise ToolkitError(wrong, remedy="Unset it, or start with torchrun or --processes.")
    return int(number)


def take_card() -> bool:
    """See the GPU of the local rank alone, if a launcher started several processes and there are GPUs; whether so.

    Before anything asks CUDA, which reads the variable once: bitsandbytes asks when it is imported.

    Raises:
        ToolkitError: there are more processes on this machine than GPUs that the variable names. (Where it is not set,
            `join` tells of those without one, but for ROCm.)
    """
    if launched() == 1 or _seen or not (torch.version.cuda or torch.version.hip):
        return bool(_seen)
    local, visible = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), os.environ.get(_VISIBLE)
    # Where HIP or its driver is told by a variable of its own, torch does not count by this one.
    by_another = torch.version.hip and any(map(os.environ.get, ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")))
    if visible is None and not by_another:
        # Set before torch counts: without NVML it counts by CUDA, which would then have seen all cards.
        os.environ[_VISIBLE] = str(local)
        if not torch.cuda.device_count():
            del os.environ[_VISIBLE]
            return False
    else:
        named = map(str, range(torch.cuda.device_count())) if visible is None else map(str.strip, visible.split(","))
        # A negative number ends the list, as in CUDA.
        gpus = [*takewhile(lambda one: one and not one.startswith("-"), named)]
        if not gpus:
            return False
        if local >= len(gpus):
            wrong = f"process {local} of this machine has no GPU of its own: {len(gpus)} are visible."
            remedy = "Start as many processes as there are GPUs. If the launcher shows each its own one alone, set "
            raise ToolkitError(wrong, remedy=f"{remedy}LOCAL_RANK to 0 in all of them.")
        os.environ[_VISIBLE] = gpus[local]
    _seen.append(visible)
    return True


def check_card() -> None:
    """Nothing, if CUDA finds the card that this process has taken, and no other, else a ToolkitError."""
    if not torch.cuda.is_available():
        wrong = f"CUDA finds no GPU {os.environ[_VISIBLE]}"
        named = f" of {_VISIBLE}={_seen[0]}" if _seen[0] else ""
        remedy = f"Set {_VISIBLE} to GPUs that nvidia-smi lists, or to nothing for the CPU."
        raise ToolkitError(f"{wrong}{named}.", remedy=remedy)
    if torch._C._cuda_getDeviceCount() > 1:
        wrong = "CUDA was initialised before each process had its own GPU: all would take the first one."
        raise ToolkitError(wrong, remedy="Call toolkit.processes.join() before anything else is imported.")


def check_launcher() -> None:
    """Nothing, if the one that started this process asks for what can be done, else a ToolkitError."""
    environ = os.environ
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            wrong = f"accelerate is set to {name}, which shards a model's weights; here each process holds the whole "
            remedy = "Launch with --multi_gpu, or take a base that fits on one GPU."
            raise ToolkitError(f"{wrong}base, whose 4-bit weights cannot be sharded yet.", remedy=remedy)
    if "ACCELERATE_USE_CPU" in environ and "MASTER_PORT" in environ and "WORLD_SIZE" not in environ:
        wrong = "accelerate launch starts one process on a CPU, whatever number it is given."
        raise ToolkitError(wrong, remedy="Take torchrun, or --multi_gpu, which needs no GPU.")
    for name in _OF_MPI:
        if environ.pop(name, "1") != "1" and "WORLD_SIZE" not in environ:
            wrong = f"{name} says that MPI has started several processes, which would each do the whole run."
            raise ToolkitError(wrong, remedy="Start them with torchrun or --processes, or one alone.")


def take_from_environment() -> None:
    """Away with what accelerate would divide by, in this process and in what it starts, which meets elsewhere."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    _LAUNCHED.update({name: os.environ.pop(name, "") for name in _LAUNCHED})


def as_launched() -> dict[str, str]:
    """The environment as the launcher made it for this process, but for where its processes meet."""
    found = {**_LAUNCHED, _VISIBLE: _seen[0] or ""} if _seen else _LAUNCHED
    left = {name: value for name, value in os.environ.items() if name not in found}
    return left | {name: value for name, value in found.items() if value}
