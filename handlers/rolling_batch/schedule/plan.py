"""Sequences, and what a step does with them: plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from handlers.rolling_batch.schedule.images import PromptImages
from handlers.rolling_batch.schedule.page_table import PageStep
from handlers.rolling_batch.schedule.slot_contents import SlotTrim
from handlers.rolling_batch.schedule.slots import SlotCopy
from handlers.rolling_batch.schedule.state_table import StateStep


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the rolling batch. `tokens` is the prompt, followed by the output.

    The first `known` tokens are known. What stands for the others, whose step was computed and not read yet, is up to
    the engine.

    `number` is the engine's own. What clients call their requests tells no sequences apart.
    """

    number: int
    tokens: list[int]
    prompt_len: int
    max_new_tokens: int
    priority: int = 3
    adapter: Any = None  # its LoRA weights, which keys and values depend on
    may_reuse_prefix: bool = True  # whether it may continue from keys and values that other sequences computed
    shares_prefix: bool = True  # whether other sequences may continue from its keys and values
    computed: int = 0  # tokens whose keys and values are in the KV cache
    slot: int = -1
    cached: int = -1  # prompt tokens that it took over from other sequences; -1 before it first ran
    arrival: int = -1
    overtaken: int = 0  # sequences that came later and were admitted before it
    images: PromptImages | None = None  # of the prompt
    regime: int = 0  # of its rotary embeddings, which keys depend on; see FrequencyBorder
    known: int = field(init=False)

    def __post_init__(self) -> None:
        self.known = len(self.tokens)

    @property
    def keys(self) -> list[int]:
        """What identifies its tokens in the prefix tree: the token ids, but for images and other frequencies."""
        keys = self.tokens if self.images is None else self.images.keys_of(self.tokens)
        return keys if not self.regime else [keys[0] - (self.regime << 40), *keys[1:]]

    @property
    def max_kv_tokens(self) -> int:
        """Tokens that the sequence may have in the KV cache at most: its last output token is never written."""
        return self.prompt_len + self.max_new_tokens - 1

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.computed == len(self.tokens) - 1

    @property
    def ends(self) -> bool:
        """Whether its last token was computed, and only has to become known."""
        return len(self.tokens) - self.prompt_len >= self.max_new_tokens

    @property
    def is_begun(self) -> bool:
        """Whether it runs, or waits for a token of the time when it ran."""
        return self.slot >= 0 or self.known < len(self.tokens)

    def append(self, unknown: int) -> None:
        """Add a token that is not known yet; `unknown` stands for it."""
        self.tokens.append(unknown)

    def settle(self, token: int) -> None:
        """Put a token in place of the first one that is unknown."""
        self.tokens[self.known] = token
        self.known += 1

    def drop_unknown(self) -> None:
        """Drop what was computed behind the last token. Keys and values of that one may stay."""
        del self.tokens[self.known :]


@dataclass(slots=True, frozen=True)
class Chunk:
    """Compute `tokens[start:end]` of a sequence in this step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def completes_prompt(self) -> bool:
        """Whether an output token follows. If the sequence was retracted, its output so far counts as prompt."""
        return self.end == len(self.sequence.tokens)


@dataclass(slots=True, frozen=True)
class Retraction:
    """Running sequences that went back to the queue because memory ran short, and the new-token ratios around it."""

    sequences: list[Sequence]
    ratio_before: float
    ratio_after: float


@dataclass(slots=True, frozen=True)
class StepPlan:
    """Do `trims`, then `copies`, then what `pages` has; then one forward pass.

    It has a token of each of `decode`, then the tokens of `prefill`.

    `drafts` has the tokens that may follow some of `decode`, and are computed behind these sequences' own token.
    `started` are the sequences that run for the first time. It and `retraction` are for the statistics. `states` has
    what is done with the states of recurrent layers, if there are such.
    """

    decode: list[Sequence]
    prefill: list[Chunk]
    trims: list[SlotTrim] = field(default_factory=list)
    copies: list[SlotCopy] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    retraction: Retraction | None = None
    drafts: Mapping[Sequence, list[int]] = field(default_factory=dict)
    states: StateStep | None = None
    pages: PageStep = field(default_factory=PageStep)

    def stretches(self) -> Iterator[tuple[Sequence, int, int]]:
        """Yield for each stretch of rows of the pass, in order, its sequence and its tokens from start to end."""
        for sequence in self.decode:
            yield sequence, sequence.computed, sequence.computed + 1 + len(self.drafts.get(sequence, ()))
        for chunk in self.prefill:
            yield chunk.sequence, chunk.start, chunk.end


Draft = Callable[[list[tuple[Sequence, int]], int, int], Mapping[Sequence, list[int]]]
"""Proposes tokens for sequences, at most so many for each; see `speculation.Drafter.propose`."""
