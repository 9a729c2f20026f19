"""Tasks that a pipeline of transformers runs, with the inputs of many requests in one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from transformers.pipelines import Pipeline
from transformers.pipelines.base import PipelineException

from handlers.checkpoints.blocks.saved_blocks import BLOCKS
from handlers.checkpoints.options import BLOCK_FORMATS, PACKED_METHODS
from handlers.checkpoints.placement import refuse_divided_layers
from handlers.checkpoints.quantization import checkpoint_method
from handlers.checkpoints.text_length import TextLength
from handlers.checkpoints.transformers_loading import load_config, model_arguments, prepare
from handlers.tasks.options import PipelineOptions
from handlers.tasks.task import Task, file_bytes, read_image, read_object, read_text, same_names, texts
from lmi_server.contract.errors import ContextLengthError, ModelLoadError, RequestError, needs_extra
from lmi_server.dialects import fields
from lmi_server.dialects.fields import Field
from lmi_server.media.sounds import read_sound

_MAX_BATCH = 32  # inputs of one forward pass; a request may have any number of inputs

_COUNT = fields.integer(1)
_FUNCTION = fields.one_of("sigmoid", "softmax", "none")


def _text_or_pair(value: Any) -> Any:
    if isinstance(value, dict):
        pair = read_object(value, ("text",))
        return {name: read_text(pair[name]) for name in ("text", "text_pair") if pair.get(name) is not None}
    return read_text(value)


def _question_of_table(value: Any) -> Any:
    import pandas

    found = read_object(value, ("query", "table"))
    table = found["table"]
    if not isinstance(table, dict | list):
        raise fields.not_allowed("inputs.table", table, 'send {"column": ["cell", ...], ...}')
    try:
        frame = pandas.DataFrame(table).astype(str)
    except ValueError as error:
        raise RequestError(f"inputs.table is no table: {error}; send columns of the same length") from None
    if frame.empty:
        raise RequestError("inputs.table is empty; send at least one row")
    return {"table": frame, "query": read_text(found["query"])}


def _table_reader(pipeline: Any) -> Callable[[Any], Any]:
    with needs_extra("tables need", "tasks"):
        import pandas  # noqa: F401
    return _question_of_table


def sound_reader(pipeline: Any) -> Callable[[Any], Any]:
    """Return the reader of a sound's file, in bytes or base64, at the model's rate."""
    with needs_extra("sound needs", "tasks"):
        import soundfile  # noqa: F401
        import soxr  # noqa: F401
    sampling_rate = pipeline.feature_extractor.sampling_rate
    return lambda value: read_sound("inputs", file_bytes(value, "audio"), sampling_rate)


@dataclass(frozen=True)
class _Kind:
    """How requests of one task are read. `reader_for` gets the loaded pipeline and returns what reads an input."""

    parameters: Mapping[str, Field]
    read: Callable[[Any], Any] = read_text
    reader_for: Callable[[Any], Callable[[Any], Any]] | None = None  # in place of `read`
    required: tuple[str, ...] = ()
    object_fields: tuple[str, ...] = ()


_LABELS = {"candidate_labels": Field("candidate_labels", texts), **same_names(hypothesis_template=fields.string)}

_KINDS = {
    "fill-mask": _Kind(same_names(top_k=_COUNT, targets=texts)),
    "text-classification": _Kind(
        same_names(top_k=_COUNT, function_to_apply=_FUNCTION, truncation=fields.boolean, max_length=_COUNT),
        _text_or_pair,
    ),
    "token-classification": _Kind(
        same_names(
            aggregation_strategy=fields.one_of("none", "simple", "first", "average", "max"),
            ignore_labels=texts,
            stride=fields.integer(0),
        ),
    ),
    "zero-shot-classification": _Kind(
        {**_LABELS, **same_names(multi_label=fields.boolean)}, required=("candidate_labels",)
    ),
    "table-question-answering": _Kind(
        same_names(sequential=fields.boolean), reader_for=_table_reader, object_fields=("query", "table")
    ),
    "image-classification": _Kind(same_names(top_k=_COUNT, function_to_apply=_FUNCTION), read_image),
    "image-feature-extraction": _Kind(same_names(pool=fields.boolean), read_image),
    "object-detection": _Kind(same_names(threshold=fields.PROBABILITY), read_image),
    "zero-shot-image-classification": _Kind(_LABELS, read_image, required=("candidate_labels",)),
    "audio-classification": _Kind(same_names(top_k=_COUNT, function_to_apply=_FUNCTION), reader_for=sound_reader),
}
_ALONE = frozenset({"table-question-answering", "object-detection"})
"""Tasks whose pipelines cannot pad inputs of different sizes to one batch, or return other results if they do."""


class TransformersPipeline(Task):
    """Runs a pipeline of transformers on batches."""

    def __init__(self, task: str, path: str, options: PipelineOptions) -> None:
        kind = _KINDS[task]
        self.parameters = kind.parameters
        self.object_fields = kind.object_fields
        self._required = kind.required
        self._pipeline = load_pipeline(task, path, options)
        self.model, self.tokenizer = self._pipeline.model, self._pipeline.tokenizer
        self._read = kind.read if kind.reader_for is None else kind.reader_for(self._pipeline)
        self._text_length = TextLength(self.tokenizer)
        self._batches = task not in _ALONE and (self.tokenizer is None or self.tokenizer.pad_token_id is not None)
        self.max_length = _max_length(self._pipeline, options)

    def read(self, value: Any, parameters: Mapping[str, Any]) -> Any:
        return self._read(value)

    def run(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        for name in self._required:
            if name not in parameters:
                raise RequestError(f"parameters.{name} is missing; send at least one")
        order = sorted(range(len(inputs)), key=lambda index: -_length(inputs[index]))
        size = min(len(inputs), _MAX_BATCH) if self._batches else 1
        try:
            # Each pipeline overrides __call__ and unwraps single results in its own way. The base class returns exactly
            # one result per input.
            results = Pipeline.__call__(
                self._pipeline, [inputs[index] for index in order], batch_size=size, **parameters
            )
        except PipelineException as error:  # an input that the task cannot use; it is no ValueError
            raise RequestError(str(error)) from error
        placed = dict(zip(order, results, strict=True))
        return [placed[index] for index in range(len(inputs))]

    def input_error(self, value: Any) -> RequestError | None:
        if not isinstance(value, str) or self.tokenizer is None or not self.max_length:
            return None
        self._text_length.check(value, self.max_length + 1)
        count = len(self.tokenizer(value)["input_ids"])
        if count <= self.max_length:
            return None
        return ContextLengthError(
            f"an input has {count} tokens, and the model takes at most {self.max_length}; send a shorter one"
        )


def load_pipeline(task: str, path: str, options: PipelineOptions) -> Any:
    """Return a pipeline with the model in `path`. Raises ModelLoadError."""
    _refuse_saved_blocks(task, path, options)
    arguments = model_arguments(path, options)
    loading = {name: arguments.pop(name) for name in ("max_memory", "quantization_config") if name in arguments}
    try:
        place = {} if "device_map" in arguments else {"device": "cpu"}
        pipeline = transformers.pipeline(task, model=path, **place, **arguments, model_kwargs=loading)
    except ImportError as error:
        raise ModelLoadError(f"option.task={task} needs a Python package that is not installed: {error}") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # any of them if the directory is broken
        raise ModelLoadError(f"transformers cannot load {path} for {task}: {error}") from error
    refuse_divided_layers(pipeline.model, arguments.get("device_map"))
    prepare(pipeline.model, path, options)
    return pipeline


def _refuse_saved_blocks(task: str, path: str, options: PipelineOptions) -> None:
    """Raise ModelLoadError for blocks in files: pipelines load models by the config.json as it is."""
    method = checkpoint_method(load_config(path, options))
    becomes_blocks = method in PACKED_METHODS or options.quantize in BLOCK_FORMATS
    if method == BLOCKS or (options.save_mp_checkpoint_path is not None and becomes_blocks):
        raise ModelLoadError(
            f"option.task={task}: weights that are saved in blocks are not read for this task; use the plain checkpoint"
            f" and set option.quantize to one of {', '.join(BLOCK_FORMATS)}, which quantises it whenever it loads"
        )


def _max_length(pipeline: Any, options: PipelineOptions) -> int:
    """Return the maximum of tokens of a text; 0 if nothing limits them or inputs are no texts."""
    if options.max_model_len is not None:
        return options.max_model_len
    if pipeline.tokenizer is None:
        return 0
    positions = getattr(pipeline.model.config, "max_position_embeddings", None)
    return min(int(pipeline.tokenizer.model_max_length), positions or _NO_LIMIT) % _NO_LIMIT


_NO_LIMIT = 10**9  # tokenizers express "no limit" as 10**30


def _length(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    texts = list(value.values()) if isinstance(value, dict) else []
    return sum(map(len, texts)) if all(isinstance(text, str) for text in texts) else 0
