"""The deepspeed handlers: models that DeepSpeed splits, under this project's rolling batch or for whole tasks.

Torch, transformers and DeepSpeed are imported when the model loads, never with this module.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from handlers.deepspeed.options import DeepSpeedOptions
from handlers.rolling_batch.handler import RollingBatchHandler
from handlers.tasks.task_handler import TaskHandler
from lmi_server.contract.errors import HandlerError, LmiServerError, ModelMemoryError
from lmi_server.contract.handler import Response
from lmi_server.contract.protocol import Input
from lmi_server.processes import model_imports

if TYPE_CHECKING:
    from handlers.ranks.communicator import Communicator
    from handlers.rolling_batch.engine_loading import LoadedModel
    from handlers.tasks.task import Task


class DeepSpeedHandler(RollingBatchHandler):
    """Serves a causal language model under this project's own rolling batch."""

    def load_model(self, model_dir: str, options: DeepSpeedOptions) -> LoadedModel:
        from handlers.deepspeed.model import load

        return load(options.model_id or model_dir, options.within(model_dir))


class DeepSpeedTaskHandler(TaskHandler):
    """Serves one task of a model.

    On several ranks, rank 0 sends each batch of requests to the others as it came. All ranks parse and run it, because
    the task's own code (generation, pooling) calls the model, whose layers need every rank. Rank 0 alone answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._communicator: Communicator | None = None

    def load_task(self, task: str, model_dir: str, options: DeepSpeedOptions) -> Task:
        from handlers.deepspeed.tasks import load_task

        loaded, self._communicator = load_task(task, options.model_id or model_dir, options.within(model_dir))
        return loaded

    def handle(self, requests: Sequence[Input]) -> Sequence[Response | LmiServerError]:
        if self._communicator is None:
            return super().handle(requests)
        from handlers.batch_messages import Batch, encode

        batch = Batch(secrets.randbits(63), list(requests))
        self._communicator.broadcast(encode(batch))
        return self._handle_on_all_ranks(batch)

    def follow(self, model_dir: str, options: DeepSpeedOptions) -> None:
        self.start(model_dir, options)
        model_imports.finish_loading()
        from handlers.batch_messages import Batch, decode

        assert self._communicator is not None
        while isinstance(message := decode(self._communicator.receive()), Batch):
            self._handle_on_all_ranks(message)

    def stop(self) -> None:
        if self._communicator is not None:
            from handlers.batch_messages import Stop, encode

            self._communicator.broadcast(encode(Stop()))

    def _handle_on_all_ranks(self, batch: Any) -> Sequence[Response | LmiServerError]:
        """Run a batch, as all ranks do at the same time and with the same random numbers. Returns the outcomes.

        A failure of the model ends the process, and with it the group: other ranks may not have failed, and then wait
        for this one inside a layer. Errors of the requests themselves are the same on all ranks and end nothing.
        """
        import torch

        torch.manual_seed(batch.seed)
        outcomes = super().handle(batch.requests)
        failed = [outcome for outcome in outcomes if isinstance(outcome, HandlerError | ModelMemoryError)]
        if failed:
            raise SystemExit(f"a batch failed on this rank: {failed[0].message}")
        return outcomes
