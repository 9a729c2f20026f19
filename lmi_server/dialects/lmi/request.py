"""Parses LMI's requests: `{"inputs": str, "parameters": object, "stream": bool}`, or a prompt as plain text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import BeamSearch, GenerationRequest, SamplingParameters
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields, routes
from lmi_server.dialects.adapters import adapter_name, registered_adapter
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.fields import Field
from lmi_server.dialects.framing import SSE
from lmi_server.dialects.lmi.answer import (
    BestLinesExchange,
    JsonExchange,
    LinesExchange,
    LmiAnswerOptions,
    ParsedLmi,
    TextExchange,
)
from lmi_server.dialects.lmi.async_answer import AsyncJsonExchange, AsyncLinesExchange
from lmi_server.dialects.lmi.formatters import TEXT_ONLY, choose_framing
from lmi_server.dialects.parameters import constraints, sampling
from lmi_server.dialects.parameters.choices import CHOICES, choices_of

# --- fields ---


def _inputs(name: str, value: Any) -> str | tuple[int, ...]:
    """Read the prompt: a text or its token ids, or a list of one of these."""
    if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
        raise fields.not_allowed(name, value, "send the prompt as a string, or a chat as messages in place of inputs")
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise fields.not_allowed(name, value, "send one request for each prompt, with the prompt as a string")
        value = value[0]
    if isinstance(value, list) and value:
        return fields.token_ids(name, value)
    if not isinstance(value, str) or not value:
        raise fields.not_allowed(name, value, "send the prompt as a string that is not empty")
    return value


def _parameters(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fields.not_allowed(name, value, 'send an object such as {"max_new_tokens": 30}')
    return value


_STATIC = "leave it out, or serve the model in static batches with option.rolling_batch=disable"

# Arguments of transformers' generate() for static batches only, each with the value that changes nothing.
_OF_GENERATE: dict[str, Any] = {
    "min_length": 0,
    "max_time": None,
    "top_h": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "guidance_scale": 1,
}
# No handler takes these, but code that calls generate() may.
_OF_CODE_ONLY: dict[str, Any] = {
    "watermark": False,
    "watermarking_config": None,
    "token_healing": False,
    "penalty_alpha": 0,
    "dola_layers": None,
    "diversity_penalty": 0,
    "num_beam_groups": 1,
    "constraints": [],
    "force_words_ids": [],
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "output_logits": False,
    "return_dict_in_generate": False,
}
NO_EFFECT = frozenset(
    {
        "use_cache", "cache_implementation", "cache_config", "max_cache_len", "use_mtp", "low_memory",
        "prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config", "renormalize_logits",
        "remove_invalid_values", "pad_token_id", "bos_token_id", "decoder_start_token_id", "is_assistant",
        "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
        "assistant_early_exit", "assistant_lookbehind", "assistant_ensemble_weight", "target_lookbehind",
        "prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "stream_interval",
        "transformers_version",
    }
)  # fmt: skip
"""Parameters that never change which text is generated: how generate() computes."""


def _end_tokens(name: str, value: Any) -> tuple[int, ...]:
    """Read generate()'s eos_token_id: one token, or a list."""
    return fields.token_ids(name, value if isinstance(value, list) else [value])


PARAMETERS: dict[str, Field] = {
    **sampling.FIELDS,
    "max_new_tokens": Field("max_new_tokens", fields.MAX_TOKENS),
    "max_tokens": Field("max_tokens", fields.MAX_TOKENS),
    "min_new_tokens": Field("min_tokens", fields.integer(0, 2**31 - 1), "min_tokens"),
    "do_sample": Field("do_sample", fields.boolean),
    "stop_sequences": Field("stop_sequences", fields.stop_strings),
    "stop_strings": Field("stop_strings", fields.stop_strings),
    "ignore_eos_token": Field("ignore_eos", fields.boolean),
    "eos_token_id": Field("end_tokens", _end_tokens),
    "return_full_text": Field("return_full_text", fields.boolean),
    "details": Field("details", fields.boolean),
    "decoder_input_details": Field("decoder_input_details", fields.boolean),
    "top_n_tokens": Field("top_n_tokens", fields.LOGPROBS),
    "logprobs": Field("logprobs", fields.LOGPROBS),
    "truncate": Field("truncate", fields.MAX_TOKENS),
    "truncate_prompt_tokens": Field("truncate", fields.MAX_TOKENS),
    "n": Field("n", CHOICES),
    "num_return_sequences": Field("num_return_sequences", CHOICES),
    "best_of": Field("best_of", CHOICES),
    "num_beams": Field("num_beams", fields.integer(1, 10), "beam_search", neutral=1),
    "use_beam_search": Field("use_beam_search", fields.boolean, "beam_search"),
    "length_penalty": Field("length_penalty", fields.number(lambda value: True, "a number")),
    "early_stopping": Field("early_stopping", fields.early_stopping),
    "max_length": Field(None, fields.off("send max_new_tokens, which does not count the prompt")),
    "bad_words_ids": Field(None, fields.off("send bad_words with the texts")),
    **{name: Field(None, sampling.unless(neutral, _STATIC)) for name, neutral in _OF_GENERATE.items()},
    **{name: Field(None, sampling.unless(neutral, "leave it out")) for name, neutral in _OF_CODE_ONLY.items()},
    "adapter_id": Field("adapter", adapter_name),
}
"""The fields of `parameters`: all of vLLM's SamplingParams and of transformers' generate(), TGI's, and LMI's own."""

BODY: dict[str, Field] = {
    "inputs": Field("inputs", _inputs),
    "parameters": Field("parameters", _parameters),
    "stream": Field("stream", fields.boolean),
    "adapters": Field("adapter", adapter_name),
    "adapter": Field("adapter", adapter_name),
}


# --- parse ---


def parse_text(request: Input, served: ServedModel) -> Exchange:
    """Parse a text/plain body, which is the prompt itself. Raises RequestError."""
    return _parse(request, {}, {"inputs": _inputs("the body", fields.plain_text(request))}, served, ())


def parse_csv(request: Input, served: ServedModel) -> Exchange:
    """Parse a text/csv body: the prompt is the one row of its column `inputs`. Raises RequestError."""
    return _parse(request, {}, {"inputs": _inputs("inputs", fields.csv_inputs(request))}, served, ())


def parse(request: Input, body: dict[str, Any], served: ServedModel) -> Exchange:
    """Parse `{"inputs": str, "parameters": object, "stream": bool}`. Raises RequestError."""
    values, unknown = fields.read_fields(body, BODY)
    if "inputs" not in values:
        raise RequestError('inputs is missing; send {"inputs": "the prompt", "parameters": {...}}')
    return _parse(request, body, values, served, fields.unknown_warnings(unknown, BODY))


def parse_tgi(request: Input, body: dict[str, Any], served: ServedModel) -> Exchange:
    """Parse a request to a path of text-generation-inference; /generate and /generate_stream ignore `stream`."""
    stream = {routes.GENERATE: False, routes.GENERATE_STREAM: True}.get(request.route)
    return parse(request, body if stream is None else {**body, "stream": stream}, served)


_HOW_TO_CHOOSE = frozenset({"do_sample", "temperature", "num_beams", "use_beam_search"})

# How huggingface_hub names itself. Its client reads text-generation-inference's answers only, without asking for them.
_HUB_CLIENT = "hf_hub/"


def wants_tgi(request: Input, served: ServedModel) -> bool:
    """Return whether the answer has text-generation-inference's form, whatever the options of the model say.

    option.tgi_compat says by itself how such answers look on LMI's routes.
    """
    if request.route in routes.TGI_ROUTES:
        return True
    return not served.tgi_compat and _HUB_CLIENT in request.properties.get("user-agent", "")


def _parse(
    request: Input,
    body: Mapping[str, Any],
    values: Mapping[str, Any],
    served: ServedModel,
    warnings: tuple[str, ...],
) -> Exchange:
    """Parse a request with these values of `BODY`; `body` is empty if it is no JSON."""
    adapter = registered_adapter(request, body, served)
    parameters, further = fields.read_fields(
        values.get("parameters", {}), PARAMETERS, "parameters.", features=served.features
    )
    if further:
        warnings += _further_warnings(further)
    if served.samples and _HOW_TO_CHOOSE.isdisjoint(parameters):
        parameters["do_sample"] = True
    stream = values.get("stream", False)
    as_tgi = wants_tgi(request, served)
    asynchronous = served.async_service and not as_tgi
    framing, formatter_warnings = choose_framing(request, served, stream)
    if as_tgi:  # that server knows no option.output_formatter
        framing, formatter_warnings = SSE if stream else None, ()
    unusual = not _UNUSUAL.isdisjoint(parameters)  # most requests have none of them
    beams = _beam_search(parameters) if unusual else None
    options = _answer_options(request.route, values["inputs"], parameters, beams, served, as_tgi)
    if unusual:
        warnings += _without_effect(parameters, beams, options)
    generation = GenerationRequest(
        request_id=os.urandom(16).hex(),
        prompt=values["inputs"],
        sampling=_sampling(parameters, options, beams, framing is not None or (asynchronous and stream)),
        priority=request.priority,
        adapter=adapter,
    )
    requests = (generation,) if options.candidates == 1 else choices_of(generation, options.candidates)
    if asynchronous:
        return (AsyncLinesExchange if stream else AsyncJsonExchange)(ParsedLmi(requests, options, warnings))
    parsed = ParsedLmi(requests, options, warnings + formatter_warnings)
    if served.output_formatter == TEXT_ONLY and not as_tgi:
        return TextExchange(parsed, stream)
    if framing is None:
        return JsonExchange(parsed)
    return (LinesExchange if options.candidates == 1 else BestLinesExchange)(parsed, framing)


def _further_warnings(names: list[str]) -> tuple[str, ...]:
    """Return the warnings about parameters that are not in `PARAMETERS`."""
    unknown = [name for name in names if name not in NO_EFFECT]
    return (
        *(f"parameters.{name} has no effect on the text and is ignored" for name in names if name in NO_EFFECT),
        *fields.unknown_warnings(unknown, PARAMETERS, "parameters."),
    )


_COUNTS = frozenset({"n", "num_return_sequences", "best_of"})
_BEAMS = frozenset({"num_beams", "use_beam_search", "length_penalty", "early_stopping"})
_ONLY_WITH_BEAMS = ("early_stopping", "length_penalty")
_ONLY_WITH_DETAILS = ("decoder_input_details", "prompt_logprobs")
_UNUSUAL = frozenset({*_BEAMS, *_ONLY_WITH_DETAILS})
# Beam search takes the likeliest tokens as the model gives them, so what changes their probabilities has no place.
_WITH_BEAMS = _BEAMS | {
    "max_new_tokens", "max_tokens", "ignore_eos", "truncate", "seed", "details", "return_full_text", "adapter",
}  # fmt: skip


def _beam_search(parameters: Mapping[str, Any]) -> BeamSearch | None:
    """Return the beam search that a request asks for; None for a single beam.

    Raises RequestError for what does not go with beam search.
    """
    width, allowed = parameters.get("num_beams", 1), _WITH_BEAMS
    if parameters.get("use_beam_search", False):  # with vLLM it was best_of that said how many
        width, allowed = max(width, parameters.get("best_of", 1)), allowed | {"best_of"}
        if width == 1:
            raise RequestError("parameters.use_beam_search needs num_beams; send the number of beams with it")
    if width == 1:
        return None
    if not parameters.get("do_sample", True):
        allowed |= {"do_sample"}
    others = sorted(parameters.keys() - allowed)
    if others:
        raise RequestError(f"parameters.{others[0]} does not go with beam search; leave it out, or send num_beams=1")
    penalty, early = parameters.get("length_penalty", 1.0), parameters.get("early_stopping", False)
    return BeamSearch(width=width, length_penalty=penalty, early_stopping=early)


def _without_effect(
    parameters: Mapping[str, Any], beams: BeamSearch | None, options: LmiAnswerOptions
) -> tuple[str, ...]:
    """Return the warnings about parameters that have no effect without another parameter."""
    warnings: tuple[str, ...] = ()
    if beams is None:
        unused = (name for name in _ONLY_WITH_BEAMS if name in parameters)
        warnings += tuple(f"parameters.{name} has no effect without num_beams and is ignored" for name in unused)
    if not options.details:
        unused = (name for name in _ONLY_WITH_DETAILS if parameters.get(name))
        warnings += tuple(f"parameters.{name} has no effect without parameters.details" for name in unused)
    return warnings


def _counts(parameters: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return how many sequences the answer has, and of how many these are the best. Raises RequestError."""
    counts: dict[str, int] = {name: parameters[name] for name in sorted(_COUNTS & parameters.keys())}
    best_of = counts.get("best_of")
    n = counts.get("n") or counts.get("num_return_sequences") or best_of or 1
    if best_of is not None and best_of < n:
        raise fields.not_allowed("parameters.best_of", best_of, f"send at least n, which is {n}")
    name, count = max(counts.items(), key=lambda item: item[1])
    samples = parameters.get("do_sample", "temperature" in parameters) and parameters.get("temperature") != 0
    if count > 1 and not samples:
        raise fields.not_allowed(f"parameters.{name}", count, "send do_sample=true with it: greedy texts are the same")
    return n, best_of


def _answer_options(
    route: str,
    prompt: str | tuple[int, ...],
    parameters: Mapping[str, Any],
    beams: BeamSearch | None,
    served: ServedModel,
    as_tgi: bool,
) -> LmiAnswerOptions:
    """Return what the request asks of the form of its answer. Raises RequestError."""
    # LMI gives details with tgi_compat, asked for or not; text-generation-inference itself does not.
    always = served.tgi_compat and not as_tgi
    n, best_of = (1, None) if beams is not None or _COUNTS.isdisjoint(parameters) else _counts(parameters)
    candidates = best_of or n
    if candidates > 1 and served.output_formatter == TEXT_ONLY and not as_tgi:
        remedy = f"send 1: the answer of option.output_formatter={TEXT_ONLY} is one text"
        raise fields.not_allowed("parameters.n", candidates, remedy)
    details = parameters.get("details", False) or always or candidates > 1 or beams is not None
    return LmiAnswerOptions(
        prompt=prompt if isinstance(prompt, str) else None,
        full_text=parameters.get("return_full_text", False),
        details=details,
        prefill=details and (parameters.get("decoder_input_details", False) or "prompt_logprobs" in parameters),
        top_n=parameters.get("top_n_tokens", 0),
        tgi=served.tgi_compat or as_tgi,
        as_list=(always and not served.async_service) or route == routes.TGI,
        seed=parameters.get("seed"),
        n=n,
        candidates=candidates,
        best_of=best_of is not None,
    )


def _sampling(
    parameters: Mapping[str, Any], options: LmiAnswerOptions, beams: BeamSearch | None, streams: bool
) -> SamplingParameters:
    """Return how to choose tokens. `streams`: the answer is a stream with an object per token."""
    chosen = sampling.select(parameters)
    # As with LMI: without do_sample, a request that names a temperature samples and any other is greedy.
    chosen["do_sample"] = beams is None and parameters.get("do_sample", "temperature" in parameters)
    # A stream and `details` give every token its log probability, asked for or not.
    alternatives = max(parameters.get("logprobs", 0), options.top_n)
    chosen["logprobs"] = alternatives if streams or options.details else None
    if options.prefill or "prompt_logprobs" in chosen:
        chosen["prompt_logprobs"] = chosen.get("prompt_logprobs", 0) if options.prefill else None
    if not _TRANSLATED.isdisjoint(parameters):  # a set operation: most requests have none of them
        chosen |= _translate(parameters)
    if beams is not None:
        chosen["beams"] = beams
    chosen["fit_context"] = True
    return SamplingParameters(**chosen)


_TRANSLATED = (
    frozenset({"max_tokens", "stop_sequences", "stop_strings", "end_tokens"}) | constraints.NAMES | sampling.EXTRAS
)


def _translate(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that have other names or forms in a request."""
    given = parameters.get
    translated: dict[str, Any] = {
        "structured_outputs": constraints.find(parameters),
        "extra": sampling.extras(parameters),
    }
    if "max_tokens" in parameters:
        translated["max_new_tokens"] = given("max_new_tokens", parameters["max_tokens"])
    sequences = given("stop_sequences", ()) + given("stop_strings", ())
    if sequences:
        translated["stop"] = tuple(dict.fromkeys(given("stop", ()) + sequences))
    if "end_tokens" in parameters:  # these, in place of the model's own
        translated["ignore_eos"] = True
        translated["stop_token_ids"] = given("stop_token_ids", ()) + parameters["end_tokens"]
    return translated
