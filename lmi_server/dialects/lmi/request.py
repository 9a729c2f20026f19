"""Parses LMI's requests: `{"inputs": str, "parameters": object, "stream": bool}`, or a prompt as plain text."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import GenerationRequest, SamplingParameters
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields
from lmi_server.dialects.adapters import adapter_name, registered_adapter
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.fields import Field
from lmi_server.dialects.lmi.answer import AnswerOptions, JsonExchange, LinesExchange, TextExchange
from lmi_server.dialects.lmi.formatters import TEXT_ONLY, choose_framing

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
_UNCONSTRAINED = "leave it out: this path cannot constrain the output to a grammar or a schema"

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
"""The known fields of `parameters`."""

_BODY: dict[str, Field] = {
    "inputs": Field("inputs", _inputs),
    "parameters": Field("parameters", _parameters),
    "stream": Field("stream", fields.boolean),
    "adapters": Field("adapter", adapter_name),
    "adapter": Field("adapter", adapter_name),
}


# --- parse ---


def parse_text(request: Input, served: ServedModel) -> Exchange:
    """Parse a text/plain body, which is the prompt itself. Raises RequestError."""
    prompt = _inputs("the body", fields.plain_text(request))
    return _exchange(request, served, {"inputs": prompt, "adapter": registered_adapter(request, {}, served)}, ())


def parse(request: Input, body: dict[str, Any], served: ServedModel) -> Exchange:
    """Parse `{"inputs": str, "parameters": object, "stream": bool}`. Raises RequestError."""
    values, unknown = fields.read_fields(body, _BODY)
    if "inputs" not in values:
        raise RequestError('inputs is missing; send {"inputs": "the prompt", "parameters": {...}}')
    values["adapter"] = registered_adapter(request, body, served)
    return _exchange(request, served, values, fields.unknown_warnings(unknown, _BODY))


def _exchange(request: Input, served: ServedModel, values: dict[str, Any], warnings: tuple[str, ...]) -> Exchange:
    parameters, unknown = fields.read_fields(values.get("parameters", {}), PARAMETERS, "parameters.")
    warnings += fields.unknown_warnings(unknown, PARAMETERS, "parameters.")
    parameters.pop("adapter", None)  # `registered_adapter` has read it
    stream = values.get("stream", False)
    framing, formatter_warnings = choose_framing(request, served, stream)
    prompt = values["inputs"]
    options = _answer_options(prompt, parameters, served.tgi_compat)
    if not options.details and parameters.get("decoder_input_details"):
        warnings += ("parameters.decoder_input_details has no effect without parameters.details",)
    generation = GenerationRequest(
        request_id=uuid4().hex,
        prompt=prompt,
        sampling=_sampling(parameters, options, framing is not None),
        priority=request.priority,
        adapter=values["adapter"],
    )
    warnings += formatter_warnings
    if served.output_formatter == TEXT_ONLY:
        return TextExchange(generation, options, warnings, stream)
    if framing is None:
        return JsonExchange(generation, options, warnings)
    return LinesExchange(generation, options, warnings, framing)


def _answer_options(prompt: str, parameters: dict[str, Any], tgi: bool) -> AnswerOptions:
    """Take out of `parameters` what concerns the form of the answer only."""
    details = parameters.pop("details", tgi) or tgi
    return AnswerOptions(
        prompt=prompt,
        full_text=parameters.pop("return_full_text", False),
        details=details,
        prefill=details and parameters.get("decoder_input_details", False),
        top_n=parameters.pop("top_n_tokens", 0),
        tgi=tgi,
        seed=parameters.get("seed"),
    )


def _sampling(parameters: dict[str, Any], options: AnswerOptions, lines: bool) -> SamplingParameters:
    """Return what is left of `parameters`. `lines`: the answer is a stream with an object per token."""
    parameters.pop("decoder_input_details", None)
    # As with LMI: without do_sample, a request that names a temperature samples and any other is greedy.
    parameters.setdefault("do_sample", "temperature" in parameters)
    # A stream and `details` give every token its log probability, asked for or not.
    alternatives = max(parameters.pop("logprobs", 0), options.top_n)
    parameters["logprobs"] = alternatives if lines or options.details else None
    sequences = parameters.pop("stop_sequences", ())
    if sequences:
        parameters["stop"] = tuple(dict.fromkeys(parameters.get("stop", ()) + sequences))
    return SamplingParameters(prompt_logprobs=0 if options.prefill else None, **parameters)
