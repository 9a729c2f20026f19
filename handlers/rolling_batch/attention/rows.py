"""What the rows of a forward pass are, for attention."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from handlers.cpu_kernels.arguments import SeenColumns


@dataclass(frozen=True)
class ChunkRows:
    """Rows `first:last` of the pass are tokens `start:end` of the sequence in `slot`.

    `source` is the slot that holds the tokens before `start`: `slot` itself, or one from which they are copied after
    this step. The tokens of each of `blocks`, from begin to end, attend to each other in both directions; if
    `in_windows`, in layers with a window alone.
    """

    slot: int
    start: int
    end: int
    first: int
    last: int
    source: int
    blocks: tuple[tuple[int, int], ...] = ()
    in_windows: bool = False


@dataclass(frozen=True)
class StepRows:
    """What the rows of the pass are: row i is token `positions[i]` of `slots[i]`; the rows of `chunks` follow."""

    slots: np.ndarray
    positions: np.ndarray
    chunks: list[ChunkRows]


class ChunkGroup:
    """Chunks next to each other in the pass that continue from the same prefix, as one chunk for the kernels."""

    def __init__(self, chunks: list[ChunkRows]) -> None:
        self.chunks = chunks
        self.rows = slice(chunks[0].first, chunks[-1].last)
        self._lengths = [chunk.end - chunk.start for chunk in chunks]
        self.slots = np.repeat([chunk.slot for chunk in chunks], self._lengths)
        self.positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        self._columns: dict[tuple[int, int], SeenColumns] = {}  # the layers of a model have one or two different ones

    def columns(self, window: int, chunk: int = 0) -> SeenColumns:
        """Return what each row sees under a window and a chunk."""
        if (window, chunk) not in self._columns:
            self._columns[window, chunk] = SeenColumns.from_lengths(self._lengths, self.chunks[0].start, window, chunk)
        return self._columns[window, chunk]

    def ends(self, window: int, columns: SeenColumns) -> np.ndarray | None:
        """Return the column behind the last one that each row sees; None if that is its own, as without blocks."""
        chunks = [chunk for chunk in self.chunks if chunk.blocks and (window or not chunk.in_windows)]
        if not chunks:
            return None
        ends = columns.last_own.copy()
        for chunk in chunks:
            for begin, end in chunk.blocks:
                first, last = (chunk.first + token - chunk.start - self.rows.start for token in (begin, end))
                ends[first:last] = ends[last - 1]
        return ends


def groups_of(chunks: list[ChunkRows]) -> list[ChunkGroup]:
    """Group neighbouring chunks that continue from the same tokens of one slot."""

    def prefix_of(chunk: ChunkRows) -> tuple[int, int, bool]:
        own = chunk.source == chunk.slot  # the sequence in the source itself, whose own tokens lie in that slot
        return chunk.source, chunk.start, own

    return [ChunkGroup(list(group)) for _, group in itertools.groupby(chunks, prefix_of)]
