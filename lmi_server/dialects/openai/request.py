"""What completions and chats take alike: fields, the model's name, sampling parameters."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import msgspec

from lmi_server.dialects import fields
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.fields import Field
from lmi_server.errors import ModelNotFoundError, RequestError
from lmi_server.generation import SamplingParameters
from lmi_server.protocol import Input

ROUTES = frozenset({"completions", "chat/completions"})


def _stream_options(name: str, value: Any) -> bool:
    if not isinstance(value, dict):
        raise fields.not_allowed(name, value, 'send an object such as {"include_usage": true}')
    include_usage = value.get("include_usage")
    return False if include_usage is None else fields.boolean(f"{name}.include_usage", include_usage)


_ONE_CHOICE = fields.one("send 1 or leave it out: one choice is generated per prompt")
_UNCONSTRAINED = fields.off("leave it out: the output is not constrained by a grammar or schema")
UNSUPPORTED = fields.off("leave it out")

_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "reasoning_effort",
    "verbosity",
    "parallel_tool_calls",
)

SHARED_FIELDS: dict[str, Field] = {
    "model": Field("model", fields.string),
    "stream": Field("stream", fields.boolean),
    "stream_options": Field("include_usage", _stream_options),
    "max_tokens": Field("max_tokens", fields.MAX_TOKENS),
    "temperature": Field("temperature", fields.TEMPERATURE),
    "top_p": Field("top_p", fields.PROBABILITY),
    "top_k": Field("top_k", fields.top_k),
    "min_p": Field("min_p", fields.MIN_P),
    "typical_p": Field("typical_p", fields.PROBABILITY),
    "presence_penalty": Field("presence_penalty", fields.PENALTY),
    "frequency_penalty": Field("frequency_penalty", fields.PENALTY),
    "repetition_penalty": Field("repetition_penalty", fields.REPETITION),
    "logit_bias": Field("logit_bias", fields.logit_bias),
    "seed": Field("seed", fields.SEED),
    "stop": Field("stop", fields.stop_strings),
    "stop_token_ids": Field("stop_token_ids", fields.token_ids),
    "include_stop_str_in_output": Field("include_stop_str_in_output", fields.boolean),
    "ignore_eos": Field("ignore_eos", fields.boolean),
    "skip_special_tokens": Field("skip_special_tokens", fields.boolean),
    "truncate_prompt_tokens": Field("truncate", fields.MAX_TOKENS),
    "n": Field(None, _ONE_CHOICE),
    "best_of": Field(None, _ONE_CHOICE),
    "response_format": Field(None, fields.plain_text_format),
    "guided_json": Field(None, _UNCONSTRAINED),
    "guided_regex": Field(None, _UNCONSTRAINED),
    "guided_choice": Field(None, _UNCONSTRAINED),
    "guided_grammar": Field(None, _UNCONSTRAINED),
    "structured_outputs": Field(None, _UNCONSTRAINED),
    "use_beam_search": Field(None, UNSUPPORTED),
    "min_tokens": Field(None, UNSUPPORTED),
    "bad_words": Field(None, UNSUPPORTED),
    "allowed_token_ids": Field(None, UNSUPPORTED),
    "prompt_logprobs": Field(None, UNSUPPORTED),
    "adapters": Field(None, fields.off("leave it out: this model is served without adapters")),
    **{name: Field(None, fields.ignored) for name in _IGNORED},
}


class Envelope(msgspec.Struct, frozen=True):
    """What every object of an answer repeats."""

    id: str
    created: int
    model: str


def read(
    request: Input, body: dict[str, Any], known: dict[str, Field], served: ServedModel
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the body's fields and the warnings."""
    values, unknown = fields.read_fields(body, known)
    if values.get("include_usage") is not None and not values.get("stream"):
        raise RequestError("stream_options is only allowed with stream; send stream: true or leave it out")
    warnings = fields.unknown_warnings(unknown, known)
    model = values.get("model")
    if model is None or model == served.name or model in served.served_names:
        return values, warnings
    del values["model"]
    return values, (*warnings, _other_model(request, model, served))


def _other_model(request: Input, model: str, served: ServedModel) -> str:
    """Return the warning on a model that is not served here; OpenAI's routes refuse it."""
    names = ", ".join(dict.fromkeys((*served.served_names, served.name)))
    if request.route in ROUTES:
        raise ModelNotFoundError(f"The model {fields.show(model)} does not exist; served here: {names}")
    return f"model {fields.show(model)} is ignored; served here: {names}"


def envelope_of(prefix: str, values: dict[str, Any], served: ServedModel) -> Envelope:
    default = served.served_names[0] if served.served_names else served.name
    return Envelope(f"{prefix}-{uuid4().hex}", int(time.time()), values.pop("model", default))


def sampling_of(values: dict[str, Any], max_tokens: int | None, prompt_logprobs: int | None) -> SamplingParameters:
    values.setdefault("temperature", 1.0)
    return SamplingParameters(
        max_new_tokens=max_tokens,
        do_sample=values["temperature"] > 0,
        prompt_logprobs=prompt_logprobs,
        **values,
    )
