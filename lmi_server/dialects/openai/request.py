"""What the requests of completions, chats and responses share: fields, model name, sampling, form of the answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from lmi_server.contract.errors import ModelNotFoundError, RequestError
from lmi_server.contract.generation import GenerationRequest, SamplingParameters
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields
from lmi_server.dialects.adapters import adapter_as_model, adapter_name, registered_adapter
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.errors import is_openai
from lmi_server.dialects.fields import Field
from lmi_server.dialects.framing import SSE, Framing
from lmi_server.dialects.lmi.formatters import unnamed_framing
from lmi_server.dialects.optional import model_in_body
from lmi_server.dialects.parameters import constraints, sampling
from lmi_server.dialects.parameters.choices import CHOICES
from lmi_server.dialects.routes import is_address, means_any_model


def _stream_options(name: str, value: Any) -> tuple[bool, bool]:
    """Read OpenAI's include_usage and vLLM's continuous_usage_stats."""
    if not isinstance(value, dict):
        raise fields.not_allowed(name, value, 'send an object such as {"include_usage": true}')
    usage, continuous = value.get("include_usage"), value.get("continuous_usage_stats")
    return (
        usage is not None and fields.boolean(f"{name}.include_usage", usage),
        continuous is not None and fields.boolean(f"{name}.continuous_usage_stats", continuous),
    )


UNSUPPORTED = fields.off("leave it out")


# Accepted without a warning: they do not change what this server answers, and SDKs send them unasked.
_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "verbosity",
    "length_penalty",  # of beam search, which is refused
    "stream_interval",
    "session_id",
)
SHARED_FIELDS: dict[str, Field] = {
    **sampling.FIELDS,
    "model": Field("model", fields.string),
    "stream": Field("stream", fields.boolean),
    "stream_options": Field("stream_options", _stream_options),
    "request_id": Field("request_id", fields.string),
    "priority": Field("priority", fields.integer(-(2**31), 2**31 - 1)),
    "max_tokens": Field("max_tokens", fields.MAX_TOKENS),
    "truncate_prompt_tokens": Field("truncate", fields.MAX_TOKENS),
    "n": Field("n", CHOICES),
    "return_token_ids": Field("token_ids", fields.boolean),
    "return_tokens_as_token_ids": Field("tokens_as_ids", fields.boolean),
    "adapters": Field("adapter", adapter_name),
    "adapter": Field("adapter", adapter_name),
    **{name: Field(None, fields.ignored) for name in _IGNORED},
}


class Envelope(msgspec.Struct, frozen=True):
    """The fields that every object of an answer repeats. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the request asks of the form of its answer.

    `alternatives` is the number of alternatives per token in the log probabilities, None for no log probabilities;
    `prompt_alternatives` is the same for the prompt. The answer has `n` choices per prompt. `token_ids` adds the ids of
    prompt and output; `tokens_as_ids` writes "token_id:N" for a token's text in log probabilities.
    """

    alternatives: int | None = None
    prompt_alternatives: int | None = None
    n: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False

    @property
    def text_only(self) -> bool:
        """True if the chunks of a stream carry nothing but text."""
        return self.alternatives is None and not self.token_ids and not self.continuous_usage


class RequestFields(msgspec.Struct, frozen=True):
    """The fields of a body, checked. `values` has them by target; `adapter` is the one that the request asks for."""

    values: Mapping[str, Any]
    envelope: Envelope
    adapter: str | None
    stream: bool
    warnings: tuple[str, ...]


def read(
    request: Input, body: dict[str, Any], known: dict[str, Field], served: ServedModel, prefix: str
) -> RequestFields:
    """Return the fields of the body; the answer's id begins with `prefix`. Raises RequestError."""
    values, unknown = fields.read_fields(body, known, features=served.features)
    stream, model = values.get("stream", False), values.get("model")
    if "stream_options" in values and not stream:
        raise RequestError("stream_options is only allowed with stream; send stream: true or leave it out")
    if stream and values.get("prompt_logprobs") is not None:
        raise RequestError("prompt_logprobs is not available in a stream; leave it out, or do not stream")
    warnings = fields.unknown_warnings(unknown, known)
    adapter = registered_adapter(request, body, served)
    other = model_warnings(request, model, served)
    if model is None or not _is_shown(model, served, other):
        model = default_model_name(served)
    identifier = values.get("request_id") or secrets.token_hex(16)
    envelope = Envelope(f"{prefix}-{identifier}", int(time.time()), model)
    return RequestFields(values, envelope, adapter, stream, warnings + other)


def stream_framing(request: Input, served: ServedModel) -> Framing:
    """Return the framing of a stream: OpenAI's events, or what LMI's routes have for every body."""
    return SSE if is_openai(request.route) else unnamed_framing(request, served)


def model_warnings(request: Input, model: str | None, served: ServedModel) -> tuple[str, ...]:
    """Return the warning about a model that is not served. The routes of public APIs raise ModelNotFoundError."""
    if model is None or model == served.name or model in served.served_names or means_any_model(model):
        return ()
    if adapter_as_model(model, served) is not None:
        return ()
    names = (*served.served_names, served.name, *sorted(served.adapters))
    if request.route in model_in_body():
        raise unknown_model(model, names)
    return (f"model {fields.show(model)} is ignored; served here: {_in_words(names)}",)


def unknown_model(name: str, served: Iterable[str]) -> ModelNotFoundError:
    """Return the error about a `model` that is not among the names `served`."""
    return ModelNotFoundError(f"The model {fields.show(name)} does not exist; served here: {_in_words(served)}")


def _in_words(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _is_shown(model: str, served: ServedModel, warnings: tuple[str, ...]) -> bool:
    """Return whether answers show `model` as the request has it; the address of a server is no name to show."""
    is_name = model == served.name or model in served.served_names
    return not warnings and (is_name or not is_address(model))


def default_model_name(served: ServedModel) -> str:
    """Return the name that an answer shows if the request names none."""
    return served.served_names[0] if served.served_names else served.name


def name_to_show(request: Input, model: str | None, served: ServedModel) -> tuple[str, tuple[str, ...]]:
    """Return the model name for the answer, and the warning about a model that is not served here.

    Raises ModelNotFoundError on OpenAI's routes if it is not served.
    """
    warnings = model_warnings(request, model, served)
    return (model if model is not None and _is_shown(model, served, warnings) else served.name), warnings


def answer_options(values: Mapping[str, Any], alternatives: int | None) -> AnswerOptions:
    """Return what concerns the form of the answer; `alternatives` is the field of AnswerOptions."""
    include_usage, continuous = values.get("stream_options", (False, False))
    return AnswerOptions(
        alternatives=alternatives,
        prompt_alternatives=values.get("prompt_logprobs"),
        n=values.get("n", 1),
        include_usage=include_usage,
        continuous_usage=include_usage and continuous,
        token_ids=values.get("token_ids", False),
        tokens_as_ids=values.get("tokens_as_ids", False),
    )


def generation_request(
    request: Input, asked: RequestFields, sampling: SamplingParameters, **prompt: Any
) -> GenerationRequest:
    """Return the request of one sequence; `prompt` has the fields of GenerationRequest that describe its prompt."""
    priority = asked.values.get("priority")
    return GenerationRequest(
        request_id=asked.envelope.id,
        sampling=sampling,
        priority=request.priority if priority is None else priority,
        adapter=asked.adapter,
        stream=asked.stream,
        **prompt,
    )


def sampling_parameters(
    values: Mapping[str, Any], served: ServedModel, max_tokens: int | None, **scores: int | None
) -> SamplingParameters:
    """Return the sampling parameters: `scores`, then those among `values`, then the model's own, then OpenAI's.

    `scores` are the numbers of alternatives. As with vLLM, `max_new_tokens` of the model's own files is the longest
    answer that a request may ask for.
    """
    chosen = {"temperature": 1.0, **served.sampling_defaults, **sampling.select(values), **scores}
    longest = chosen.get("max_new_tokens")
    if longest is not None:
        chosen["fit_context"] = max_tokens is None
        max_tokens = longest if max_tokens is None else min(max_tokens, longest)
    chosen["max_new_tokens"] = max_tokens
    chosen["do_sample"] = chosen["temperature"] > 0
    chosen["structured_outputs"] = constraints.find(values)
    chosen["extra"] = sampling.extras(values)
    return SamplingParameters(**chosen)
