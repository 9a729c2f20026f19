"""What the vendors' own tools say of the devices of this machine: nvidia-smi, amd-smi, rocm-smi, neuron-ls, hl-smi.

The parsers are pure. Text in an unknown form gives no devices: a tool is installed on many
machines without a device or a driver, and then writes an error to its output.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_MIB = 2**20
_LIMIT_S = 30.0
_NEURON_TOOLS = "/opt/aws/neuron/bin"  # where AWS's packages put them, which is not on everybody's PATH


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device: its name in the variable that shows it to a process, and the bytes of its memory.

    None stands for memory that was not measured.
    """

    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """The mean share of time in which the GPUs work, and the bytes in use on all of them."""

    load: float
    memory_bytes: int


Devices = tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class _Tool:
    """A command whose output `parse` reads."""

    command: tuple[str, ...]
    parse: Callable[[str], Devices]


def parse_nvidia_smi(text: str) -> Devices:
    """Read `--query-gpu=index,uuid,memory.total,memory.free --format=csv,noheader,nounits`, in MiB.

    Each GPU is there twice: CUDA_VISIBLE_DEVICES may name it by its index or by its UUID. One whose memory is that of
    the machine has [N/A] in place of numbers.
    """
    rows = (_fields(line, 4) for line in text.splitlines())
    return tuple(
        Gpu(name, _mib(total), _mib(free))
        for index, uuid, total, free in filter(None, rows)
        if index.isdecimal()
        for name in (index, uuid)
    )


def parse_nvidia_load(text: str) -> GpuLoad | None:
    """Read `--query-gpu=utilization.gpu,memory.used --format=csv,noheader,nounits`: percents, and MiB."""
    rows = [row for line in text.splitlines() if (row := _fields(line, 2)) and all(map(str.isdecimal, row))]
    if not rows:
        return None
    loads, used = zip(*rows, strict=True)
    return GpuLoad(sum(map(int, loads)) / 100 / len(rows), sum(map(int, used)) * _MIB)


def parse_amd_smi(text: str) -> Devices:
    """Read `amd-smi metric --mem-usage --json`: a list, or in later versions an object with `gpu_data`."""
    found = _json(text)
    entries = found.get("gpu_data", []) if isinstance(found, dict) else found
    return tuple(_amd_gpu(entry) for entry in entries or () if isinstance(entry, dict) and "gpu" in entry)


def _amd_gpu(entry: Mapping[str, Any]) -> Gpu:
    usage = entry.get("mem_usage") or {}
    total, used = (_number(usage.get(name)) for name in ("total_vram", "used_vram"))
    free = None if total is None or used is None else (total - used) * _MIB
    return Gpu(str(entry["gpu"]), None if total is None else total * _MIB, free)


def _number(measured: Any) -> int | None:
    """Return the number of {"value": 1024, "unit": "MB"}, or of 1024 alone; None if it is "N/A"."""
    value = measured.get("value") if isinstance(measured, dict) else measured
    return int(value) if isinstance(value, int | float) or (isinstance(value, str) and value.isdecimal()) else None


def parse_rocm_smi(text: str) -> Devices:
    """Read `rocm-smi --showmeminfo vram --json`: an object with `card0` and so on, in bytes as text."""
    found = _json(text)
    cards = found.items() if isinstance(found, dict) else ()
    return tuple(
        _rocm_gpu(name.removeprefix("card"), card)
        for name, card in cards
        if name.startswith("card") and name[4:].isdecimal() and isinstance(card, dict)
    )


def _rocm_gpu(name: str, card: Mapping[str, Any]) -> Gpu:
    total, used = (_number(card.get(f"VRAM Total {kind}Memory (B)")) for kind in ("", "Used "))
    return Gpu(name, total, None if total is None or used is None else total - used)


def parse_neuron_ls(text: str) -> Devices:
    """Read `neuron-ls --json-output`: the cores of all devices, each with its share of the device's memory.

    `nc_count` counts the cores that a process asks for: on Trainium 2 groups of two (`logical_neuroncore_config`).
    """
    found = _json(text)
    devices = [device for device in found if _has_cores(device)] if isinstance(found, list) else []
    shares = [_share(device) for device in devices for _ in range(device["nc_count"])]
    return tuple(Gpu(str(index), share) for index, share in enumerate(shares))


def _has_cores(device: Any) -> bool:
    return isinstance(device, dict) and isinstance(device.get("nc_count"), int)


def _share(device: Mapping[str, Any]) -> int | None:
    size = device.get("memory_size")
    return size // device["nc_count"] if isinstance(size, int) else None


def parse_hl_smi(text: str) -> Devices:
    """Read `hl-smi -Q module_id,memory.total,memory.free -f csv,noheader`: 0, 98304 MiB, 97632 MiB."""
    rows = (_fields(line, 3) for line in text.splitlines())
    return tuple(
        Gpu(module, _mib(total), _mib(free)) for module, total, free in filter(None, rows) if module.isdecimal()
    )


def _fields(line: str, count: int) -> list[str] | None:
    fields = [field.strip() for field in line.split(",")]
    return fields if len(fields) == count else None


def _mib(text: str) -> int | None:
    number = text.removesuffix("MiB").strip()
    return int(number) * _MIB if number.isdecimal() else None


def _json(text: str) -> Any:
    """Return the JSON value in `text`, behind any warning; None if there is none."""
    starts = [place for place in (text.find("{"), text.find("[")) if place >= 0]
    try:
        return json.loads(text[min(starts, default=0) :])
    except ValueError:
        return None


_NVIDIA = _Tool(
    ("nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits"), parse_nvidia_smi
)
_NVIDIA_LOAD = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_NVIDIA_NAMES = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
_AMD = (
    _Tool(("amd-smi", "metric", "--mem-usage", "--json"), parse_amd_smi),
    _Tool(("rocm-smi", "--showmeminfo", "vram", "--json"), parse_rocm_smi),
)
_NEURON = _Tool(("neuron-ls", "--json-output"), parse_neuron_ls)
_GAUDI = _Tool(("hl-smi", "-Q", "module_id,memory.total,memory.free", "-f", "csv,noheader"), parse_hl_smi)


def nvidia_gpus(environment: Mapping[str, str]) -> Devices:
    """Return the NVIDIA GPUs with their memory now, by index and by UUID."""
    return _devices(_NVIDIA, environment, _run)


def nvidia_load(environment: Mapping[str, str]) -> GpuLoad | None:
    """Return what the NVIDIA GPUs of this machine do now; None without nvidia-smi."""
    path = _path_of(_NVIDIA_LOAD[0], environment)
    return None if path is None else parse_nvidia_load(_run((path, *_NVIDIA_LOAD[1:])))


def nvidia_products(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the name of the product that each NVIDIA GPU of this machine is; none without nvidia-smi."""
    path = _path_of(_NVIDIA_NAMES[0], environment)
    lines = () if path is None else _run((path, *_NVIDIA_NAMES[1:])).splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def amd_gpus(environment: Mapping[str, str]) -> Devices:
    """Return the AMD GPUs with their memory now."""
    return next(filter(None, (_devices(tool, environment, _run) for tool in _AMD)), ())


def known_amd_gpus(environment: Mapping[str, str]) -> Devices:
    """Return the AMD GPUs as they were when they were first asked for: the tools take up to a second."""
    return next(filter(None, (_devices(tool, environment, _run_once) for tool in _AMD)), ())


def neuron_cores(environment: Mapping[str, str]) -> Devices:
    """Return the Neuron cores of all devices."""
    return _devices(_NEURON, environment, _run_once)


def gaudi_cards(environment: Mapping[str, str]) -> Devices:
    """Return the Gaudi cards."""
    return _devices(_GAUDI, environment, _run_once)


def _devices(tool: _Tool, environment: Mapping[str, str], run: Callable[[tuple[str, ...]], str]) -> Devices:
    path = _path_of(tool.command[0], environment)
    return () if path is None else tool.parse(run((path, *tool.command[1:])))


def _path_of(name: str, environment: Mapping[str, str]) -> str | None:
    return shutil.which(name, path=os.pathsep.join([environment.get("PATH", os.defpath), _NEURON_TOOLS]))


def _run(command: tuple[str, ...]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""


_run_once = functools.lru_cache(_run)


def listed_cores(text: str) -> Iterator[str]:
    """Yield the cores that NEURON_RT_VISIBLE_CORES names: 0-3,8."""
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            yield from (str(core) for core in range(int(first), int(last or first) + 1))
