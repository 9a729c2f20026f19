"""The choices of an answer: several sequences for one prompt, and why each ended."""

from __future__ import annotations

import msgspec

from lmi_server.contract.generation import FinishReason, GenerationRequest, SamplingParameters
from lmi_server.dialects import fields

FINISH: dict[FinishReason, str] = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}
"""Why a choice ended, as OpenAI and vLLM name it."""

CHOICES = fields.integer(1, 128)  # OpenAI's own bound on n
"""Reads the number of sequences."""


def choices_of(generation: GenerationRequest, count: int) -> tuple[GenerationRequest, ...]:
    """Return the requests for `count` choices of one prompt.

    With the same seed every choice would be the same text. So the first has the request's seed and the others count up
    from it, as with vLLM.
    """
    return tuple(
        msgspec.structs.replace(
            generation,
            request_id=f"{generation.request_id}-{index}",
            sampling=_with_seed_of_choice(generation.sampling, index),
        )
        for index in range(count)
    )


def _with_seed_of_choice(sampling: SamplingParameters, index: int) -> SamplingParameters:
    if not index or sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + index)
