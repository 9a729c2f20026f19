"""Decides which devices each worker of a model gets: plain data in, plain data out.

A worker sees only its own slice of the visible devices (for GPUs by `CUDA_VISIBLE_DEVICES`), numbered from 0. So a
handler works the same on any of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import excerpt

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
ALL_DEVICES = "*"

_GPUS = Path("/proc/driver/nvidia/gpus")
_DRIVER = Path("/proc/driver/nvidia/version")
_GPU = re.compile(r"(?:gpu|nc|hpu)?(\d+)")
_CPU = ("cpu", "-1")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A kind of device: LMI's `deviceType`, its name in messages, and the variables that show some to a process.

    All variables get the same value. The first one is also read: it says which devices the server may use.
    """

    kind: str
    noun: str
    variables: tuple[str, ...]


NVIDIA = Accelerator("gpu", "GPU", (CUDA_VISIBLE_DEVICES,))
# ROCm reads CUDA's variable too; two variables that differ are an error to some engines.
AMD = Accelerator("gpu", "GPU", ("HIP_VISIBLE_DEVICES", CUDA_VISIBLE_DEVICES))
NEURON = Accelerator("nc", "Neuron core", ("NEURON_RT_VISIBLE_CORES",))
GAUDI = Accelerator("hpu", "Gaudi card", ("HABANA_VISIBLE_MODULES",))


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """The devices of one worker; `minWorkers` to `maxWorkers` workers share them.

    `gpus` are indices among the devices that the server sees, of the kind `accelerator`; an empty tuple is the CPU.
    `visible` is the value of the accelerator's variables in the worker; None leaves them unset, because there is no
    device to hide.
    """

    gpus: tuple[int, ...] = ()
    visible: str | None = None
    accelerator: Accelerator = NVIDIA

    @property
    def kind(self) -> str:
        """LMI's `deviceType`."""
        return self.accelerator.kind if self.gpus else "cpu"

    @property
    def first(self) -> int:
        """LMI's `deviceId`: the index of the first device, -1 for the CPU."""
        return self.gpus[0] if self.gpus else -1

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that make a worker see these devices and no other."""
        return {} if self.visible is None else dict.fromkeys(self.accelerator.variables, self.visible)


def visible_gpus(environment: Mapping[str, str], installed: int) -> tuple[str, ...]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES writes them.

    `installed` is the number of GPUs in the machine. Like CUDA, this ends the list at the first unknown entry.
    """
    return visible_by(environment.get(CUDA_VISIBLE_DEVICES), installed)


def visible_by(listed: str | None, installed: int) -> tuple[str, ...]:
    """Return the names of `installed` devices that a variable lists; all if it is not set (None)."""
    if listed is None:
        return tuple(str(index) for index in range(installed))
    if not installed:
        return ()
    return tuple(_known_devices(listed.split(","), installed))


def _known_devices(entries: Sequence[str], installed: int) -> Iterator[str]:
    for entry in (text.strip() for text in entries):
        named = entry.startswith(("GPU-", "MIG-"))  # by UUID
        if not named and not (entry.isdecimal() and int(entry) < installed):
            return
        yield entry


def installed_gpus() -> int:
    """Return the number of NVIDIA GPUs that the driver knows. It reads /proc: loading CUDA here would take seconds."""
    return len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0


def nvidia_driver() -> str | None:
    """Return the first line of what NVIDIA's driver says of itself, with its version; None if it is not loaded."""
    return _DRIVER.read_text().partition("\n")[0] if _DRIVER.is_file() else None


def plan_devices(
    load_on_devices: str, per_worker: int | None, gpus: Sequence[str], accelerator: Accelerator = NVIDIA
) -> tuple[DeviceSet, ...]:
    """Return the device sets of a model.

    `load_on_devices` is LMI's: "*", or entries separated by semicolons. An entry is the first device of a worker ("0",
    "gpu2", "nc4"), all of its devices ("gpu0+gpu1"), or "cpu". `per_worker` is the number of devices that one worker
    takes (the tensor parallel degree times the pipeline parallel degree), None for all of them. `gpus` are the visible
    devices, of the kind `accelerator`. Raises ConfigurationError if they do not suffice.
    """
    if load_on_devices.strip() == ALL_DEVICES:
        firsts = _every_set(per_worker, len(gpus), accelerator)
    else:
        named = (text.strip() for text in load_on_devices.split(";") if text.strip())
        firsts = [_devices_of_entry(text, per_worker, len(gpus), accelerator) for text in named]
    if not firsts:
        raise ConfigurationError(
            f'load_on_devices = "{excerpt(load_on_devices)}" names no device; use * for all of them'
        )
    _check_apart(load_on_devices, firsts)
    return tuple(DeviceSet(indices, _slice(indices, gpus), accelerator) for indices in firsts)


def _every_set(per_worker: int | None, available: int, accelerator: Accelerator) -> list[tuple[int, ...]]:
    if not available and per_worker in (None, 1):
        return [()]
    size = per_worker or available
    if size > available:
        raise ConfigurationError(
            f"a worker takes {size} {accelerator.noun}s (option.tensor_parallel_degree times"
            f" pipeline_parallel_degree), and {available} are visible; lower it, use max, or show more of them in"
            f" {accelerator.variables[0]}"
        )
    return [tuple(range(first, first + size)) for first in range(0, available - size + 1, size)]


def _devices_of_entry(text: str, per_worker: int | None, available: int, accelerator: Accelerator) -> tuple[int, ...]:
    """Return the devices of one entry of `load_on_devices`; an empty tuple is the CPU."""
    if text.lower() in _CPU:
        return ()
    parts = [_GPU.fullmatch(part.strip().lower()) for part in text.split("+")]
    listed = tuple(int(part[1]) for part in parts if part is not None)
    if len(listed) < len(parts):
        raise ConfigurationError(
            f'load_on_devices: "{excerpt(text)}" is not allowed; allowed: *, cpu, or {accelerator.noun}s as 0, '
            f"{accelerator.kind}1 or {accelerator.kind}0+{accelerator.kind}1, separated by semicolons"
        )
    size = per_worker or (len(listed) if len(listed) > 1 else max(1, available))
    indices = listed if len(listed) > 1 else tuple(range(listed[0], listed[0] + size))
    if len(indices) != size:
        raise ConfigurationError(
            f'load_on_devices: "{excerpt(text)}" names {len(indices)} {accelerator.noun}s, and a worker takes {size}'
        )
    if max(indices) >= available:
        raise ConfigurationError(
            f'load_on_devices: "{excerpt(text)}" with {size} {accelerator.noun}s to a worker needs {accelerator.noun}'
            f" {max(indices)}, and {available} are visible (counted from 0); use * or cpu, or show more of them in"
            f" {accelerator.variables[0]}"
        )
    return indices


def _check_apart(load_on_devices: str, sets: Sequence[tuple[int, ...]]) -> None:
    taken = [index for devices in sets for index in devices]
    if len(taken) > len(set(taken)) or sets.count(()) > 1:
        raise ConfigurationError(f'load_on_devices = "{excerpt(load_on_devices)}" gives one device to two workers')


def _slice(indices: Sequence[int], gpus: Sequence[str]) -> str | None:
    if not gpus:
        return None
    return ",".join(gpus[index] for index in indices)
