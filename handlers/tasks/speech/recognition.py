"""The task automatic-speech-recognition: sounds to texts, in steps of one chunk each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from handlers.tasks.options import PipelineOptions
from handlers.tasks.speech.transcription import ChunkedTranscription, GrowingText, Transcription
from handlers.tasks.task import Piece, Task, same_names
from handlers.tasks.transformers_pipeline import sound_reader
from lmi_server.contract.errors import RequestError
from lmi_server.dialects import fields
from lmi_server.dialects.fields import Field

_CHUNK_S = 30.0  # seconds of the chunks of a longer sound, unless the request says otherwise
_SHORTEST_STEP_S = 0.1  # from chunk to chunk: each is a pass of the model, however short it is
_SECONDS = fields.number(lambda value: value >= 0, "a number of seconds, 0 or more")
_FOR_WHISPER = ("language", "task", "prompt", "temperature", "num_beams", "condition_on_prev_tokens")


def _strides(name: str, value: Any) -> Any:
    if isinstance(value, list) and len(value) == 2:
        return tuple(_SECONDS(name, item) for item in value)
    return _SECONDS(name, value)


def _timestamps(name: str, value: Any) -> bool | str:
    if value not in (True, False, "char", "word"):
        raise fields.not_allowed(name, value, "send true, false, char or word")
    return value  # type: ignore[no-any-return]


def _not_whisper(name: str, value: Any) -> Any:
    raise RequestError(f"{name} is for models of Whisper, which this one is not; leave it out")


PARAMETERS = same_names(
    chunk_length_s=_SECONDS,
    stride_length_s=_strides,
    return_timestamps=_timestamps,
    return_duration=fields.boolean,
    details=fields.boolean,
)
OF_RESULT = ("return_duration", "details")
"""The parameters that say what is in a result beside the text and its times."""


class SpeechRecognition(Task):
    """Writes down sounds with a pipeline of transformers, chunk by chunk.

    With `return_duration` or `details` a result also has the duration in seconds. `advance` is called from one thread
    at a time; `begin` and `read` may be called from others meanwhile.
    """

    parameters: Mapping[str, Field] = MappingProxyType(
        {**PARAMETERS, **same_names(**dict.fromkeys(_FOR_WHISPER, _not_whisper))}
    )

    def __init__(self, pipeline: Any, options: PipelineOptions) -> None:
        self.pipeline = pipeline
        self.model, self.tokenizer = pipeline.model, pipeline.tokenizer
        self.sampling_rate = pipeline.feature_extractor.sampling_rate
        self._read = sound_reader(pipeline)

    def read(self, value: Any, parameters: Mapping[str, Any]) -> Any:
        return self._read(value)

    def check(self, parameters: Mapping[str, Any]) -> None:
        if parameters.get("return_timestamps") is True and self.pipeline.type != "seq2seq_whisper":
            raise fields.not_allowed(
                "parameters.return_timestamps", True, "send word or char: only Whisper has times of segments"
            )
        chunk = parameters.get("chunk_length_s", 0) or _CHUNK_S
        strides = parameters.get("stride_length_s", chunk / 6)
        left, right = strides if isinstance(strides, tuple) else (strides, strides)
        if chunk - left - right < _SHORTEST_STEP_S:
            raise RequestError(
                f"parameters.stride_length_s: {left} and {right} of chunks of {chunk} seconds are not allowed; leave"
                f" {_SHORTEST_STEP_S} seconds of a chunk or more between them"
            )

    def begin(self, samples: Any, parameters: Mapping[str, Any]) -> Transcription:
        """Return a sound without results yet."""
        asked = {name: value for name, value in parameters.items() if name not in OF_RESULT}
        if self.pipeline.type.startswith("ctc") and not asked.get("chunk_length_s"):
            asked["chunk_length_s"] = _CHUNK_S if len(samples) > _CHUNK_S * self.sampling_rate else 0
        return self.begin_chunks(samples, parameters, asked)

    def begin_chunks(
        self, samples: Any, parameters: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> ChunkedTranscription:
        """Return a sound in chunks. Raises ValueError for arguments that the pipeline does not take."""
        before, forward, after = self.pipeline._sanitize_parameters(**arguments)
        chunks = self.pipeline.preprocess(samples, **before)
        return ChunkedTranscription(samples, self.sampling_rate, parameters, chunks, forward, after)

    def advance(self, transcriptions: Sequence[Transcription]) -> None:
        """Do the next step of sounds with the same key; a sound whose key is None comes alone.

        Raises ValueError or RequestError if a request cannot be served, and anything else if the model fails.
        """
        (one,) = transcriptions
        assert isinstance(one, ChunkedTranscription)
        chunk = next(one.chunks, None)
        if chunk is not None:
            one.outputs.append(self.pipeline.forward(chunk, **one.forward))
        else:
            one.result = self._finish(one, self.pipeline.postprocess(one.outputs, **one.finish))

    def _finish(self, one: Transcription, result: dict[str, Any]) -> dict[str, Any]:
        if any(one.parameters.get(name) for name in OF_RESULT):
            result["duration"] = one.duration
        return result

    def run(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        return [self._run_alone(self.begin(samples, parameters)) for samples in inputs]

    def stream(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Iterator[list[Piece]]:
        (samples,) = inputs
        one, text = self.begin(samples, parameters), GrowingText()
        one.on_text = lambda so_far: setattr(text, "so_far", so_far)
        while one.result is None:
            self.advance([one])
            yield [Piece(text.take())]
        text.so_far = one.result["text"]
        yield [Piece(text.take())]

    def _run_alone(self, one: Transcription) -> Any:
        while one.result is None:
            self.advance([one])
        return one.result
