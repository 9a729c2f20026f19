"""What a failing GPU does to requests: a lack of memory ends those of the step, a lost device ends the worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rolling_batch_helpers import EOS, Received
from tiny_models import CONTEXT, byte_tokenizer

from handlers.rolling_batch.engine import RollingBatchEngine
from handlers.rolling_batch.lora.layers import LoraLayers
from handlers.rolling_batch.runner.step_runner import StepLogits
from handlers.rolling_batch.schedule.plan import StepPlan
from handlers.rolling_batch.schedule.scheduler import Scheduler, SchedulerLimits
from handlers.step_loop import EngineLostError
from handlers.tasks.handler import PipelineHandler
from handlers.tasks.task_handler import TaskRequest
from lmi_server.contract.errors import HandlerError, LmiServerError, ModelMemoryError, is_device_failure
from lmi_server.contract.generation import SamplingParameters

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
NO_WORKSPACE = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class FailingRunner:
    """A step runner that stands for a GPU: every step raises `error`."""

    vocabulary = 256
    scores_prompts = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    @property
    def lora(self) -> LoraLayers:
        raise AssertionError("no adapters")

    def run(self, plan: StepPlan, prompt_scored: set[int], before: torch.Tensor | None = None) -> StepLogits:
        raise self._error

    def stop(self) -> None:
        """Nothing runs."""


def failed_step(error: Exception) -> LmiServerError | None:
    """Return the error that a request gets if its step raises `error`."""
    scheduler = Scheduler(SchedulerLimits(1, CONTEXT, 16, 16, 2))
    engine = RollingBatchEngine(FailingRunner(error), scheduler, byte_tokenizer(), frozenset({EOS}), CONTEXT)
    answer = Received()
    engine.add("a", [1, 2, 3], SamplingParameters(max_new_tokens=2), "", 3, answer.take)
    with pytest.raises(type(error)) as raised:
        engine.step()
    engine.fail_running(raised.value)
    return answer.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OUT_OF_MEMORY, ModelMemoryError), (NO_WORKSPACE, ModelMemoryError), (RuntimeError("shapes"), HandlerError)],
)
def test_a_step_without_memory_is_told_from_any_other_failure(error: Exception, kind: Any) -> None:
    reported = failed_step(error)
    assert type(reported) is kind
    assert str(error) in str(reported)


def test_a_failed_device_ends_the_engine() -> None:
    with pytest.raises(EngineLostError, match="the device failed in a step: AcceleratorError: CUDA error: an illegal"):
        failed_step(ILLEGAL)


def test_what_counts_as_a_failed_device() -> None:
    assert is_device_failure(RuntimeError("CUDA error: device-side assert triggered"))
    assert is_device_failure(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"))
    assert not is_device_failure(torch.AcceleratorError("CUDA error: out of memory"))
    assert not is_device_failure(NO_WORKSPACE)
    assert not is_device_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


class FailingTask:
    """A task whose model is on a GPU that fails."""

    def run(self, inputs: Any, parameters: Any) -> Any:
        raise ILLEGAL


def test_a_failed_device_ends_the_worker_of_a_static_batch() -> None:
    handler: Any = PipelineHandler()
    handler._task = FailingTask()
    with pytest.raises(SystemExit, match="the GPU failed: AcceleratorError: CUDA error: an illegal memory access"):
        handler.answers([TaskRequest(["a"], lambda results: None, {})] * 2)  # type: ignore[arg-type,return-value]
