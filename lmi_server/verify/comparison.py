"""What changed between two answers to each of some prompts. Log-probabilities are in nats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lmi_server.bench.paired import PairedRatios
from lmi_server.verify.asking import Answer

_TIE = 0.1
"""Nats between two tokens, below which rounding decides which of them is chosen."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The answers of old and new to one prompt.

    `place` is the index of the first token that differs, None if the answers are the same. `gap` is by how much the old
    model preferred its own token there to the new one's: near 0 the two were a tie. If `is_beyond`, the new token was
    not among the likeliest ones, and the gap is larger. `shifts` are the changes of the log-probabilities of the tokens
    before that place, new less old.
    """

    prompt: str
    old: Answer
    new: Answer
    place: int | None
    gap: float | None
    is_beyond: bool
    shifts: tuple[float, ...]

    @property
    def is_whole(self) -> bool:
        return self.old.error is None and self.new.error is None

    @property
    def changed(self) -> bool:
        return self.is_whole and self.old.text != self.new.text

    @property
    def is_tie(self) -> bool:
        """Return whether the old model found the new token about as likely as its own, where the answers differ."""
        return self.changed and self.gap is not None and not self.is_beyond and self.gap < _TIE

    @property
    def slower(self) -> float | None:
        """Return the new time per token as a multiple of the old one; None without both."""
        if not self.is_whole or not self.old.seconds or not self.new.seconds:
            return None
        return (self.new.seconds / max(len(self.new.tokens), 1)) / (self.old.seconds / max(len(self.old.tokens), 1))


def compare(prompt: str, old: Answer, new: Answer) -> Pair:
    """Return what changed between two answers to a prompt."""
    common = 0
    for before, after in zip(old.tokens, new.tokens, strict=False):
        if before.text != after.text:
            break
        common += 1
    shifts = tuple(new.tokens[index].logprob - old.tokens[index].logprob for index in range(common))
    if old.error or new.error or old.text == new.text:
        return Pair(prompt, old, new, None, None, False, shifts)
    if common >= len(old.tokens) or common >= len(new.tokens):  # one ends where the other goes on
        return Pair(prompt, old, new, common, None, False, shifts)
    own = old.tokens[common]
    chosen = own.top.get(new.tokens[common].text)
    lowest = min(own.top.values(), default=own.logprob)
    gap = own.logprob - (lowest if chosen is None else chosen)
    return Pair(prompt, old, new, common, gap, chosen is None, shifts)


@dataclass(frozen=True, slots=True)
class ComparisonSummary:
    """Figures over all prompts. `mean_shift` and `largest_shift` are of absolute values; None without any."""

    prompts: int
    compared: int
    failed_old: int
    failed_new: int
    changed: int
    ties: int
    mean_shift: float | None
    largest_shift: float | None
    latency: PairedRatios | None


def summarize(pairs: Sequence[Pair]) -> ComparisonSummary:
    """Return the figures of some pairs."""
    shifts = [abs(shift) for pair in pairs for shift in pair.shifts]
    ratios = [ratio for pair in pairs if (ratio := pair.slower) is not None]
    return ComparisonSummary(
        prompts=len(pairs),
        compared=sum(pair.is_whole for pair in pairs),
        failed_old=sum(pair.old.error is not None for pair in pairs),
        failed_new=sum(pair.new.error is not None for pair in pairs),
        changed=sum(pair.changed for pair in pairs),
        ties=sum(pair.is_tie for pair in pairs),
        mean_shift=statistics.fmean(shifts) if shifts else None,
        largest_shift=max(shifts, default=None),
        latency=PairedRatios.from_values(ratios) if ratios else None,
    )
