"""Steps with prompts as CUDA graphs: rows that decode and chunks of prompts in flat passes of fixed numbers of rows.

Without these graphs each prompt that arrives costs all sequences that decode an eager step, which is bound by its
launches. A pass takes the smallest recorded number of rows that it fits in. All else is data in one buffer: which rows
decode, where the chunks begin, how long they are and what is before them. The grids of attention are those of the worst
case; programs without work end at once. Rows that only fill up the pass write to the page of no sequence and attend to
nothing.

The chunk kernel reads long chunks in pieces, each of which sees what the former ones have written.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable

import numpy as np
import torch

from handlers.rolling_batch.attention.decode_passes import Additions, Capture, Recordings, Run
from handlers.rolling_batch.attention.rows import ChunkRows
from handlers.rolling_batch.device_arrays import known_tokens, upload
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.pages.rows import PageRows

MAX_ROWS = 2048
"""Of a recorded pass: more would take memory that the KV cache needs."""

_PAYS = 0.9  # of the time of an eager pass are launches: the GPU would be done sooner
_PIECE = 128  # rows
_SPARE_PIECES, _ROWS_PER_PIECE = 4, 16  # many short prompts at once take more pieces than a pass has; it runs eagerly
_SPARSE = 4  # times as many rows may decode as are usual: the context is split for these
_ALIGNED = 32  # numbers; launches are for addresses that are multiples of 16 bytes
_COLUMNS = 4  # of a piece

Compute = Callable[[torch.Tensor, torch.Tensor, PageRows, torch.Tensor], torch.Tensor]
"""Computes the logits of rows to keep: token ids, positions, what the rows are, and which to keep."""


def row_counts() -> list[int]:
    """Return 16, 32, then multiples of 32, 64, 128 and 256, up to MAX_ROWS."""
    steps = ((16,), range(32, 256, 32), range(256, 512, 64), range(512, 1024, 128), range(1024, MAX_ROWS + 1, 256))
    return [count for count in itertools.chain(*steps) if count <= MAX_ROWS]


def paying(counts: list[int], launch_share: Callable[[int], float]) -> list[int]:
    """Return the numbers of rows whose eager pass is bound by its launches, the less the more rows there are.

    `launch_share` returns the share of launches in the time of a pass. Where the GPU takes longer, a recorded pass is
    no faster, and computes the rows that fill it up as well.
    """
    return counts[: bisect.bisect_left(counts, True, key=lambda count: launch_share(count) < _PAYS)]


class MixedPasses:
    """The passes of `compute` over `cache`, for up to `sequences` sequences, and the numbers of rows in `counts`."""

    def __init__(
        self,
        compute: Compute,
        cache: PagedCache,
        sequences: int,
        counts: list[int],
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._compute = compute
        self._cache = cache
        self._sequences = sequences
        self._rows = counts
        parts = (*[counts[-1]] * 3, sequences, _pieces(counts[-1]) * _COLUMNS, sequences)
        ends = list(itertools.accumulate(-(-part // _ALIGNED) * _ALIGNED for part in parts))
        self._parts = [slice(end - size, end) for end, size in zip(ends, (ends[0], *np.diff(ends)), strict=True)]
        self._idle_place = min(cache.page, cache.max_len) - 1
        with torch.inference_mode():
            self._buffer = torch.zeros(ends[-1], dtype=torch.int32, device=device)
            self._buffer.copy_(upload(self._blank(), device))
        # The largest first, so that the smaller ones find their memory in the pool.
        self._passes = Recordings(self._pass, self._rows[::-1], capture)

    @property
    def max_rows(self) -> int:
        """Return how many rows the largest pass has."""
        return self._rows[-1]

    @property
    def shapes(self) -> int:
        """Return the number of shapes."""
        return len(self._passes)

    def takes(self, slots: int, chunks: list[ChunkRows], kept: int) -> bool:
        """Whether a pass has room for a step: rows of `slots` sequences that decode, chunks, and rows to keep."""
        count = slots + sum(chunk.end - chunk.start for chunk in chunks)
        if count > self.max_rows or max(slots, kept) > self._sequences:
            return False
        rows = self._fitting(count)
        return kept <= rows and sum(-(-(chunk.end - chunk.start) // _PIECE) for chunk in chunks) <= _pieces(rows)

    def logits(
        self,
        token_ids: list[int],
        positions: list[int],
        slots: list[int],
        chunks: list[ChunkRows],
        keep: list[int],
        before: torch.Tensor | None,
        additions: Additions | None = None,
    ) -> torch.Tensor:
        """Return the logits of the rows to keep, of a step that `takes` accepts. They are overwritten by the next pass.

        `before` is as in StepRunner. Raises RuntimeError if a pass with `additions` cannot be recorded.
        """
        owners = [*slots, *(chunk.slot for chunk in chunks for _ in range(chunk.start, chunk.end))]
        count = len(owners)
        data = self._blank()
        pieces = [piece for chunk in chunks for piece in _pieces_of(chunk)]
        filled = (
            token_ids[:count], positions[:count], owners, positions[: len(slots)], list(itertools.chain(*pieces)), keep,
        )  # fmt: skip
        for part, numbers in zip(self._parts, filled, strict=True):
            data[part.start : part.start + len(numbers)] = numbers
        with torch.inference_mode():
            self._buffer.copy_(upload(data, self._buffer.device), non_blocking=True)
            if before is not None:
                ids = self._buffer[:count]
                ids.copy_(known_tokens(ids.long(), before))
        return self._passes.run(self._fitting(count), additions)[: len(keep)]

    def _blank(self) -> np.ndarray:
        """Return what the buffer has for a pass without rows."""
        data = np.zeros(self._parts[-1].stop, np.int32)
        _, positions, slots, singles, _, _ = self._parts
        data[positions], data[slots], data[singles] = self._idle_place, self._cache.idle_slot, -1
        return data

    def _fitting(self, count: int) -> int:
        return next(rows for rows in self._rows if rows >= count)

    def _pass(self, rows: int) -> Run:
        singles = min(rows, self._sequences)
        sizes = (rows, rows, rows, singles, _pieces(rows) * _COLUMNS, singles)
        with torch.inference_mode():
            parts = [self._buffer[part][:size] for part, size in zip(self._parts, sizes, strict=True)]
        ids, positions, slots, places, pieces, keep = parts
        described = pieces.view(-1, _COLUMNS)
        layout = PageRows(
            slots, positions, singles, self._cache.max_len, described, min(rows, _PIECE), (), places,
            max(1, singles // _SPARSE),
        )  # fmt: skip

        def run() -> torch.Tensor:
            with torch.inference_mode():
                return self._compute(ids.long(), positions.long(), layout, keep.long())

        return run


def _pieces(rows: int) -> int:
    """Return how many pieces of chunks a pass of so many rows has room for."""
    return _SPARE_PIECES + rows // _ROWS_PER_PIECE


def _pieces_of(chunk: ChunkRows) -> list[tuple[int, int, int, int]]:
    """Return first row, number of rows, position of the first one, and slot of each piece of a chunk."""
    return [
        (chunk.first + start - chunk.start, min(_PIECE, chunk.end - start), start, chunk.slot)
        for start in range(chunk.start, chunk.end, _PIECE)
    ]
