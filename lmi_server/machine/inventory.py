"""What the machine has, as far as a configuration depends on it.

It is a plain value, so that `explain` and tests can ask about machines other than this one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from lmi_server.machine import device_tools
from lmi_server.machine.device_tools import Gpu
from lmi_server.machine.devices import AMD, GAUDI, NEURON, NVIDIA, Accelerator, installed_gpus, visible_gpus
from lmi_server.machine.memory import free_and_total
from lmi_server.machine.mpi import MpiRun, find_mpirun

_CONTAINER_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU time (or "max") in a period, and the period
# The same two numbers in version 1 of control groups, -1 for no quota.
_OLD_QUOTA = [Path("/sys/fs/cgroup/cpu") / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]


@dataclass(frozen=True, slots=True)
class Machine:
    """Main memory in bytes, visible devices, the Python packages of engines that are installed, the MPI launcher.

    `gpus` are NVIDIA's, or AMD's if `gpu_accelerator` says so. `neuron_cores` is empty if there are Neuron devices, but
    no neuron-ls that says how many cores they have. `cores` is the number of cores that a process may use at once,
    under a container's quota and OMP_NUM_THREADS; `seen_cores` is the number found by libraries, which know nothing of
    quotas (0: not known). `omp_threads` is OMP_NUM_THREADS. `cpu_workers` is LMI's number of workers that share the
    cores under load: cores / OMP_NUM_THREADS, or 2 if that is not set.
    """

    total_bytes: int
    available_bytes: int
    cores: int = 1
    seen_cores: int = 0
    omp_threads: int | None = None
    cpu_workers: int = 1
    gpus: tuple[Gpu, ...] = ()
    gpu_accelerator: Accelerator = NVIDIA
    neuron_devices: int = 0
    neuron_cores: tuple[Gpu, ...] = ()
    gaudi_cards: tuple[Gpu, ...] = ()
    engines: frozenset[str] = frozenset()
    mpirun: MpiRun | None = None

    @property
    def device_kind(self) -> str:
        """Return the prefix that LMI gives keys for machines of this kind: gpu, nc or cpu; hpu with Gaudi cards."""
        if self.gpus:
            return "gpu"
        if self.neuron_devices or self.neuron_cores:
            return "nc"
        return "hpu" if self.gaudi_cards else "cpu"

    def accelerator(self, kind: str) -> tuple[Accelerator, tuple[Gpu, ...]]:
        """Return the devices of a kind (`device_kind`), and what they are; none of them for "cpu"."""
        if kind == NEURON.kind:
            return NEURON, self.neuron_cores
        if kind == GAUDI.kind:
            return GAUDI, self.gaudi_cards
        return self.gpu_accelerator, self.gpus


def this_machine(environment: Mapping[str, str], engines: Iterable[str] = ()) -> Machine:
    """Return the resources of this machine, under the limits of the variables; the memory of GPUs is not measured.

    `engines` are the Python packages to look for.
    """
    available, total = free_and_total()
    cores, threads = _cores(), _threads(environment)
    accelerator, gpus = shown_gpus(environment)
    return Machine(
        total_bytes=total,
        available_bytes=available,
        cores=min(cores, threads or cores),
        seen_cores=len(os.sched_getaffinity(0)),
        omp_threads=threads,
        cpu_workers=max(1, cores // threads) if threads else 2,
        gpus=gpus,
        gpu_accelerator=accelerator,
        neuron_devices=len(list(Path("/dev").glob("neuron[0-9]*"))),
        neuron_cores=_neuron_cores(environment),
        gaudi_cards=_visible_devices(device_tools.gaudi_cards(environment), environment.get(GAUDI.variables[0])),
        engines=frozenset(name for name in engines if _is_installed(name)),
        mpirun=find_mpirun(environment),
    )


def shown_gpus(environment: Mapping[str, str]) -> tuple[Accelerator, tuple[Gpu, ...]]:
    """Return the GPUs that a process with these variables may use.

    They are NVIDIA's from the driver, which takes no time, or else AMD's.
    """
    installed = installed_gpus()
    found = device_tools.known_amd_gpus(environment) if not installed else ()
    if not found:
        return NVIDIA, tuple(Gpu(name) for name in visible_gpus(environment, installed))
    listed = next((environment[name] for name in AMD.variables if name in environment), None)
    return AMD, tuple(Gpu(gpu.name) for gpu in _visible_devices(found, listed))


def _neuron_cores(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the cores that the Neuron runtime would take in a process with these variables."""
    cores = device_tools.neuron_cores(environment)
    listed, count = (environment.get(name) for name in (NEURON.variables[0], "NEURON_RT_NUM_CORES"))
    if listed is not None:
        return _visible_devices(cores, ",".join(device_tools.listed_cores(listed)))
    return cores[: int(count)] if count is not None and count.isdecimal() else cores


def _visible_devices(devices: tuple[Gpu, ...], listed: str | None) -> tuple[Gpu, ...]:
    """Return the devices that a variable lists; all of them if it is not set."""
    named = {device.name: device for device in devices}
    return devices if listed is None else tuple(named[name] for name in _names(listed) if name in named)


def _names(listed: str) -> Iterator[str]:
    return (name.strip() for name in listed.split(","))


def with_gpu_memory(machine: Machine, environment: Mapping[str, str]) -> Machine:
    """Return `machine` with the memory of its GPUs as the vendor's tool measures it, which takes about a second."""
    if not machine.gpus:
        return machine
    is_amd = machine.gpu_accelerator == AMD
    found = device_tools.amd_gpus(environment) if is_amd else device_tools.nvidia_gpus(environment)
    measured = {gpu.name: gpu for gpu in found}
    return replace(machine, gpus=tuple(measured.get(gpu.name, gpu) for gpu in machine.gpus))


def _cores() -> int:
    """Return the number of cores that affinity and the container's quota allow."""
    limits = [len(os.sched_getaffinity(0))]
    files = [_CONTAINER_QUOTA] if _CONTAINER_QUOTA.is_file() else _OLD_QUOTA
    words = [word for file in files if file.is_file() for word in file.read_text().split()]
    if len(words) == 2 and all(map(str.isdecimal, words)):
        limits.append(math.ceil(int(words[0]) / int(words[1])))
    return max(1, min(limits))


def _threads(environment: Mapping[str, str]) -> int | None:
    """Return how many threads each process should use at most; None if OMP_NUM_THREADS does not say."""
    asked = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) else None


def _is_installed(package: str) -> bool:
    parent = package.partition(".")[0]
    return find_spec(parent) is not None and (parent == package or find_spec(package) is not None)
