"""What the machine has, as far as a configuration depends on it.

It is a plain value, so that `explain` and tests can ask about machines other than this one.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from lmi_server.machine.devices import installed_gpus, visible_gpus
from lmi_server.machine.memory import free_and_total
from lmi_server.machine.mpi import MpiRun, find_mpirun

_CONTAINER_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU time (or "max") in a period, and the period
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: its name in CUDA_VISIBLE_DEVICES, and the bytes of its memory, None if they were not measured."""

    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Main memory in bytes, visible GPUs, the Python packages of engines that are installed, the MPI launcher.

    `cores` is the number of cores that a process may use at once. `cpu_workers` is LMI's number of workers that share
    the cores under load: cores / OMP_NUM_THREADS, or 2 if that is not set.
    """

    total_bytes: int
    available_bytes: int
    cores: int = 1
    cpu_workers: int = 1
    gpus: tuple[Gpu, ...] = ()
    neuron_devices: int = 0
    engines: frozenset[str] = frozenset()
    mpirun: MpiRun | None = None

    @property
    def device_kind(self) -> str:
        """Return the prefix that LMI gives keys for machines of this kind: gpu, nc or cpu."""
        if self.gpus:
            return "gpu"
        return "nc" if self.neuron_devices else "cpu"


def this_machine(environment: Mapping[str, str], engines: Iterable[str] = ()) -> Machine:
    """Return what this machine has, under the limits that the variables set; the memory of GPUs is not measured.

    `engines` are the Python packages to look for.
    """
    available, total = free_and_total()
    cores, threads = _cores(), _threads(environment)
    return Machine(
        total_bytes=total,
        available_bytes=available,
        cores=min(cores, threads or cores),
        cpu_workers=max(1, cores // threads) if threads else 2,
        gpus=tuple(Gpu(name) for name in visible_gpus(environment, installed_gpus())),
        neuron_devices=len(list(Path("/dev").glob("neuron[0-9]*"))),
        engines=frozenset(name for name in engines if _is_installed(name)),
        mpirun=find_mpirun(environment),
    )


def with_gpu_memory(machine: Machine) -> Machine:
    """Return `machine` with the memory of its GPUs as nvidia-smi measures it, which takes about a second."""
    if not machine.gpus or shutil.which("nvidia-smi") is None:
        return machine
    measured = dict(_gpu_memory())
    return replace(machine, gpus=tuple(measured.get(gpu.name, gpu) for gpu in machine.gpus))


def _gpu_memory() -> Iterator[tuple[str, Gpu]]:
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    for line in found.stdout.splitlines():
        index, uuid, total, free = (field.strip() for field in line.split(","))
        if total.isdecimal() and free.isdecimal():
            for name in (index, uuid):
                yield name, Gpu(name, int(total) * _MIB, int(free) * _MIB)


def _cores() -> int:
    """Return the number of cores that affinity and the container's quota allow."""
    limits = [len(os.sched_getaffinity(0))]
    quota, _, period = (_CONTAINER_QUOTA.read_text() if _CONTAINER_QUOTA.is_file() else "max").strip().partition(" ")
    if quota.isdecimal() and period.isdecimal():
        limits.append(math.ceil(int(quota) / int(period)))
    return max(1, min(limits))


def _threads(environment: Mapping[str, str]) -> int | None:
    """Return how many threads each process should use at most; None if OMP_NUM_THREADS does not say."""
    asked = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) else None


def _is_installed(package: str) -> bool:
    parent = package.partition(".")[0]
    return find_spec(parent) is not None and (parent == package or find_spec(package) is not None)
