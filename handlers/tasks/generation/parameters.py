"""The parameters of requests for tasks that generate text: how they are read, and which of them generate() gets."""

from __future__ import annotations

from typing import Any

from handlers.tasks.task import same_names
from lmi_server.dialects import fields
from lmi_server.dialects.fields import Field

_COUNT = fields.integer(1)
_SWITCHED_OFF = fields.integer(0)
_NUMBER = fields.number(lambda value: True, "a number")
_SHARE = fields.number(lambda value: 0 <= value < 1, "a number from 0 to below 1 (0 is off)")


def _tokens(name: str, value: Any) -> int | list[int]:
    """Read one token id, or a list of them."""
    return list(fields.token_ids(name, value)) if isinstance(value, list) else fields.token_ids(name, [value])[0]


def _token_lists(name: str, value: Any) -> list[list[int]]:
    if not isinstance(value, list) or not value:
        raise fields.not_allowed(name, value, "send a list of lists of token ids, such as [[12, 345]]")
    return [list(fields.token_ids(name, item)) for item in value]


def _length_penalty(name: str, value: Any) -> tuple[int, float]:
    """Read exponential_decay_length_penalty: the first token of the penalty, and its factor."""
    if not isinstance(value, list) or len(value) != 2:
        raise fields.not_allowed(name, value, "send [start, factor], such as [20, 1.1]")
    return _SWITCHED_OFF(name, value[0]), _NUMBER(name, value[1])


def _sequence_bias(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise fields.not_allowed(name, value, "send a list such as [[[12, 345], -5.0]]")
    for item in value:
        if not isinstance(item, list) or len(item) != 2:
            raise fields.not_allowed(name, item, "send pairs of token ids and a bias, such as [[12, 345], -5.0]")
    return [[list(fields.token_ids(name, ids)), _NUMBER(name, bias)] for ids, bias in value]


PARAMETERS = {
    **same_names(
        max_new_tokens=fields.MAX_TOKENS,
        max_length=fields.MAX_TOKENS,
        max_time=fields.number(lambda value: value > 0, "a number of seconds above 0"),
        min_new_tokens=_SWITCHED_OFF,
        min_length=_SWITCHED_OFF,
        do_sample=fields.boolean,
        temperature=fields.TEMPERATURE,
        top_k=fields.top_k,
        top_p=fields.PROBABILITY,
        top_h=fields.PROBABILITY,
        typical_p=fields.PROBABILITY,
        min_p=fields.MIN_P,
        epsilon_cutoff=_SHARE,
        eta_cutoff=_SHARE,
        repetition_penalty=fields.REPETITION,
        encoder_repetition_penalty=fields.REPETITION,
        no_repeat_ngram_size=_SWITCHED_OFF,
        encoder_no_repeat_ngram_size=_SWITCHED_OFF,
        bad_words_ids=_token_lists,
        suppress_tokens=fields.token_ids,
        begin_suppress_tokens=fields.token_ids,
        sequence_bias=_sequence_bias,
        forced_bos_token_id=_tokens,
        forced_eos_token_id=_tokens,
        eos_token_id=_tokens,
        exponential_decay_length_penalty=_length_penalty,
        guidance_scale=fields.number(lambda value: value > 0, "a number above 0 (1 is off)"),
        renormalize_logits=fields.boolean,
        remove_invalid_values=fields.boolean,
        use_cache=fields.boolean,
        num_return_sequences=_COUNT,
        num_beams=_COUNT,
        length_penalty=_NUMBER,
        early_stopping=fields.early_stopping,
        seed=fields.SEED,
        stop=fields.stop_strings,
        include_stop_str_in_output=fields.boolean,
    ),
    "stop_sequences": Field("stop", fields.stop_strings),
    "stop_strings": Field("stop", fields.stop_strings),
    "max_tokens": Field("max_new_tokens", fields.MAX_TOKENS),
    "min_tokens": Field("min_new_tokens", _SWITCHED_OFF),
    "details": Field("details", fields.boolean),
    # What text-generation-inference's clients always send.
    "best_of": Field(None, fields.one("send num_return_sequences")),
    "watermark": Field(None, fields.off("leave it out")),
    "decoder_input_details": Field(None, fields.off("leave it out, or serve the model under the rolling batch")),
    "ignore_eos": Field("ignore_eos", fields.boolean),
    "ignore_eos_token": Field("ignore_eos", fields.boolean),
}
TOKEN_PARAMETERS = frozenset(
    {"bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "eos_token_id"}
    | {"forced_bos_token_id", "forced_eos_token_id"}
)
LOWERED = "tokens of the longest prompt"  # set by `fit` alone: no request can name it
# Parameters that the tasks apply themselves; generate() does not get them.
OUR_OWN = frozenset(
    {"seed", "stop", "include_stop_str_in_output", "return_full_text", "src_lang", "tgt_lang", "ignore_eos", "details"}
    | {LOWERED}
)
NO_TOKEN = -1  # as the end of a sequence: no token is
SAMPLING = frozenset({"temperature", "top_k", "top_p", "top_h", "typical_p", "min_p", "epsilon_cutoff", "eta_cutoff"})


def flat_tokens(name: str, value: Any) -> list[int]:
    """Return the token ids in the value of a parameter."""
    if isinstance(value, int):
        return [value]
    if name == "sequence_bias":
        return [token for ids, _ in value for token in ids]
    return [token for item in value for token in (item if isinstance(item, list) else [item])]
