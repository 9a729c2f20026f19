"""The parameters of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def guides(self) -> int:
        return sum(map(bool, (self.json, self.regex, self.grammar, self.json_object, self.structural_tag)))


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: list[str] | str | None = None
    bad_token_ids: list[int] | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    logits_processor: Any = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    _return_log_probs: bool = False
    lookahead_config: Any = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stop_words: list[tuple[str | int, list[int]]] = field(default_factory=list, init=False)
    bad_ids: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.best_of = self.best_of or self.n
        if self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        if self.best_of > 1 and self.greedy:
            raise ValueError(f"Greedy decoding in the LLM API does not allow multiple returns, got {self.best_of}")
        if self.guided_decoding is not None and self.guided_decoding.guides() > 1:
            raise ValueError("Only one guide can be used for a request")

    @property
    def greedy(self) -> bool:
        return not self.use_beam_search and self.top_k in (None, 1) and self.top_p in (None, 0.0)

    def set_up(self, tokenizer: Any) -> None:
        """Read what only a tokenizer knows."""
        self.end_id = tokenizer.eos_token_id if self.end_id is None else self.end_id
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        self.stop_words = [(text, tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        self.stop_words += [(token, [token]) for token in self.stop_token_ids or ()]
        for text in [self.bad] if isinstance(self.bad, str) else self.bad or []:
            self.bad_ids.update(tokenizer.encode(text, add_special_tokens=False))
