"""Requests and deltas of text generation: the values between the dialects and a handler. No engine, no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from lmi_server.contract.protocol import DEFAULT_PRIORITY

FinishReason = Literal["length", "eos_token", "stop_sequence"]
"""Why a sequence ended; the names are LMI's. `stop_sequence` covers `stop`, `stop_sequences` and `stop_token_ids`."""

Feature = Literal[
    "structured_outputs",
    "tools",
    "media",
    "reasoning",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "beam_search",
    "engine_extras",
]
"""What only some engines support. A handler lists its own in `ModelInfo.features`.

A dialect refuses, by name, a field that needs any other feature. "media" are parts of messages other than text,
"reasoning" is a limit on the model's reasoning (`ChatOptions.thinking_token_budget`), "engine_extras" is
`SamplingParameters.extra`; the others are fields of the structs below.
"""

PROMPT_BEGINNING = "{#- begins like a prompt -#}"
"""Stands in a chat template for the special tokens that the tokenizer puts before a prompt."""

MIN_TEMPERATURE = 1e-5
"""Below this, dividing logits by the temperature overflows float32, so that only the most likely token is left."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must match. `kind` decides what `value` is:

    "json": a JSON schema, as an object or as text; "json_object": True; "regex": a regular expression; "choice": the
    texts that the output may be; "grammar": text in EBNF or Lark's form; "structural_tag": text in xgrammar's
    form.
    """

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    value: Any
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search for the likeliest sequence with `width` beams; it means what it means in transformers' generate()."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose the next token; names and defaults are LMI's (`parameters` of an LMI request).

    A `temperature` of 0 (below 1e-5) is greedy, like `do_sample=False`. A `top_k` of 0, a `top_p` of 1.0 and a
    `typical_p` of 1.0 have no effect. `logprobs` is the number of alternatives to report per token; 0 reports the log
    probability of the chosen token alone, None reports none.
    """

    max_new_tokens: int | None = 30  # None: as many as the context has room for
    fit_context: bool = False  # as many as it has room for too if `max_new_tokens` are more; otherwise that is refused
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
    prompt_logprobs: int | None = None  # the same for the prompt (LMI: decoder_input_details)
    truncate: int | None = None  # keep only the last `truncate` prompt tokens
    min_tokens: int = 0  # before so many tokens, no end of sequence and no stop token
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    structured_outputs: StructuredOutputs | None = None
    spaces_between_special_tokens: bool = True
    beams: BeamSearch | None = None  # in place of sampling; the answer is the likeliest sequence
    extra: Mapping[str, Any] = {}  # parameters that only the engine knows, by its own names

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature < MIN_TEMPERATURE


class NamedTool(msgspec.Struct, frozen=True):
    """The function that a chat's answer must call."""

    name: str


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to render a chat and how to read its answer; names and defaults are vLLM's."""

    tool_choice: Literal["none", "auto", "required"] | NamedTool = "none"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Mapping[str, Any] = {}
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    thinking_token_budget: int | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate.

    `prompt` is a text, the token ids, or None if `messages` holds a chat in OpenAI's form, which the handler renders
    with the tokenizer's chat template. Without `stream`, deltas are read once the last one is there, so an engine may
    return the whole output as one. `priority`: lower runs sooner (LMI: `x-priority`, default 3). `adapter` is the name
    of one of `LLMHandler.adapters`, None for the model without adapter.
    """

    request_id: str
    prompt: str | tuple[int, ...] | None
    sampling: SamplingParameters
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    chat: ChatOptions = ChatOptions()
    stream: bool = True
    add_special_tokens: bool = True
    priority: int = DEFAULT_PRIORITY
    adapter: str | None = None


class TopToken(msgspec.Struct, frozen=True):
    """One alternative at a position: its id, its text, and its log probability (natural, after temperature 1)."""

    id: int
    text: str
    logprob: float | None


class Token(msgspec.Struct, frozen=True):
    """One generated (or prompt) token. `logprob` is None if it was not computed (the first prompt token)."""

    id: int
    text: str
    logprob: float | None = None
    special: bool = False
    top: tuple[TopToken, ...] = ()
    rank: int | None = None  # 1 is the most likely of the vocabulary; None if it was not computed


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens whose KV cache was reused
    reasoning_tokens: int | None = None  # None if the handler does not parse the model's reasoning
    room: int | None = None  # tokens that the context had room for, if `max_new_tokens` were more


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of one tool call. The first of each `index` has `id` and `name`; the joined `arguments` are JSON."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str | None = None


class Delta(msgspec.Struct, frozen=True):
    """What one step added to one sequence.

    `text` never ends inside a character or inside a possible stop sequence, so it may be empty or cover several
    tokens. `tokens` are the step's tokens in order (none if the delta only flushes text). The last delta, and only the
    last one, has a `finish_reason` and `usage`; its `stop_reason` is the stop string or token id that ended the
    sequence. The first delta has `prompt_text`, the prompt as the model saw it (a chat rendered by its template),
    `prompt_token_ids`, and, if the request set `prompt_logprobs`, `prompt_tokens`. The last one has `transfer_params`
    if the engine hands the KV cache to another engine: the parameters of that request, by the names of its fields.

    If the handler parses tool calls and reasoning out of a chat's answer, `text` is the content alone.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    prompt_text: str | None = None
    prompt_tokens: tuple[Token, ...] | None = None
    prompt_token_ids: Sequence[int] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    stop_reason: str | int | None = None
    transfer_params: Mapping[str, Any] = {}
