"""LMI's dialect: `inputs`, `parameters` and `stream` in; JSON, JSON lines or server-sent events out.

Shapes and semantics are those of LMI's rolling batch; with `option.tgi_compat` the answers have the shapes of
text-generation-inference, which `huggingface_hub.InferenceClient.text_generation` reads.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType

from lmi_server.contract.errors import LmiServerError, RequestError
from lmi_server.contract.generation import Delta, FinishReason, GenerationRequest, SamplingParameters, Token, Usage
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields
from lmi_server.dialects.adapters import adapter_name, chosen_adapter
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.errors import error_event
from lmi_server.dialects.fields import Field
from lmi_server.dialects.framing import JSON_LINES, SSE, Framing, encode, encode_line

_ROUTE = "invocations"
_NO_TOKEN = Token(-1, "")  # LMI's token of a line that only carries text


# --- fields ---


def _inputs(name: str, value: Any) -> str:
    if isinstance(value, list):
        raise fields.not_allowed(name, value, "send one request for each prompt, with the prompt as a string")
    if not isinstance(value, str) or not value:
        raise fields.not_allowed(name, value, "send the prompt as a string that is not empty")
    return value


def _parameters(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fields.not_allowed(name, value, 'send an object such as {"max_new_tokens": 30}')
    return value


_ONE_SEQUENCE = "send 1 or leave it out: one sequence is generated per request"
_UNCONSTRAINED = "leave it out: the output is not constrained by a grammar or schema"

PARAMETERS: dict[str, Field] = {
    "max_new_tokens": Field("max_new_tokens", fields.MAX_TOKENS),
    "do_sample": Field("do_sample", fields.boolean),
    "temperature": Field("temperature", fields.TEMPERATURE),
    "top_k": Field("top_k", fields.top_k),
    "top_p": Field("top_p", fields.PROBABILITY),
    "typical_p": Field("typical_p", fields.PROBABILITY),
    "min_p": Field("min_p", fields.MIN_P),
    "repetition_penalty": Field("repetition_penalty", fields.REPETITION),
    "presence_penalty": Field("presence_penalty", fields.PENALTY),
    "frequency_penalty": Field("frequency_penalty", fields.PENALTY),
    "seed": Field("seed", fields.SEED),
    "stop": Field("stop", fields.stop_strings),
    "stop_sequences": Field("stop_sequences", fields.stop_strings),
    "stop_token_ids": Field("stop_token_ids", fields.token_ids),
    "include_stop_str_in_output": Field("include_stop_str_in_output", fields.boolean),
    "ignore_eos": Field("ignore_eos", fields.boolean),
    "ignore_eos_token": Field("ignore_eos", fields.boolean),
    "skip_special_tokens": Field("skip_special_tokens", fields.boolean),
    "return_full_text": Field("return_full_text", fields.boolean),
    "details": Field("details", fields.boolean),
    "decoder_input_details": Field("decoder_input_details", fields.boolean),
    "top_n_tokens": Field("top_n_tokens", fields.LOGPROBS),
    "logprobs": Field("logprobs", fields.LOGPROBS),
    "truncate": Field("truncate", fields.MAX_TOKENS),
    "n": Field(None, fields.one(_ONE_SEQUENCE)),
    "best_of": Field(None, fields.one(_ONE_SEQUENCE)),
    "num_beams": Field(None, fields.one("send 1 or leave it out: beam search is not supported")),
    "use_beam_search": Field(None, fields.off("leave it out")),
    "grammar": Field(None, fields.off(_UNCONSTRAINED)),
    "guided_json": Field(None, fields.off(_UNCONSTRAINED)),
    "guided_regex": Field(None, fields.off(_UNCONSTRAINED)),
    "guided_choice": Field(None, fields.off(_UNCONSTRAINED)),
    "guided_grammar": Field(None, fields.off(_UNCONSTRAINED)),
    "response_format": Field(None, fields.plain_text_format),
    "adapter_id": Field("adapter", adapter_name),
}
_BODY: dict[str, Field] = {
    "inputs": Field("inputs", _inputs),
    "parameters": Field("parameters", _parameters),
    "stream": Field("stream", fields.boolean),
    "adapters": Field("adapter", adapter_name),
    "adapter": Field("adapter", adapter_name),
}
_FORMATTERS: dict[str, Framing | None] = {"json": None, "jsonlines": JSON_LINES, "sse": SSE}
_CHAT_FORMATTERS = ("json_chat", "jsonlines_chat", "sse_chat")
_TEXT = "none"
FORMATTER_NAMES = (*_FORMATTERS, *_CHAT_FORMATTERS, _TEXT)
"""The values of option.output_formatter that mean no function of the model's own code."""


# --- parse ---


class _Shape(msgspec.Struct, frozen=True):
    """What the request asked of the answer's form."""

    prompt: str
    full_text: bool
    details: bool
    prefill: bool
    top_n: int
    tgi: bool
    seed: int | None


def parse_text(request: Input, served: ServedModel) -> Exchange:
    """Parse a text/plain body, which is the prompt itself."""
    return _exchange(request, served, {"inputs": _inputs("the body", fields.plain_text(request))}, ())


def parse(request: Input, body: dict[str, Any], served: ServedModel) -> Exchange:
    """Parse `{"inputs": str, "parameters": object, "stream": bool}`. Raises RequestError."""
    values, unknown = fields.read_fields(body, _BODY)
    if "inputs" not in values:
        raise RequestError('inputs is missing; send {"inputs": "the prompt", "parameters": {...}}')
    return _exchange(request, served, values, fields.unknown_warnings(unknown, _BODY))


def _exchange(request: Input, served: ServedModel, values: dict[str, Any], warnings: tuple[str, ...]) -> Exchange:
    parameters, unknown = fields.read_fields(values.get("parameters", {}), PARAMETERS, "parameters.")
    warnings += fields.unknown_warnings(unknown, PARAMETERS, "parameters.")
    in_body = values.get("adapter", parameters.pop("adapter", None))
    framing, ignored_formatter = _formatter(request, served, values.get("stream", False))
    prompt = values["inputs"]
    shape = _shape(prompt, parameters, served.tgi_compat)
    if not shape.details and parameters.get("decoder_input_details"):
        warnings += ("parameters.decoder_input_details has no effect without parameters.details",)
    generation = GenerationRequest(
        request_id=uuid4().hex,
        prompt=prompt,
        sampling=_sampling(parameters, shape, framing is not None),
        priority=fields.priority(request),
        adapter=chosen_adapter(request, in_body, served),
    )
    warnings += ignored_formatter
    if served.output_formatter == _TEXT:
        return TextExchange(generation, shape, warnings, values.get("stream", False))
    if framing is None:
        return JsonExchange(generation, shape, warnings)
    return LinesExchange(generation, shape, warnings, framing)


def _formatter(request: Input, served: ServedModel, stream: bool) -> tuple[Framing | None, tuple[str, ...]]:
    """Return the framing of the stream, None for one JSON object; the option wins over the request's `stream`."""
    name = served.output_formatter
    if name is not None and name in _FORMATTERS:
        return _FORMATTERS[name], ()
    warnings = formatter_warnings(name)
    if not stream:
        return None, warnings
    wants_events = served.tgi_compat or "text/event-stream" in request.properties.get("accept", "")
    return (SSE if wants_events else JSON_LINES), warnings


def formatter_warnings(name: str | None) -> tuple[str, ...]:
    """Return a warning where option.output_formatter names no formatter of any dialect."""
    if name is None or name in FORMATTER_NAMES:
        return ()
    return (f"option.output_formatter={name} is not known and is ignored; use one of {', '.join(FORMATTER_NAMES)}",)


def _shape(prompt: str, parameters: dict[str, Any], tgi: bool) -> _Shape:
    details = parameters.pop("details", tgi) or tgi
    return _Shape(
        prompt=prompt,
        full_text=parameters.pop("return_full_text", False),
        details=details,
        prefill=details and parameters.get("decoder_input_details", False),
        top_n=parameters.pop("top_n_tokens", 0),
        tgi=tgi,
        seed=parameters.get("seed"),
    )


def _sampling(parameters: dict[str, Any], shape: _Shape, lines: bool) -> SamplingParameters:
    """Return the sampling parameters. Every token of a stream, and of `details`, is told with its log probability."""
    parameters.pop("decoder_input_details", None)
    # As LMI: left out, do_sample follows from whether a temperature was asked for.
    parameters.setdefault("do_sample", "temperature" in parameters)
    alternatives = max(parameters.pop("logprobs", 0), shape.top_n)
    parameters["logprobs"] = alternatives if lines or shape.details else None
    sequences = parameters.pop("stop_sequences", ())
    if sequences:
        parameters["stop"] = tuple(dict.fromkeys(parameters.get("stop", ()) + sequences))
    return SamplingParameters(prompt_logprobs=0 if shape.prefill else None, **parameters)


# --- format ---


class _Token(msgspec.Struct, omit_defaults=True):
    id: int
    text: str
    log_prob: float | None
    special_token: bool = False


class _TgiToken(msgspec.Struct):
    id: int
    text: str
    logprob: float | None
    special: bool


_AnyToken = _Token | _TgiToken


class _PrefillToken(msgspec.Struct):
    """text-generation-inference tells of a prompt token no more than this."""

    id: int
    text: str
    logprob: float | None


class _Details(msgspec.Struct):
    finish_reason: FinishReason | None
    generated_tokens: int
    inputs: str | UnsetType = UNSET
    input_length: int | UnsetType = UNSET
    seed: int | UnsetType | None = UNSET
    tokens: list[_AnyToken] | UnsetType = UNSET
    prefill: list[_AnyToken] | list[_PrefillToken] | UnsetType = UNSET
    top_tokens: list[list[_AnyToken]] | UnsetType = UNSET


class _Body(msgspec.Struct):
    generated_text: str
    details: _Details | UnsetType = UNSET


class _Line(msgspec.Struct):
    token: _AnyToken
    generated_text: str | UnsetType = UNSET
    details: _Details | UnsetType = UNSET


class _TgiLine(msgspec.Struct):
    """text-generation-inference writes every key on every line; `index` counts from 1."""

    index: int
    token: _AnyToken
    top_tokens: list[_AnyToken] | UnsetType
    generated_text: str | None = None
    details: _Details | None = None


def token_texts(delta: Delta) -> list[str]:
    """Return the text of each token such that they join to the delta's text.

    A step's own texts differ from it where the delta holds text back, cuts a stop sequence, or joins bytes to a
    character; then the last token of the step carries all of it.
    """
    tokens = delta.tokens
    if len(tokens) < 2:
        return [delta.text]
    texts = [token.text for token in tokens]
    if "".join(texts) == delta.text:
        return texts
    return [""] * (len(tokens) - 1) + [delta.text]


class _Answer:
    """What has been generated so far."""

    def __init__(self, shape: _Shape) -> None:
        self._shape = shape
        self._make: type[_Token] | type[_TgiToken] = _TgiToken if shape.tgi else _Token
        self._texts: list[str] = []
        self._top: list[list[_AnyToken]] = []
        self._prompt_tokens: tuple[Token, ...] = ()
        self._finish_reason: FinishReason | None = None
        self._usage: Usage | None = None
        self.count = 0

    def take(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self.count += len(delta.tokens)
        if self._shape.top_n:
            self._top += [self.alternatives(token) for token in delta.tokens]
        if delta.prompt_tokens is not None:
            self._prompt_tokens = delta.prompt_tokens
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            self._usage = delta.usage

    def token(self, token: Token, text: str) -> _AnyToken:
        return self._make(token.id, text, token.logprob, token.special)

    def alternatives(self, token: Token) -> list[_AnyToken]:
        return [self._make(top.id, top.text, top.logprob, False) for top in token.top[: self._shape.top_n]]

    def text(self) -> str:
        return (self._shape.prompt if self._shape.full_text else "") + "".join(self._texts)

    def details(self) -> _Details:
        """Return what every formatter tells in `details`."""
        shape = self._shape
        details = _Details(self._finish_reason, self._usage.completion_tokens if self._usage else self.count)
        if shape.tgi:
            details.seed = shape.seed
        if self._usage and shape.tgi:
            details.input_length = self._usage.prompt_tokens
        details.inputs = shape.prompt
        if shape.prefill:
            details.prefill = self._prefill()
        if shape.top_n:
            details.top_tokens = self._top
        return details

    def _prefill(self) -> list[_AnyToken] | list[_PrefillToken]:
        if self._shape.tgi:
            return [_PrefillToken(token.id, token.text, token.logprob) for token in self._prompt_tokens]
        return [self.token(token, token.text) for token in self._prompt_tokens]


class JsonExchange(Exchange):
    """One JSON object at the end; with tgi_compat a list of one, as InferenceClient takes it."""

    stream = False
    content_type = "application/json"

    def __init__(self, request: GenerationRequest, shape: _Shape, warnings: tuple[str, ...]) -> None:
        self.requests = (request,)
        self.warnings = warnings
        self._shape = shape
        self._answer = _Answer(shape)
        self._tokens: list[_AnyToken] = []

    def add(self, index: int, delta: Delta) -> bytes:
        self._answer.take(delta)
        if self._shape.details and delta.tokens:
            self._tokens += map(self._answer.token, delta.tokens, token_texts(delta))
        return b""

    def body(self) -> bytes:
        body = _Body(self._answer.text())
        if self._shape.details:
            body.details = self._details()
        return encode([body] if self._shape.tgi else body)

    def _details(self) -> _Details:
        details = self._answer.details()
        details.tokens = self._tokens
        if self._shape.tgi and details.prefill is UNSET:
            details.prefill = []
        return details

    def error_chunk(self, error: LmiServerError) -> bytes:
        return error_event(_ROUTE, self.content_type, error)


class TextExchange(Exchange):
    """Nothing but the text, as it is generated where the client streams."""

    content_type = "text/plain; charset=utf-8"

    def __init__(self, request: GenerationRequest, shape: _Shape, warnings: tuple[str, ...], stream: bool) -> None:
        self.requests = (request,)
        self.warnings = warnings
        self.stream = stream
        self._shape = shape
        self._answer = _Answer(shape)

    def first(self) -> bytes:
        return self._shape.prompt.encode() if self._shape.full_text else b""

    def add(self, index: int, delta: Delta) -> bytes:
        self._answer.take(delta)
        return delta.text.encode()

    def body(self) -> bytes:
        return self._answer.text().encode()

    def error_chunk(self, error: LmiServerError) -> bytes:
        return b"\n" + error_event(_ROUTE, self.content_type, error)


class LinesExchange(Exchange):
    """One framed JSON object per token; the last one has the whole text, and `details` where asked for."""

    stream = True

    def __init__(self, request: GenerationRequest, shape: _Shape, warnings: tuple[str, ...], framing: Framing) -> None:
        self.requests = (request,)
        self.warnings = warnings
        self.content_type = framing.content_type
        self._framing = framing
        self._shape = shape
        self._answer = _Answer(shape)
        self._index = 0
        self._collected: list[bytes] = []

    def add(self, index: int, delta: Delta) -> bytes:
        self._answer.take(delta)
        tokens = delta.tokens
        if not tokens:
            return self._flush(delta)
        start, end, last = self._framing.start, self._framing.end, delta.finish_reason is not None
        if len(tokens) == 1:
            return start + encode_line(self._line(tokens[0], delta.text, last)) + end
        ends_at = len(tokens) - 1
        return b"".join(
            self._framing.frame(self._line(token, text, last and i == ends_at))
            for i, (token, text) in enumerate(zip(tokens, token_texts(delta), strict=True))
        )

    def _flush(self, delta: Delta) -> bytes:
        """Return the line of a delta without tokens: none where it says nothing."""
        if not delta.text and delta.finish_reason is None:
            return b""
        return self._framing.frame(self._line(_NO_TOKEN, delta.text, delta.finish_reason is not None))

    def _line(self, token: Token, text: str, last: bool) -> _Line | _TgiLine:
        answer = self._answer
        if self._shape.tgi:
            return self._tgi_line(token, text, last)
        if not last:
            return _Line(_Token(token.id, text, token.logprob, token.special))
        details = answer.details() if self._shape.details else UNSET
        return _Line(answer.token(token, text), answer.text(), details)

    def _tgi_line(self, token: Token, text: str, last: bool) -> _TgiLine:
        answer = self._answer
        self._index += 1
        top = answer.alternatives(token) if self._shape.top_n else UNSET
        line = _TgiLine(self._index, answer.token(token, text), top)
        if last:
            line.generated_text, line.details = answer.text(), answer.details()
            line.details.top_tokens = UNSET  # told line by line
        return line

    def error_chunk(self, error: LmiServerError) -> bytes:
        return error_event(_ROUTE, self.content_type, error)
