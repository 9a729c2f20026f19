"""Whether a model that is to be loaded finds enough free memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lmi_server.configuration.model_directory.memory_estimate import estimate_of_files, shortages
from lmi_server.configuration.resolve import ResolvedModel
from lmi_server.machine.inventory import Machine, this_machine, with_gpu_memory


def memory_shortage(
    resolved: ResolvedModel, environment: Mapping[str, str], estimates: bool, without: Sequence[ResolvedModel] = ()
) -> str:
    """Return how much memory a model lacks, empty if it has enough.

    `estimates` says whether to estimate the need of a model that does not say it. The answer is for the time when the
    models in `without` are unloaded.
    """
    serving, machine = resolved.serving, this_machine(environment)
    estimated = _required_mb(resolved) if estimates and not serving.required_memory_mb else 0
    if estimated or serving.gpu_required_memory_mb or serving.gpu_reserved_memory_mb:
        machine = with_gpu_memory(machine, environment)
    missing = shortages(serving, _with_more_free(machine, sum(map(_required_mb, without)) * 2**20), estimated)
    return "; ".join(f"{key}: {text}" for key, text in missing.items())


def _required_mb(resolved: ResolvedModel) -> int:
    """Return the MiB that a model needs, estimated from its files if it does not say it."""
    said = resolved.serving.required_memory_mb
    return said or estimate_of_files({resolved.model_dir, resolved.options.model_id or resolved.model_dir})


def _with_more_free(machine: Machine, more: int) -> Machine:
    gpus = [gpu if gpu.free_bytes is None else replace(gpu, free_bytes=gpu.free_bytes + more) for gpu in machine.gpus]
    return replace(machine, available_bytes=machine.available_bytes + more, gpus=tuple(gpus))
