"""Turns a generation request into what TensorRT-LLM takes: sampling parameters, and the errors of clients."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handlers.generation.parameters import warn_of_typical_p
from handlers.tensorrt_llm import library
from handlers.tensorrt_llm.options import TensorRtLlmOptions
from lmi_server.contract.errors import ContextLengthError, RequestError
from lmi_server.contract.generation import SamplingParameters, StructuredOutputs

CACHE_SALT = "cache_salt"  # an argument of generate_async, not a sampling parameter
# The errors of TensorRT-LLM for an impossible request: the client gets the error, and the engine goes on.
CLIENT_ERRORS = (ValueError, TypeError)
_MIN_BIAS = -1e9  # of tokens that are not allowed; an infinite bias can become NaN in the sampler


@dataclass(frozen=True)
class RequestLimits:
    """What a loaded model allows: tokens of prompt and output together, and what its options say.

    `keeps_logits` is False for an engine of TensorRT that was built without them.
    """

    max_seq_len: int
    max_input_len: int
    vocabulary: int
    keeps_logits: bool
    options: TensorRtLlmOptions

    def room(self, prompt: int, sampling: SamplingParameters) -> int:
        """Return the tokens that the context has for the answer. Raises ContextLengthError if they are too few."""
        room = self.max_seq_len - prompt
        asked = 1 if sampling.max_new_tokens is None or sampling.fit_context else sampling.max_new_tokens
        if prompt > self.max_input_len:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens, and the engine takes {self.max_input_len}"
                " (option.max_input_len); shorten the prompt",
                prompt,
                asked,
                self.max_input_len,
            )
        if asked > room:
            raise ContextLengthError.from_counts(prompt, asked, self.max_seq_len)
        return room


def sampling_params(sampling: SamplingParameters, room: int, limits: RequestLimits) -> library.SamplingParams:
    """Return `sampling` in TensorRT-LLM's form, for an answer of `room` tokens at most.

    Raises RequestError for what this engine cannot do, or TensorRT-LLM refuses.
    """
    if sampling.typical_p != 1.0:
        warn_of_typical_p("TensorRT-LLM")
    _refuse_extras(sampling.extra)
    asked = sampling.max_new_tokens
    values = {
        "max_tokens": room if asked is None else min(asked, room),
        "min_tokens": sampling.min_tokens or None,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "include_stop_str_in_output": sampling.include_stop_str_in_output,
        "ignore_eos": sampling.ignore_eos,
        "bad": list(sampling.bad_words) or None,
        "repetition_penalty": None if sampling.repetition_penalty == 1.0 else sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "skip_special_tokens": sampling.skip_special_tokens,
        "spaces_between_special_tokens": sampling.spaces_between_special_tokens,
        "add_special_tokens": False,  # the prompt is tokenized already
        "guided_decoding": _guided_decoding(sampling.structured_outputs, limits.options),
        "embedding_bias": _bias(sampling, limits.vocabulary),
        **_choice(sampling, limits.options),
        **_logprobs(sampling, limits.keeps_logits),
    }
    try:
        parameters = library.SamplingParams(**{name: value for name, value in values.items() if value is not None})
    except CLIENT_ERRORS as error:
        raise RequestError(f"TensorRT-LLM refuses the parameters: {error}") from error
    if sampling.logprobs == 0 and "logprobs" not in values:
        library.report_chosen_logprobs(parameters)
    return parameters


def _choice(sampling: SamplingParameters, options: TensorRtLlmOptions) -> Mapping[str, Any]:
    """Return how the next token is chosen. Each value is explicit, because TensorRT-LLM's defaults are greedy."""
    if sampling.beams is not None:
        width = sampling.beams.width
        if width > options.max_beam_width:
            raise RequestError(
                f"num_beams={width} is more than option.max_beam_width={options.max_beam_width} of this model"
            )
        stopping = {True: 1, False: 0, "never": 2}[sampling.beams.early_stopping]
        penalty = sampling.beams.length_penalty
        return {"use_beam_search": True, "best_of": width, "length_penalty": penalty, "early_stopping": stopping}
    if sampling.greedy:
        return {"top_k": 1}
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
        # Without a seed it is 0, and the same request always gets the same answer.
        "seed": random.getrandbits(63) if sampling.seed is None else sampling.seed,
    }


def _logprobs(sampling: SamplingParameters, keeps_logits: bool) -> Mapping[str, Any]:
    """Return how many log probabilities TensorRT-LLM reports per token; it does not know 0, the chosen one alone."""
    asked = sampling.logprobs
    if asked and not keeps_logits:
        raise RequestError(
            f"{asked} alternatives per token need an engine that keeps its logits;"
            " set option.gather_generation_logits=true"
        )
    chosen_alone = asked == 0 and not keeps_logits
    tokens = {} if asked is None or chosen_alone else {"logprobs": max(1, asked)}
    prompt = sampling.prompt_logprobs
    return tokens if prompt is None else {**tokens, "prompt_logprobs": max(1, prompt)}


def _guided_decoding(constraint: StructuredOutputs | None, options: TensorRtLlmOptions) -> Any:
    if constraint is None:
        return None
    if options.guided_decoding_backend is None:
        raise RequestError(
            f"structured outputs ({constraint.kind}) need a library that enforces them;"
            " set option.guided_decoding_backend=xgrammar"
        )
    if constraint.whitespace_pattern or constraint.disable_any_whitespace or constraint.disable_additional_properties:
        raise RequestError("TensorRT-LLM has no settings for whitespace and further properties in JSON; leave them out")
    if constraint.kind == "choice":
        grammar = " | ".join(json.dumps(text, ensure_ascii=False) for text in constraint.value)
        return library.GuidedDecodingParams(grammar=f"root ::= {grammar}")
    return library.GuidedDecodingParams(**{constraint.kind: constraint.value})


def _bias(sampling: SamplingParameters, vocabulary: int) -> Any:
    """Return what is added to the logits of each token; None for nothing."""
    if not sampling.logit_bias and sampling.allowed_token_ids is None:
        return None
    outside = [token for token in (*sampling.logit_bias, *(sampling.allowed_token_ids or ())) if token >= vocabulary]
    if outside:
        raise RequestError(f"token id {outside[0]} is not in the vocabulary of {vocabulary} tokens")
    import torch  # TensorRT-LLM has imported it already

    if sampling.allowed_token_ids is None:
        bias = torch.zeros(vocabulary, dtype=torch.float32)
    else:
        bias = torch.full((vocabulary,), _MIN_BIAS, dtype=torch.float32)
        bias[list(sampling.allowed_token_ids)] = 0.0
    for token, value in sampling.logit_bias.items():
        bias[token] += value
    return bias


def _refuse_extras(extra: Mapping[str, Any]) -> None:
    unknown = sorted(extra.keys() - {CACHE_SALT})
    if unknown:
        raise RequestError(f"{unknown[0]} is not supported by TensorRT-LLM; leave it out")
