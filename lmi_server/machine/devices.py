"""Decides which devices each worker of a model gets: plain data in, plain data out.

A worker sees only its own slice of the visible GPUs (`CUDA_VISIBLE_DEVICES`), numbered from 0. So a handler works the
same on any of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmi_server.contract.errors import ConfigurationError

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
ALL_DEVICES = "*"

_GPUS = Path("/proc/driver/nvidia/gpus")
_GPU = re.compile(r"(?:gpu)?(\d+)")
_CPU = ("cpu", "-1")


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """The devices of one worker; `minWorkers` to `maxWorkers` workers share them.

    `gpus` are indices among the GPUs that the server sees; an empty tuple is the CPU. `visible` is the value of
    CUDA_VISIBLE_DEVICES in the worker; None leaves the variable unset, because there is no GPU to hide.
    """

    gpus: tuple[int, ...] = ()
    visible: str | None = None

    @property
    def kind(self) -> str:
        """LMI's `deviceType`."""
        return "gpu" if self.gpus else "cpu"

    @property
    def first(self) -> int:
        """LMI's `deviceId`: the index of the first GPU, -1 for the CPU."""
        return self.gpus[0] if self.gpus else -1

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that make a worker see these devices and no other."""
        return {} if self.visible is None else {CUDA_VISIBLE_DEVICES: self.visible}


def visible_gpus(environment: Mapping[str, str], installed: int) -> tuple[str, ...]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES writes them.

    `installed` is the number of GPUs in the machine. Like CUDA, this ends the list at the first unknown entry.
    """
    listed = environment.get(CUDA_VISIBLE_DEVICES)
    if listed is None:
        return tuple(str(index) for index in range(installed))
    if not installed:
        return ()
    return tuple(_known(listed.split(","), installed))


def _known(entries: Sequence[str], installed: int) -> Iterator[str]:
    for entry in (text.strip() for text in entries):
        named = entry.startswith(("GPU-", "MIG-"))  # by UUID
        if not named and not (entry.isdecimal() and int(entry) < installed):
            return
        yield entry


def installed_gpus() -> int:
    """Return the number of NVIDIA GPUs that the driver knows. It reads /proc: loading CUDA here would take seconds."""
    return len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0


def plan_devices(load_on_devices: str, per_worker: int | None, gpus: Sequence[str]) -> tuple[DeviceSet, ...]:
    """Return the device sets of a model.

    `load_on_devices` is LMI's: "*", or entries separated by semicolons. An entry is the first GPU of a worker ("0",
    "gpu2"), all of its GPUs ("gpu0+gpu1"), or "cpu". `per_worker` is the number of GPUs that one worker takes (the
    tensor parallel degree times the pipeline parallel degree), None for all of them. `gpus` are the visible ones.
    Raises ConfigurationError if they do not suffice.
    """
    if load_on_devices.strip() == ALL_DEVICES:
        firsts = _every_set(per_worker, len(gpus))
    else:
        firsts = [_named(text.strip(), per_worker, len(gpus)) for text in load_on_devices.split(";") if text.strip()]
    if not firsts:
        raise ConfigurationError(f'load_on_devices = "{load_on_devices}" names no device; use * for all of them')
    _check_apart(load_on_devices, firsts)
    return tuple(DeviceSet(indices, _slice(indices, gpus)) for indices in firsts)


def _every_set(per_worker: int | None, available: int) -> list[tuple[int, ...]]:
    if not available and per_worker in (None, 1):
        return [()]
    size = per_worker or available
    if size > available:
        raise ConfigurationError(
            f"a worker takes {size} GPUs (option.tensor_parallel_degree times pipeline_parallel_degree), and "
            f"{available} are visible; lower it, use max, or show more of them in {CUDA_VISIBLE_DEVICES}"
        )
    return [tuple(range(first, first + size)) for first in range(0, available - size + 1, size)]


def _named(text: str, per_worker: int | None, available: int) -> tuple[int, ...]:
    """Return the GPUs of one entry of `load_on_devices`; an empty tuple is the CPU."""
    if text.lower() in _CPU:
        return ()
    parts = [_GPU.fullmatch(part.strip().lower()) for part in text.split("+")]
    listed = tuple(int(part[1]) for part in parts if part is not None)
    if len(listed) < len(parts):
        raise ConfigurationError(
            f'load_on_devices: "{text}" is not allowed; allowed: *, cpu, or GPUs as 0, gpu1 or gpu0+gpu1, '
            "separated by semicolons"
        )
    size = per_worker or (len(listed) if len(listed) > 1 else max(1, available))
    indices = listed if len(listed) > 1 else tuple(range(listed[0], listed[0] + size))
    if len(indices) != size:
        raise ConfigurationError(f'load_on_devices: "{text}" names {len(indices)} GPUs, and a worker takes {size}')
    if max(indices) >= available:
        raise ConfigurationError(
            f'load_on_devices: "{text}" with {size} GPUs to a worker needs GPU {max(indices)}, and {available} are '
            "visible (counted from 0); use * or cpu, or show more of them in CUDA_VISIBLE_DEVICES"
        )
    return indices


def _check_apart(load_on_devices: str, sets: Sequence[tuple[int, ...]]) -> None:
    taken = [index for devices in sets for index in devices]
    if len(taken) > len(set(taken)) or sets.count(()) > 1:
        raise ConfigurationError(f'load_on_devices = "{load_on_devices}" gives one device to two workers')


def _slice(indices: Sequence[int], gpus: Sequence[str]) -> str | None:
    if not gpus:
        return None
    return ",".join(gpus[index] for index in indices)
