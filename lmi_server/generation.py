"""What a handler for text generation takes and gives: plain values that know no engine and no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

FinishReason = Literal["length", "eos_token", "stop_sequence"]
"""Why a sequence ended; the names are LMI's. `stop_sequence` covers `stop`, `stop_sequences` and `stop_token_ids`."""


_COLDEST = 1e-5  # below this, dividing logits by the temperature overflows float32 and only the best token is left


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose the next token; names and defaults are LMI's (`parameters` of an LMI request).

    `temperature` of 0 (below 1e-5) is greedy, as `do_sample=False` is. `top_k` of 0 and `top_p`, `typical_p` of 1.0 are
    off. `logprobs` is the number of alternatives to report per token (0: only the chosen one's); None reports none.
    """

    max_new_tokens: int | None = 30  # None: as many as the context has room for
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: bool = False  # LMI: decoder_input_details
    truncate: int | None = None  # keep only the last `truncate` prompt tokens

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature < _COLDEST


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate.

    `prompt` is a text, a list of token ids, or None where `messages` holds a chat in OpenAI's form, which the handler
    renders with the tokenizer's chat template. `priority`: lower runs sooner (LMI: `x-priority`, default 3). `adapter`
    is the name of a LoRA adapter that the handler was given, None for the model as it is.
    """

    request_id: str
    prompt: str | tuple[int, ...] | None
    sampling: SamplingParameters
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    add_special_tokens: bool = True
    priority: int = 3
    adapter: str | None = None


class TopToken(msgspec.Struct, frozen=True):
    """One alternative at a position: its id, its text, and its log probability (natural, after temperature 1)."""

    id: int
    text: str
    logprob: float | None


class Token(msgspec.Struct, frozen=True):
    """One generated (or prompt) token. `logprob` is None where it was not computed (the first prompt token)."""

    id: int
    text: str
    logprob: float | None = None
    special: bool = False
    top: tuple[TopToken, ...] = ()


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens whose KV cache was reused


class Delta(msgspec.Struct, frozen=True):
    """What one step added to one sequence.

    `text` never ends inside a character or inside a possible stop sequence, so it may be empty or cover several
    tokens. `tokens` are the step's tokens in order (none on a delta that only flushes text). The last delta, and only
    the last one, has a `finish_reason` and `usage`. The first delta carries `prompt_text`, the prompt as the model saw
    it (a chat rendered by its template), and, where `prompt_logprobs` asked for them, `prompt_tokens`.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    prompt_text: str | None = None
    prompt_tokens: tuple[Token, ...] | None = None
