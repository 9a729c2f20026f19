"""The options of the pipeline handler: tasks that are not the decoding of a rolling batch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from handlers.checkpoints.options import TransformersEngine, TransformersOptions
from lmi_server.configuration.declaration import Allowed, Unavailable
from lmi_server.configuration.options import PositiveInt, RollingBatch, lower
from lmi_server.configuration.references import NAMES_NOTHING
from lmi_server.configuration.tasks import canonical_task
from lmi_server.machine.inventory import Machine

SPEECH_RECOGNITION = "automatic-speech-recognition"
TASKS = (
    "audio-classification",
    SPEECH_RECOGNITION,
    "feature-extraction",
    "fill-mask",
    "image-classification",
    "image-feature-extraction",
    "object-detection",
    "question-answering",
    "summarization",
    "table-question-answering",
    "text-classification",
    "text-embedding",
    "text-generation",
    "text2text-generation",
    "token-classification",
    "translation",
    "zero-shot-classification",
    "zero-shot-image-classification",
)
GENERATING = ("text-generation", "text2text-generation", "summarization", "translation")
TRANSLATION = re.compile(r"translation_([A-Za-z-]+)_to_([A-Za-z-]+)")


def _known_task(task: str) -> str:
    if task not in TASKS and TRANSLATION.fullmatch(task) is None:
        raise ValueError("not a task of this handler")
    return task


Task = Annotated[
    str,
    BeforeValidator(canonical_task),
    AfterValidator(_known_task),
    Allowed(", ".join((*TASKS, "translation_XX_to_YY"))),
]
Pooling = Literal["auto", "cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


class PipelineOptions(TransformersOptions):
    """Keys of serving.properties for a model whose requests are whole tasks: classified, embedded, answered."""

    task: Annotated[Task | None, NAMES_NOTHING] = None
    """Task of the model; inferred from its architecture if not set."""
    rolling_batch: Annotated[
        RollingBatch,
        Unavailable(
            lambda name: name not in ("auto", "disable"), "use disable: a rolling batch decodes causal language models"
        ),
    ] = "disable"
    """Requests run together as one dynamic batch (batch_size)."""
    enable_streaming: Annotated[Literal["true", "false", "huggingface"], BeforeValidator(lower)] = "false"
    """Answer tasks that generate text as JSON lines, one per step; huggingface is like true."""
    pooling: Annotated[Pooling, BeforeValidator(lower)] = "auto"
    """How text-embedding makes a vector of a text's tokens; auto: what the model's files say, or mean."""
    normalize: bool = True
    """Give vectors of text-embedding the length 1."""
    max_model_len: PositiveInt | None = None
    """Tokens of an input at most; without it what the model's files allow."""

    @property
    def streams(self) -> bool:
        return self.enable_streaming != "false"

    def context_length(self) -> int | None:
        return self.max_model_len


class PipelineEngine(TransformersEngine):
    """transformers, which answers whole tasks."""

    options: PipelineOptions

    def without_effect(self, machine: Machine) -> Iterator[tuple[str, Collection[str]]]:
        task = self.options.task
        formats = ("output_formatter", "input_formatter", "tgi_compat")
        concurrent = task == SPEECH_RECOGNITION
        yield "a rolling batch", ("async_mode", *formats, *(() if concurrent else ("max_rolling_batch_size",)))
        if task != "text-embedding":
            yield "option.task=text-embedding", ("pooling", "normalize")
        if task is not None and not generates(task):
            yield "a task that generates text", ("enable_streaming",)


def generates(task: str) -> bool:
    """Tell whether the task writes a text token by token."""
    return task in GENERATING or task.startswith("translation_")
