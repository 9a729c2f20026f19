"""The sampling parameters that LMI's requests and OpenAI's share: the fields of vLLM's SamplingParams.

Every field of SamplingParams is in `FIELDS`. Parameters that no request can use here are refused by name, unless their
value changes nothing: an answer that silently leaves out a parameter is a wrong answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import SamplingParameters
from lmi_server.dialects import fields
from lmi_server.dialects.fields import Field, Reader
from lmi_server.dialects.parameters import constraints

# Only the engine can check what these hold.
_ENGINE_EXTRAS: dict[str, Reader] = {
    "vllm_xargs": fields.mapping,
    "kv_transfer_params": fields.mapping,
    "ec_transfer_params": fields.mapping,
    "repetition_detection": fields.mapping,
    "cache_salt": fields.string,
    "skip_reading_prefix_cache": fields.boolean,
    "watermarking": fields.boolean,
}
# How vLLM's own server talks to its engine, or changes of the answer's form beyond the dialects'.
_INTERNAL = (
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "logprob_token_ids",
    "flat_logprobs",
    "output_kind",
    "skip_clone",
    "output_text_buffer_length",
    "extra_args",
    "routed_experts_prompt_start",
    "trace_decode_token_ids",
)


def unless(neutral: Any, remedy: str) -> Reader:
    """Return the reader of a field that only the value `neutral` leaves without effect; any other is refused."""

    def read(name: str, value: Any) -> None:
        if value != neutral:
            raise RequestError(f"{name} is not supported; {remedy}")

    return read


FIELDS: dict[str, Field] = {
    "min_tokens": Field("min_tokens", fields.integer(0, 2**31 - 1), "min_tokens"),
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
    "spaces_between_special_tokens": Field(
        "spaces_between_special_tokens", fields.boolean, "engine_extras", neutral=True
    ),
    "bad_words": Field("bad_words", fields.bad_words, "bad_words"),
    "allowed_token_ids": Field("allowed_token_ids", fields.token_ids, "allowed_token_ids"),
    "prompt_logprobs": Field("prompt_logprobs", fields.LOGPROBS),
    **constraints.FIELDS,
    **{name: Field(name, read, "engine_extras") for name, read in _ENGINE_EXTRAS.items()},
    "detokenize": Field(None, unless(True, "leave it out: the answer is the text")),
    "thinking_token_budget": Field(None, fields.off("leave it out; chats take it if the model has a reasoning parser")),
    "use_beam_search": Field(None, fields.off("leave it out, or send parameters.num_beams to /invocations")),
    **{name: Field(None, fields.off("leave it out")) for name in _INTERNAL},
}
"""The fields by name; `n`, `max_tokens` and `logprobs` differ between the dialects."""

EXTRAS = frozenset(_ENGINE_EXTRAS)
"""The parameters that only the engine knows."""

_NAMES = frozenset(SamplingParameters.__struct_fields__)


def select(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of SamplingParameters."""
    selected = dict(values)  # a comprehension takes twice as long
    for name in values:
        if name not in _NAMES:
            del selected[name]
    return selected


def extras(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that only the engine knows."""
    return {} if EXTRAS.isdisjoint(values) else {name: values[name] for name in _ENGINE_EXTRAS if name in values}
