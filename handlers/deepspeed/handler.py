"""The deepspeed handlers: causal language models under the rolling batch, and whole tasks, through DeepSpeed.

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

if TYPE_CHECKING:
    from handlers.rolling_batch.communicator import Communicator
    from handlers.rolling_batch.engine_loading import LoadedModel
    from handlers.tasks.task import Task


class DeepSpeedHandler(RollingBatchHandler):
    """Serves a causal language model that DeepSpeed has split, under this project's own rolling batch."""

    def load_model(self, model_dir: str, options: DeepSpeedOptions) -> LoadedModel:
        from handlers.deepspeed.model import load

        return load(options.model_id or model_dir, options.within(model_dir))


class DeepSpeedTaskHandler(TaskHandler):
    """Serves one task of one model. The ranks of a group read and run the same batches; rank 0 answers them."""

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
        from handlers.deepspeed.batch_messages import Batch, encode

        batch = Batch(secrets.randbits(63), list(requests))
        self._communicator.broadcast(encode(batch))
        return self._together(batch)

    def follow(self, model_dir: str, options: DeepSpeedOptions) -> None:
        self.start(model_dir, options)
        from handlers.deepspeed.batch_messages import Batch, decode

        assert self._communicator is not None
        while isinstance(message := decode(self._communicator.receive()), Batch):
            self._together(message)

    def stop(self) -> None:
        if self._communicator is not None:
            from handlers.deepspeed.batch_messages import Stop, encode

            self._communicator.broadcast(encode(Stop()))

    def _together(self, batch: Any) -> Sequence[Response | LmiServerError]:
        """Answer a batch as all ranks do, with the same random numbers.

        One that fails here may run on elsewhere: the ranks are not at the same place any more, and the process ends.
        """
        import torch

        torch.manual_seed(batch.seed)
        outcomes = super().handle(batch.requests)
        failed = [outcome for outcome in outcomes if isinstance(outcome, HandlerError | ModelMemoryError)]
        if failed:
            raise SystemExit(f"a batch failed on this rank: {failed[0].message}")
        return outcomes
