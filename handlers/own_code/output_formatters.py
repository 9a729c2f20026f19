"""Exchanges whose answers a function of the user writes, in one of the three forms that LMI has known over time.

fn(output: TextGenerationOutput) -> str                                      after each step
fn(token, first_token, last_token, details, generated_text, id) -> str       for each token; `id` may be missing
fn(answer) -> str, dict or bytes                                             the finished answer, or each chunk

The last form gets each chunk of a stream as LMI's asynchronous service does if the model is served as that does.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from djl_python.request_io import RequestInput, Sequence, TextGenerationOutput, Token

from handlers.own_code.answer_objects import LmiAnswer, StreamEvent, attribute_dict, events
from lmi_server.contract.errors import HandlerError, LmiServerError
from lmi_server.contract.generation import Delta, GenerationRequest, Usage
from lmi_server.contract.generation import Token as GeneratedToken
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.errors import error_event
from lmi_server.dialects.framing import JSON_LINES, SSE, encode_line
from lmi_server.dialects.lmi import AsyncLinesExchange, token_texts
from lmi_server.dialects.openai import completion_lines
from lmi_server.dialects.routes import INVOCATIONS

_OUTPUT_TYPES = ("RequestOutput", "TextGenerationOutput")
_TOKEN_ARGUMENTS = 5  # of the oldest form

Write = Callable[[Exchange, RequestInput, bool, ServedModel], Exchange]
"""Wraps the Exchange of a dialect: gets it, the request as formatters see it, whether the client streams, the model."""

_FINISH_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


def exchange_writer(function: Callable[..., Any]) -> Write:
    """Return what makes Exchanges whose answers `function` writes.

    The annotation of the first argument and the number of arguments decide which of the three forms `function` has.
    """
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    annotation = parameters[0].annotation if parameters else None
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if name.rpartition(".")[2] in _OUTPUT_TYPES:
        return lambda inner, given, streams, _: _Stepwise(inner, given, streams, _Reading(function))
    if len(parameters) >= _TOKEN_ARGUMENTS:
        with_id = len(parameters) > _TOKEN_ARGUMENTS
        return lambda inner, given, streams, _: _Stepwise(
            inner, given, streams, _Tokenwise(function, given.request_id if with_id else None)
        )
    return lambda inner, given, streams, served: _rewriting(inner, function, served)


def _rewriting(inner: Exchange, function: Callable[..., Any], served: ServedModel) -> Exchange:
    if not (served.async_service and inner.content_type == JSON_LINES.content_type):
        return _Rewritten(inner, function, served.served_names[0] if served.served_names else served.name)
    lines = inner
    if isinstance(inner, AsyncLinesExchange):
        lines = completion_lines(inner.requests, inner.warnings, served)
    return _EventLines(lines, function, inner)


class _Reading:
    """Calls `fn(output)` once a step; for a stream, until the function reads no further token."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, output: TextGenerationOutput, fresh: list[Token], streams: bool) -> Iterator[bytes]:
        # LMI calls such a function once per token, which it reads with get_next_token(). A step here may bring several
        # tokens, so the function is called until it has read them all, or stops reading.
        sequence = output.best_sequence
        while True:
            before = sequence.position
            yield _bytes(self._function(output))
            if not streams or sequence.position == before or not sequence.has_next_token():
                return


class _Tokenwise:
    """Calls `fn(token, first_token, last_token, details, generated_text, id)` for each token."""

    def __init__(self, function: Callable[..., Any], number: int | None) -> None:
        self._function = function
        self._more = () if number is None else (number,)

    def __call__(self, output: TextGenerationOutput, fresh: list[Token], streams: bool) -> Iterator[bytes]:
        sequence, parameters = output.best_sequence, output.input.parameters
        prefix = str(output.input.input_text or "") if parameters.get("return_full_text") else ""
        count = len(sequence.tokens)
        for index, token in enumerate(fresh, count - len(fresh)):
            last = sequence.finish_reason is not None and index == count - 1
            text = prefix + "".join(token.text for token in sequence.tokens) if last else prefix
            details = _details(output) if parameters.get("details") else {}
            yield _bytes(self._function(token, index == 0, last, details, text, *self._more))


def _details(output: TextGenerationOutput) -> dict[str, Any]:
    sequence, given = output.best_sequence, output.input
    return {
        "finish_reason": sequence.finish_reason,
        "tokens": output.get_tokens_as_dict(output.best_sequence_index),
        "generated_tokens": len(sequence.tokens),
        "inputs": given.input_text,
        "parameters": given.parameters,
        "prompt_tokens": output.get_prompt_tokens_as_dict(),
    }


class _Stepwise(Exchange):
    """Calls a function for what each step added."""

    stream = True

    def __init__(self, inner: Exchange, given: RequestInput, streams: bool, write: _Reading | _Tokenwise) -> None:
        self.requests = tuple(_with_logprobs(request, streams) for request in inner.requests)
        self.warnings = inner.warnings
        self.content_type = JSON_LINES.content_type if streams else "application/json"
        self._write = write
        self._streams = streams
        self._unfinished = len(self.requests)
        sequences = {index: Sequence() for index in range(len(self.requests))}
        self._output = TextGenerationOutput(given.request_id, given, False, sequences)
        self._output.other_sequences_indices = list(range(1, len(sequences)))

    def add(self, index: int, delta: Delta) -> bytes:
        fresh = self._take(index, delta)
        if delta.finish_reason is not None:
            self._output.sequences[index].finish_reason = delta.finish_reason
            self._unfinished -= 1
            self._output.finished = self._unfinished == 0
        # The function writes the best sequence as it grows. It gets the others at the end of the whole answer.
        ends = self._output.finished
        if not (fresh or ends) or (index != self._output.best_sequence_index and not ends):
            return b""
        return b"".join(self._write(self._output, fresh if index == 0 else [], self._streams))

    def _take(self, index: int, delta: Delta) -> list[Token]:
        """Add a delta to the sequence `index`; return its tokens."""
        sequence, output = self._output.sequences[index], self._output
        fresh = [_token(token, text) for token, text in zip(delta.tokens, token_texts(delta), strict=False)]
        if not delta.tokens and (delta.text or delta.finish_reason is not None):
            # Text that the detokenizer held back comes without a token, and every end needs one to carry it.
            fresh = [Token(-1, delta.text)]
        sequence.tokens += fresh
        sequence.top_tokens += [[Token(top.id, top.text, top.logprob) for top in token.top] for token in delta.tokens]
        sequence.cumulative_log_prob += sum(token.log_prob or 0.0 for token in fresh)
        if delta.prompt_tokens is not None:
            output.prompt_tokens_details = [_token(token, token.text) for token in delta.prompt_tokens]
        return fresh

    def error_chunk(self, error: LmiServerError) -> bytes:
        return error_event(INVOCATIONS, self.content_type, error)


def _with_logprobs(request: GenerationRequest, streams: bool) -> GenerationRequest:
    """Return `request` with log probabilities of its tokens, which a formatter may read without asking for them."""
    sampling = msgspec.structs.replace(request.sampling, logprobs=request.sampling.logprobs or 0)
    return msgspec.structs.replace(request, sampling=sampling, stream=streams)


def _token(token: GeneratedToken, text: str) -> Token:
    return Token(token.id, text, token.logprob, token.special)


class _Rewritten(Exchange):
    """Calls a function with the finished answer of a dialect, or with each chunk of it if the client streams."""

    def __init__(self, inner: Exchange, function: Callable[..., Any], model: str) -> None:
        self._model = model
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._texts: list[tuple[str, str]] = []
        self.requests = inner.requests
        self.warnings = inner.warnings
        self.stream = inner.stream
        self.content_type = inner.content_type
        self._inner = inner
        self._function = function
        framing = SSE if inner.content_type == SSE.content_type else JSON_LINES
        self._start, self._end = framing.start, framing.end  # of values that the function returns in place of a text

    def first(self) -> bytes:
        return self._chunk(self._inner.first())

    def add(self, index: int, delta: Delta) -> bytes:
        if delta.finish_reason is not None and index == 0:
            self._finish_reason, self._usage = delta.finish_reason, delta.usage
        return self._chunk(self._inner.add(index, delta))

    def last(self) -> bytes:
        return self._chunk(self._inner.last())

    def body(self) -> bytes:
        answer = attribute_dict(msgspec.json.decode(self._inner.body()))
        if isinstance(answer, dict) and "generated_text" in answer:
            answer = LmiAnswer(answer, self._completion)
        written = self._function(answer)
        if isinstance(written, LmiAnswer):
            written.follow_choice()
        return _bytes(written)

    def _completion(self, text: str) -> dict[str, Any]:
        """Return the fields that the answer has in OpenAI's form."""
        reason = _FINISH_REASONS.get(self._finish_reason or "")
        return {
            "id": f"cmpl-{self.requests[0].request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}],
            "usage": None if self._usage is None else _usage(self._usage),
        }

    def _chunk(self, data: bytes) -> bytes:
        return b"".join(self._event(StreamEvent(text, self._completion)) for text in events(data.decode()))

    def _event(self, event: StreamEvent) -> bytes:
        written = self._function(event)
        if isinstance(written, StreamEvent):
            return written.write_event(self._texts).encode()
        data = _bytes(written)
        return data if isinstance(written, str | bytes) or not data else self._start + data + self._end

    def error_chunk(self, error: LmiServerError) -> bytes:
        return self._inner.error_chunk(error)


class _EventLines(Exchange):
    """Calls a function with each event of a stream as vLLM writes it, also with the one that closes the stream.

    Each result is a line of the answer, and an empty line ends it, as LMI's asynchronous service sends them.
    """

    stream = True
    content_type = JSON_LINES.content_type

    def __init__(self, lines: Exchange, function: Callable[..., Any], inner: Exchange) -> None:
        """`lines` writes the JSON of the events, and `inner` how the stream ends if it fails."""
        self.requests = lines.requests
        self.warnings = lines.warnings
        self._lines = lines
        self._function = function
        self._inner = inner

    def first(self) -> bytes:
        return self._write_lines(self._lines.first())

    def add(self, index: int, delta: Delta) -> bytes:
        return self._write_lines(self._lines.add(index, delta))

    def last(self) -> bytes:
        return self._write_lines(self._lines.last()) + self._line(SSE.done.decode()) + b"\n"

    def _write_lines(self, lines: bytes) -> bytes:
        return b"".join(self._line(f"data: {line}\n\n") for line in lines.decode().split("\n") if line)

    def _line(self, event: str) -> bytes:
        written = self._function(event)
        return b"" if written is None else _bytes(written) + b"\n"

    def error_chunk(self, error: LmiServerError) -> bytes:
        return self._inner.error_chunk(error)


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _bytes(value: Any) -> bytes:
    """Return the bytes to send for what an output formatter returned. Raises HandlerError if it has no JSON form."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes) or value is None:
        return value or b""
    if hasattr(value, "model_dump_json") and not isinstance(value, dict):
        return str(value.model_dump_json()).encode()
    try:
        return encode_line(value)
    except TypeError:
        raise HandlerError(
            f"output_formatter returned a {type(value).__name__}; return str, bytes or values that JSON can express"
        ) from None
