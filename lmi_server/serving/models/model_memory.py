"""Whether a model finds enough free memory to load, and the models to unload for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from lmi_server.configuration.checks.memory_estimate import estimate_of_files, shortages
from lmi_server.configuration.resolve import ResolvedModel
from lmi_server.contract.errors import ModelMemoryError
from lmi_server.machine.environment import is_multi_model
from lmi_server.machine.inventory import Machine, this_machine, with_gpu_memory
from lmi_server.serving.models.model import Model

logger = logging.getLogger(__name__)


class MemoryRoom:
    """Makes room for models; if it `unloads_idle` ones, those without requests go for others.

    SageMaker's multi-model endpoints load models until the server answers 507, and unload others then. So the need of a
    model that does not say it is estimated there.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        models: Callable[[], list[Model]],
        unload: Callable[[Model], Awaitable[None]],
    ) -> None:
        self.unloads_idle = False
        self._environment = environment
        self._models = models
        self._unload = unload

    async def make(self, model: Model, resolved: ResolvedModel) -> None:
        """Raise ModelMemoryError if less memory is free than `model` needs, and unloading others does not help."""
        estimates = self.unloads_idle or is_multi_model(self._environment)
        while shortage := await asyncio.to_thread(memory_shortage, resolved, self._environment, estimates):
            held = [each.resolved for each in self._idle() if each.resolved is not None]
            lacking = await asyncio.to_thread(memory_shortage, resolved, self._environment, estimates, held)
            idle = self._idle()
            if lacking or not idle:
                raise ModelMemoryError(shortage)
            logger.warning("model %s is unloaded to make room for model %s: %s", idle[0].label, model.label, shortage)
            await self._unload(idle[0])

    def _idle(self) -> list[Model]:
        """Return the models that may be unloaded, the one without a request for longest first."""
        idle = [
            (model.pool.dispatcher.used_at, model)
            for model in (self._models() if self.unloads_idle else ())
            if not (model.at_startup or model.is_reloading) and model.pool is not None and model.is_idle
        ]
        return [model for _, model in sorted(idle, key=lambda pair: pair[0])]


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
