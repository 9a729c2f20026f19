"""Which rows a step's forward pass has: from the scheduler's plan to the message that all ranks compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from handlers.rolling_batch.attention.rows import ChunkRows
from handlers.rolling_batch.runner.step_messages import Pass
from handlers.rolling_batch.schedule.plan import Chunk, Sequence, StepPlan

_ROW_STEPS = ((16, 1), (64, 4), (256, 16))  # (rows up to, padded to multiples of)
_LAST_ROW_STEP = 32

RowByRow = Callable[[int, int], bool]
"""Whether a chunk of the tokens from one place to another attends row by row, and not as one product."""


def arrange(plan: StepPlan, row_by_row: RowByRow) -> StepPlan:
    """Let every copy start from a slot that holds the tokens already; sort the chunks as they attend.

    A chunk may read its prefix in the source before this step's copies are made. If the source is itself the
    target of one of them, the chunk reads from the first slot of that chain. Chunks that attend row by row come
    first, next to the decode rows; then chunks with the same source, which form one group.
    """
    if not plan.copies and not plan.prefill:
        return plan
    sources: dict[int, int] = {}
    for copy in plan.copies:
        sources[copy.target] = sources.get(copy.source, copy.source)
    copies = [replace(copy, source=sources[copy.target]) for copy in plan.copies]

    def order(chunk: Chunk) -> tuple[bool, int, int]:
        source = sources.get(chunk.sequence.slot, -1)
        return not _is_row_by_row(chunk, source, row_by_row), source, chunk.start

    return replace(plan, copies=copies, prefill=sorted(plan.prefill, key=order))


def lay_out(plan: StepPlan, keep: list[int], row_by_row: RowByRow) -> Pass:
    """Return the pass of an arranged plan, unpadded, whose rows `keep` have logits."""
    sources = {copy.target: copy.source for copy in plan.copies}
    token_ids, positions, slots = _drafted_rows(plan) if plan.drafts else _single_rows(plan)
    chunks = []
    for chunk in plan.prefill:
        first = len(token_ids)
        token_ids.extend(chunk.sequence.tokens[chunk.start : chunk.end])
        positions.extend(range(chunk.start, chunk.end))
        slot = chunk.sequence.slot
        if _is_row_by_row(chunk, sources.get(slot, -1), row_by_row):
            slots.extend([slot] * (chunk.end - chunk.start))
        else:
            source = sources.get(slot, slot)
            rows = ChunkRows(slot, chunk.start, chunk.end, first, len(token_ids), source, _blocks(chunk))
            images = chunk.sequence.images
            chunks.append(rows if images is None else replace(rows, in_windows=images.in_windows))
    return Pass(token_ids, positions, slots, chunks, keep, plan.trims, plan.copies, plan.states, plan.pages)


def _single_rows(plan: StepPlan) -> tuple[list[int], list[int], list[int]]:
    """Return tokens, positions and slots of the newest token of each sequence that decodes."""
    decode = plan.decode
    return (
        [entry.tokens[-1] for entry in decode],
        [entry.computed for entry in decode],
        [entry.slot for entry in decode],
    )


def _drafted_rows(plan: StepPlan) -> tuple[list[int], list[int], list[int]]:
    """Return the same with each sequence's draft behind its newest token."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for sequence in plan.decode:
        tokens = [sequence.tokens[-1], *plan.drafts.get(sequence, ())]
        token_ids.extend(tokens)
        positions.extend(range(sequence.computed, sequence.computed + len(tokens)))
        slots.extend([sequence.slot] * len(tokens))
    return token_ids, positions, slots


def _is_row_by_row(chunk: Chunk, source: int, row_by_row: RowByRow) -> bool:
    """Whether a chunk attends row by row. Rows attend to their own slot up to themselves.

    So none may have a `source`, or see later ones.
    """
    return source < 0 and not _blocks(chunk) and row_by_row(chunk.start, chunk.end)


def _blocks(chunk: Chunk) -> tuple[tuple[int, int], ...]:
    """Return the parts of a chunk whose tokens attend to each other in both directions."""
    images = chunk.sequence.images
    if images is None:
        return ()
    found = ((max(begin, chunk.start), min(end, chunk.end)) for begin, end in images.blocks)
    return tuple((begin, end) for begin, end in found if begin < end)


@dataclass(frozen=True)
class KeptRows:
    """The rows of a pass whose logits are needed, and what for; see StepLogits for the other fields."""

    rows: list[int]
    sampled: list[Sequence]
    prompt_rows: list[tuple[Sequence, int, slice]]
    draft_rows: dict[Sequence, range]


def rows_to_keep(plan: StepPlan, prompt_scored: set[int]) -> KeptRows:
    """Return the rows whose logits are needed: first the rows to sample from, then the rows of prompts, then of
    drafts."""
    keep, row = list(range(len(plan.decode))), len(plan.decode)
    if plan.drafts:
        lengths = [1 + len(plan.drafts.get(sequence, ())) for sequence in plan.decode]
        keep = [0, *itertools.accumulate(lengths[:-1])]
        row = sum(lengths)
    sampled = list(plan.decode)
    scoring = []
    for chunk in plan.prefill:
        last = row + chunk.end - chunk.start
        if chunk.completes_prompt:
            keep.append(last - 1)
            sampled.append(chunk.sequence)
        if chunk.sequence.number in prompt_scored:
            scoring.append((chunk, row, last))
        row = last
    prompt_rows = []
    for chunk, first, last in scoring:
        end = last - 1 if chunk.completes_prompt else last  # the prompt's last row scores the first output token
        prompt_rows.append((chunk.sequence, chunk.start + 1, slice(len(keep), len(keep) + end - first)))
        keep.extend(range(first, end))
    draft_rows = _draft_rows(plan, keep)
    return KeptRows(keep, sampled, prompt_rows, draft_rows)


def _draft_rows(plan: StepPlan, keep: list[int]) -> dict[Sequence, range]:
    """Add the rows of drafted tokens to `keep`; return which of the kept rows they are."""
    found: dict[Sequence, range] = {}
    for sequence, first in zip(plan.decode, keep[: len(plan.decode)], strict=True) if plan.drafts else ():
        drafted = len(plan.drafts.get(sequence, ()))
        if drafted:
            found[sequence] = range(len(keep), len(keep) + drafted)
            keep.extend(range(first + 1, first + 1 + drafted))
    return found


def pad_rows(rows: list[int]) -> list[int]:
    """Add unused rows, so that few different numbers of rows occur.

    oneDNN compiles code for every shape that it meets, and keeps it. Without padding it would do so hundreds of times,
    in the middle of requests.
    """
    step = next((step for limit, step in _ROW_STEPS if len(rows) <= limit), _LAST_ROW_STEP)
    return rows + [0] * (-len(rows) % step)
