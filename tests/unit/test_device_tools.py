"""What nvidia-smi, amd-smi, rocm-smi, neuron-ls and hl-smi print becomes the devices of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from paths import DATA

from lmi_server.machine.device_tools import (
    Gpu,
    parse_amd_smi,
    parse_hl_smi,
    parse_neuron_ls,
    parse_nvidia_smi,
    parse_rocm_smi,
)
from lmi_server.machine.devices import AMD, GAUDI, NEURON, NVIDIA, plan_devices
from lmi_server.machine.inventory import Machine, this_machine, with_gpu_memory

SAMPLES = DATA / "device_tools"
MIB = 2**20
UUID = "GPU-5a0f1b6e-2a4c-4f6e-9a5e-2d8f1c7b3e10"


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


def test_what_the_tools_print() -> None:
    nvidia = {gpu.name: gpu for gpu in parse_nvidia_smi(sample("nvidia_smi.csv"))}
    assert nvidia["0"] == Gpu("0", 81559 * MIB, 81038 * MIB)
    assert nvidia[UUID] == Gpu(UUID, 81559 * MIB, 81038 * MIB)
    assert len(nvidia) == 4
    assert parse_nvidia_smi(sample("nvidia_smi_unified.csv"))[0] == Gpu("0")
    assert parse_amd_smi(sample("amd_smi.json")) == (
        Gpu("0", 196592 * MIB, (196592 - 17153) * MIB),
        Gpu("1", 196592 * MIB, (196592 - 284) * MIB),
    )
    assert parse_amd_smi(sample("amd_smi_list.json")) == (Gpu("0", 65520 * MIB),)
    assert parse_rocm_smi(sample("rocm_smi.json")) == (
        Gpu("0", 206141652992, 206141652992 - 297795584),
        Gpu("1", 206141652992, 206141652992),
    )
    assert parse_neuron_ls(sample("neuron_ls.json")) == (Gpu("0", 2**34), Gpu("1", 2**34))
    assert parse_hl_smi(sample("hl_smi.csv")) == (
        Gpu("3", 98304 * MIB, 97632 * MIB),
        Gpu("1", 98304 * MIB, 97536 * MIB),
    )


def test_logical_cores_are_what_a_process_asks_for() -> None:
    """A device of Trainium 2 has eight cores, which are used in pairs."""
    assert parse_neuron_ls(sample("neuron_ls_trn2.json")) == tuple(Gpu(str(core), 24 * 2**30) for core in range(4))


@pytest.mark.parametrize("parse", [parse_nvidia_smi, parse_amd_smi, parse_rocm_smi, parse_neuron_ls, parse_hl_smi])
def test_a_tool_without_devices_or_driver_finds_none(parse: object) -> None:
    assert callable(parse)
    failures = [sample(path.name) for path in SAMPLES.glob("*_failed.txt")]
    for text in ("", "null", "[]", "{}", "[1]", '{"a": 1}', '{"card0": 1}', "a,b,c,d", "x, y, z", *failures):
        assert parse(text) == ()


def machine_with(directory: Path, tools: dict[str, str], **variables: str) -> tuple[Machine, dict[str, str]]:
    """Return the machine that tools printing these samples describe, and the environment that they are found in."""
    for tool, name in tools.items():
        script = directory / tool
        script.write_text(f"#!/bin/sh\nexec /bin/cat {SAMPLES / name}\n")
        script.chmod(0o755)
    environment = {"PATH": str(directory), **variables}
    return this_machine(environment), environment


needs_no_gpu = pytest.mark.skipif(os.path.isdir("/proc/driver/nvidia/gpus"), reason="this machine has an NVIDIA GPU")


@needs_no_gpu
def test_amd_gpus_are_gpus_with_variables_of_their_own(tmp_path: Path) -> None:
    machine, environment = machine_with(tmp_path, {"rocm-smi": "rocm_smi.json"})
    assert (machine.device_kind, machine.gpu_accelerator, [gpu.name for gpu in machine.gpus]) == (
        "gpu",
        AMD,
        ["0", "1"],
    )
    assert with_gpu_memory(machine, environment).gpus[1].free_bytes == 206141652992
    (first, second) = plan_devices("*", 1, ("0", "1"), AMD)
    assert second.environment == {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}
    assert first.kind == "gpu"
    one, _ = machine_with(tmp_path, {}, HIP_VISIBLE_DEVICES="1")
    assert [gpu.name for gpu in one.gpus] == ["1"]


@needs_no_gpu
@pytest.mark.parametrize(
    ("variables", "cores"),
    [({}, "01"), ({"NEURON_RT_VISIBLE_CORES": "1-5"}, "1"), ({"NEURON_RT_NUM_CORES": "1"}, "0")],
)
def test_neuron_cores_are_those_that_the_runtime_shows(tmp_path: Path, variables: dict[str, str], cores: str) -> None:
    machine, _ = machine_with(tmp_path, {"neuron-ls": "neuron_ls.json"}, **variables)
    assert (machine.device_kind, "".join(core.name for core in machine.neuron_cores)) == ("nc", cores)
    accelerator, devices = machine.accelerator("nc")
    (worker,) = plan_devices("nc0", 1, [core.name for core in devices], accelerator)
    assert (worker.kind, worker.first) == ("nc", 0)
    assert worker.environment == {"NEURON_RT_VISIBLE_CORES": cores[0]}


@needs_no_gpu
def test_gaudi_cards_are_named_by_module(tmp_path: Path) -> None:
    machine, _ = machine_with(tmp_path, {"hl-smi": "hl_smi.csv"})
    accelerator, cards = machine.accelerator(machine.device_kind)
    assert (machine.device_kind, accelerator) == ("hpu", GAUDI)
    (worker,) = plan_devices("*", 2, [card.name for card in cards], accelerator)
    assert worker.environment == {"HABANA_VISIBLE_MODULES": "3,1"}


@needs_no_gpu
def test_tools_that_fail_leave_the_processor(tmp_path: Path) -> None:
    failed = {"nvidia-smi": "nvidia_smi_failed.txt", "hl-smi": "hl_smi_failed.txt", "neuron-ls": "hl_smi_failed.txt"}
    machine, environment = machine_with(tmp_path, failed)
    assert machine.device_kind == "cpu"
    assert machine.accelerator("cpu") == (NVIDIA, ())
    assert machine.accelerator("nc") == (NEURON, ())
    seen = Machine(2**30, 2**30, gpus=(Gpu("0"),))
    assert with_gpu_memory(seen, environment).gpus == (Gpu("0"),)
