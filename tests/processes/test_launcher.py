"""What launchers ask for, and which card is whose."""

import os

import pytest
import torch
from typer.testing import CliRunner

from toolkit import processes
from toolkit.cli import app
from toolkit.errors import ToolkitError
from toolkit.processes import group, launcher


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"}, "accelerate is set to FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "accelerate is set to DEEPSPEED"),
        ({"ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500"}, "starts one process on a CPU"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_PORT": "29500"}, "RANK is 2 of WORLD_SIZE 2, and ranks begin with 0"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "29500", "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
    ],
)
def test_what_accelerate_cannot_do_here_is_refused(environ, said, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ToolkitError, match=said):
        processes.join()


def test_one_process_that_was_launched_is_as_one_that_was_not(monkeypatch):
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    processes.join()
    assert processes.count() == 1 and not {"WORLD_SIZE", "RANK", "LOCAL_RANK"} & processes.environment().keys()


def test_a_command_takes_its_card_before_a_library_asks_for_it(two_cards, monkeypatch):
    """bitsandbytes asks CUDA when it is imported, and CUDA reads the variable once."""

    def imports():
        raise ToolkitError(f"imported with {os.environ.get('CUDA_VISIBLE_DEVICES')}")

    monkeypatch.setattr("toolkit.cli.command._import_quietly", imports)
    assert "imported with 1" in CliRunner().invoke(app, ["ppo", "doubling"]).stderr
    assert "imported with 1" in CliRunner().invoke(app, ["runs"]).stderr  # as it was left


@pytest.mark.parametrize(("visible", "seen"), [(None, "1"), ("4, 7", "7"), ("GPU-a,GPU-b", "GPU-b"), ("-1", None),
                                               ("", None), ("3,-1,5", "refused"), ("3", "refused")])  # fmt: skip
def test_each_process_sees_one_card_and_gives_its_stage_all_of_them(visible, seen, two_cards, monkeypatch):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if visible is None:  # a build for ROCm reads the same variable
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.version, "hip", "6.4")
    if seen == "refused":
        with pytest.raises(ToolkitError, match="process 1 of this machine has no GPU of its own: 1 are visible"):
            processes.take_card()
        return
    processes.take_card()
    processes.take_card()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == (visible if seen is None else seen)
    monkeypatch.setattr(group, "count", lambda: 2)
    monkeypatch.setattr(group, "by_main", lambda call: call())
    launcher.take_from_environment()
    given = processes.environment()
    assert given.get("CUDA_VISIBLE_DEVICES") == visible
    assert {name: given[name] for name in launcher._LAUNCHED} == {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}


@pytest.mark.parametrize("variable", ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_on_rocm_torch_counts_by_other_variables_too(variable, two_cards, monkeypatch):
    """Where these are set, whatever that of CUDA says."""
    monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ToolkitError, match="process 1 of this machine has no GPU of its own: 1 are visible"):
        processes.take_card()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not processes.take_card()


@pytest.mark.parametrize(("cards", "taken", "build"), [(2, True, "cuda"), (1, False, "hip"), (0, False, "cuda")])
def test_the_card_is_taken_before_anything_counts_them(cards, taken, build, two_cards, monkeypatch):
    """Where there is no NVML, as in native Windows and some containers, torch counts by CUDA, which reads the variable
    then and never again. So it does for ROCm without amdsmi."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, build, "1")
    seen = []

    def counts():
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return int(cards > 1)  # of the second process

    monkeypatch.setattr(torch.cuda, "device_count", counts)
    assert processes.take_card() == taken and seen == ["1"]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == ("1" if taken else None)


def test_whoever_joins_after_cuda_was_asked_is_told(two_cards, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 2, raising=False)
    with pytest.raises(ToolkitError, match=r"Call toolkit.processes.join\(\) before anything else is imported"):
        processes.join()


def test_accelerates_own_variables_are_let_pass(monkeypatch):
    for name, value in {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_MIXED_PRECISION": "no"}.items():
        monkeypatch.setenv(name, value)
    processes.join()
    assert processes.count() == 1


def test_what_mpi_says_is_no_number_of_processes(monkeypatch):
    """accelerate would divide by it on a CPU, and the toolkit once more."""
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(ToolkitError, match="PMI_SIZE says that MPI has started several.*Start them with torchrun"):
        processes.join()
    monkeypatch.setenv("PMI_SIZE", "2")
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():  # which torchrun has started there
        monkeypatch.setenv(name, value)
    processes.join()
    assert "PMI_SIZE" not in os.environ


@pytest.mark.parametrize("visible", ["0,1", None])
def test_a_card_that_cuda_does_not_find_is_named(visible, two_cards, monkeypatch):
    """As on a login node, or where a driver is missing: all would end in a traceback of NCCL's."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    named = " of CUDA_VISIBLE_DEVICES=0,1" if visible else ""
    with pytest.raises(ToolkitError, match=rf"CUDA finds no GPU 1{named}\. Set CUDA_VISIBLE_DEVICES to GPUs that"):
        processes.join()
