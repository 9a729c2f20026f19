"""Speculative decoding with a smaller model, which has the same tokens: it runs ahead, and the model checks it.

The smaller model keeps a KV cache of its own, and computes one pass per drafted token, for all sequences that get a
draft. It chooses a token as the model would, with the parameters of the request and the noise of the token's place in
the output (`gumbel.py`). Where both models give a token about the same probability, the same noise makes both choose
it: of two draws with noise of their own, fewer would agree. The text stays that of the model alone, since the model
chooses each token itself and the draft is kept as far as it is the same.

A pass of the smaller model takes time, too, so a draft has to be accepted with a higher chance than one that is looked
up. Requests whose drafts fail get none for a while, and the smaller model then computes nothing for them. Its cache
catches up, some tokens per step, when it is to draft again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from handlers.rolling_batch.runner.model_runner import ModelRunner
from handlers.rolling_batch.sampling.sampler import foresee
from handlers.rolling_batch.sampling.state import SamplingState
from handlers.rolling_batch.schedule import plan
from handlers.rolling_batch.schedule.plan import Chunk, StepPlan
from handlers.rolling_batch.speculation.drafting import Acceptance

_CATCH_UP = 128  # prompt tokens, and tokens generated without drafts, in one step at most
_MIN_TRIMMED = 256  # tokens; a slot with fewer keeps its memory for the next sequence


@dataclass(frozen=True)
class StepCosts:
    """The time of steps as shares of that of the model with one row.

    `row` is a further row of the model, `draft` a pass of the smaller model with one row, `draft_row` a further row of
    that.
    """

    row: float
    draft: float
    draft_row: float

    def min_chance(self, rows: int, drafting: int) -> float:
        """Return the chance above which a further token of all of `drafting` sequences pays in a step of `rows` rows.

        It may be above 1. Without the drafts the step would generate a token per sequence in its time.
        """
        added = drafting * self.row + self.draft + (drafting - 1) * self.draft_row
        return added / drafting * rows / (1 + self.row * (rows - 1))


@dataclass
class _Draft:
    """What the smaller model knows of a request: its cache has the first `sequence.computed` of `sequence.tokens`.

    The first `known` of these are the request's own tokens; the others were drafted.
    """

    sampling: SamplingState
    sequence: plan.Sequence
    known: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)


class DraftModel:
    """Drafts of up to `length` tokens for each sequence of a batch, by the model of `runner`.

    The runner is prepared with a slot for each sequence that may run at a time. `vocabulary` is the number of tokens
    that the larger model knows.
    """

    def __init__(self, runner: ModelRunner, length: int, vocabulary: int, costs: StepCosts) -> None:
        self._runner = runner
        self._length = length
        self._vocabulary = vocabulary
        self._costs = costs
        self._drafts: dict[int, _Draft] = {}  # by the numbers of sequences
        self._free = list(range(runner.cache.slots))

    def add(self, number: int, sampling: SamplingState) -> None:
        self._drafts[number] = _Draft(sampling, plan.Sequence(number, [], 0, 0))

    def remove(self, number: int) -> None:
        draft = self._drafts.pop(number, None)
        if draft is not None:
            self._vacate(draft)

    def observe(self, number: int, drafted: int, accepted: int) -> None:
        self._drafts[number].acceptance.observe(drafted, accepted)

    def timed(self, rows: int, seconds: float) -> None:
        """Learn nothing: the costs were measured at load, those of the smaller model among them."""

    def propose(
        self, wanted: Sequence[tuple[plan.Sequence, int]], rows: int, room: int
    ) -> Mapping[plan.Sequence, list[int]]:
        lengths = self._lengths(wanted, rows, room)
        if not lengths:
            return {}
        for sequence in lengths:
            self._follow(sequence, {entry.number for entry in lengths})
        drafts: dict[plan.Sequence, list[int]] = {sequence: [] for sequence in lengths}
        going = self._catch_up(list(lengths), drafts)
        while going := [sequence for sequence in going if len(drafts[sequence]) < lengths[sequence]]:
            self._decode(going, drafts)
        return {sequence: tokens for sequence, tokens in drafts.items() if tokens}

    def _lengths(self, wanted: Sequence[tuple[plan.Sequence, int]], rows: int, room: int) -> dict[plan.Sequence, int]:
        """Return how many tokens to draft for each sequence that gets a draft."""
        known = [(entry, most) for entry, most in wanted if entry.number in self._drafts]
        least = self._costs.min_chance(rows, len(known)) if known else 1.0
        lengths: dict[plan.Sequence, int] = {}
        for sequence, most in known:
            acceptance = self._drafts[sequence.number].acceptance
            most = min(most, room, self._length, self._runner.cache.max_len - len(sequence.tokens))
            length = acceptance.promising_length(most, least)
            if length <= 0:
                acceptance.recover()
                continue
            lengths[sequence] = length
            room -= length
        return lengths

    def _follow(self, sequence: plan.Sequence, drafting: set[int]) -> None:
        """Take over the tokens of a sequence, and give it a slot if it has none."""
        draft = self._drafts[sequence.number]
        own, tokens = draft.sequence, sequence.tokens
        while own.computed > draft.known and (
            own.computed > len(tokens) or own.tokens[own.computed - 1] != tokens[own.computed - 1]
        ):
            own.computed -= 1  # drafted, and not chosen
        own.computed = min(own.computed, len(tokens) - 1)
        own.tokens, draft.known = list(tokens), len(tokens)
        if own.slot < 0:
            if not self._free:  # all belong to sequences that wait again, or get no drafts
                self._vacate(next(
                    draft for owner, draft in self._drafts.items() if draft.sequence.slot >= 0 and owner not in drafting
                ))  # fmt: skip
            own.slot = self._free.pop()

    def _vacate(self, draft: _Draft) -> None:
        own = draft.sequence
        if own.slot < 0:
            return
        if own.computed >= _MIN_TRIMMED:
            self._runner.cache.trim(own.slot, 0)
        self._free.append(own.slot)
        own.slot, own.computed = -1, 0

    def _catch_up(self, sequences: list[plan.Sequence], drafts: dict[plan.Sequence, list[int]]) -> list[plan.Sequence]:
        """Compute what the cache lacks, and draft the first tokens; return the sequences that have one."""
        budget, chunks, decode, going = _CATCH_UP, [], [], []
        for sequence in sequences:
            own = self._drafts[sequence.number].sequence
            if own.decoding:
                decode.append(own)
                going.append(sequence)
                continue
            end = min(len(own.tokens), own.computed + budget)
            if end > own.computed:
                chunks.append(Chunk(own, own.computed, end))
                budget -= end - own.computed
            if end == len(own.tokens):
                going.append(sequence)
        self._run(StepPlan(decode, chunks), {self._drafts[entry.number].sequence: entry for entry in going}, drafts)
        return going

    def _decode(self, sequences: list[plan.Sequence], drafts: dict[plan.Sequence, list[int]]) -> None:
        own = {self._drafts[entry.number].sequence: entry for entry in sequences}
        self._run(StepPlan(list(own), []), own, drafts)

    def _run(
        self,
        plan: StepPlan,
        owners: Mapping[plan.Sequence, plan.Sequence],
        drafts: dict[plan.Sequence, list[int]],
    ) -> None:
        """Compute a pass, and append to `drafts` the tokens that it chooses for the sequences of `owners`."""
        step = self._runner.run(plan, set())
        for own in plan.decode:
            own.computed += 1
        for chunk in plan.prefill:
            chunk.sequence.computed = chunk.end
        sampled = [own for own in step.sampled if own in owners]
        if not sampled:
            return
        logits = step.logits[: len(step.sampled), : self._vocabulary].contiguous()  # as kernels need it
        states = [self._drafts[own.number].sampling for own in sampled]
        tokens = foresee(logits, states, [len(drafts[owners[own]]) for own in sampled])
        for own, token in zip(sampled, tokens, strict=True):
            own.tokens.append(token)
            drafts[owners[own]].append(token)
