"""The GPUs of this worker: whether torch can use the server's GPUs, and which of them each rank has.

Only this module asks torch which GPUs there are. torch falls back to the CPU in silence if it is built for
CPUs, or if the driver is too old for it; a worker that has GPUs must not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmi_server.contract.errors import ModelLoadError, first_line
from lmi_server.contract.ranks import Rank
from lmi_server.machine.environment import process_environment
from lmi_server.machine.inventory import shown_gpus

_Capability = tuple[int, int]
# The first generation that multiplies bfloat16; before it torch computes with float32, or not at all.
_BF16_SINCE: _Capability = (8, 0)
_ON_CPU = "or set load_on_devices=cpu"


@dataclass(frozen=True)
class TorchGpus:
    """What torch says of GPUs: the usable `count`, their compute `capabilities`, and the ones it is `built_for`.

    `build` is its version with CUDA's or ROCm's (`has_cuda`); `failure` says why the driver cannot be used.
    """

    build: str
    has_cuda: bool
    count: int = 0
    failure: str = ""
    capabilities: Sequence[_Capability] = ()
    built_for: Sequence[_Capability] = ()


NO_GPUS = TorchGpus("", has_cuda=False)
"""For a model that is on the CPU whatever GPUs there are."""


def torch_gpus() -> TorchGpus:
    """Ask torch."""
    version = torch.version.cuda or torch.version.hip
    if version is None:
        return TorchGpus(f"torch {torch.__version__}", has_cuda=False)
    build = f"torch {torch.__version__} for {'CUDA' if torch.version.cuda else 'ROCm'} {version}"
    if not torch.cuda.is_available():
        return TorchGpus(build, has_cuda=True, failure=_failure())
    count = torch.cuda.device_count()
    capabilities = [torch.cuda.get_device_capability(index) for index in range(count)]
    return TorchGpus(build, True, count, "", capabilities, _architectures_of())


def _failure() -> str:
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return first_line(error)
    return "no device is visible to it"


def _architectures_of() -> list[_Capability]:
    names = [name.removeprefix("sm_").rstrip("af") for name in torch.cuda.get_arch_list() if name.startswith("sm_")]
    return [(int(name[:-1]), int(name[-1])) for name in names]


def gpu_fault(granted: Sequence[str], variable: str, found: TorchGpus) -> str | None:
    """Return why torch cannot use the GPUs that `variable` shows to this process, with the remedy; None if it can."""
    if not granted:
        return None
    these = f"this worker has {len(granted)} GPU{'s' * (len(granted) > 1)} ({variable}={','.join(granted)})"
    if not found.has_cuda:
        return f"{these}, and {found.build} is built for CPUs; install the build of torch for GPUs, {_ON_CPU}"
    if found.failure:
        return (
            f"{these}, and {found.build} cannot use them: {found.failure}; update the driver, install a build of torch"
            f" that fits it, {_ON_CPU}"
        )
    if found.count < len(granted):
        return f"{these}, and {found.build} sees {found.count}; look at what nvidia-smi says of the others, {_ON_CPU}"
    return _too_old(these, found)


def _too_old(these: str, found: TorchGpus) -> str | None:
    oldest = min(found.capabilities, default=(0, 0))
    if not found.built_for or oldest >= min(found.built_for):
        return None
    built = ".".join(map(str, min(found.built_for)))
    return (
        f"{these} of compute capability {'.'.join(map(str, oldest))}, and {found.build} is built for {built} and later;"
        f" install an older build of torch, {_ON_CPU}"
    )


def usable_gpus() -> TorchGpus:
    """Return the GPUs that torch can use. Raises ModelLoadError if this worker has one that torch cannot use."""
    accelerator, granted = shown_gpus(process_environment())
    found = torch_gpus()
    fault = gpu_fault([gpu.name for gpu in granted], accelerator.variables[0], found)
    if fault is not None:
        raise ModelLoadError(fault)
    return found


def lack_bf16(gpus: TorchGpus) -> bool:
    """Return whether a GPU has no arithmetic in bfloat16."""
    return torch.version.hip is None and any(capability < _BF16_SINCE for capability in gpus.capabilities)


def free_memory(gpus: TorchGpus) -> list[int]:
    """Return the free bytes of each GPU."""
    return [torch.cuda.mem_get_info(index)[0] for index in range(gpus.count)]


def own_gpu(rank: Rank) -> torch.device | None:
    """Return the GPU of a rank, and make it the current one; None if there are no GPUs.

    Raises ModelLoadError if there are fewer GPUs than ranks.
    """
    count = usable_gpus().count
    if not count:
        return None
    if rank.size > count:
        raise ModelLoadError(
            f"option.tensor_parallel_degree={rank.size}, and torch sees {count} GPUs, but each rank needs one;"
            f" lower it to {count}"
        )
    device = torch.device("cuda", rank.rank)
    torch.cuda.set_device(device)
    return device


def describe_gpus() -> tuple[list[str], str | None]:
    """Return the report of `lmi-server devices` on torch and its GPUs, and the fault of the others."""
    accelerator, granted = shown_gpus(process_environment())
    found = torch_gpus()
    kind = found.build if found.has_cuda else f"{found.build}, built for CPUs"
    lines = [kind, *(_line(index, found.capabilities[index]) for index in range(found.count))]
    return lines, gpu_fault([gpu.name for gpu in granted], accelerator.variables[0], found)


def _line(index: int, capability: _Capability) -> str:
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
    dtype = "fp16" if torch.version.hip is None and capability < _BF16_SINCE else "bf16"
    return (
        f"cuda:{index}: {torch.cuda.get_device_name(index)}, compute capability {'.'.join(map(str, capability))},"
        f" {free:.1f} of {total:.1f} GiB free; checkpoints in bf16 are loaded as {dtype}"
    )
