"""The tokens that penalties count, on their device: a step adds the newest token of each request, and copies no other.

The tokens of the step before are added before the host knows them. How many tokens of a row count is known to the host
at any time, so that nothing has to be taken back. The row of a new request is overwritten whole: a token that a step
behind the end of the former one has added there does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from handlers.rolling_batch.device_arrays import known_tokens, upload
from handlers.rolling_batch.sampling.state import TokenHistory

_MIN_ROWS, _MIN_WIDTH = 4, 64


@dataclass(slots=True)
class _Row:
    """A row of the table, with the number of its tokens that are written."""

    number: int
    written: int = 0


class DeviceHistories:
    """A table with a row for each history that was asked for; the row of one that is gone gets the next one."""

    def __init__(self) -> None:
        self._table = torch.empty((0, 0), dtype=torch.long)
        self._rows: WeakKeyDictionary[TokenHistory, _Row] = WeakKeyDictionary()

    @property
    def shape(self) -> tuple[int, int]:
        """Return for how many histories there is room, and for how many tokens of each."""
        rows, width = self._table.shape
        return rows, width

    def tokens(
        self, histories: Sequence[TokenHistory], device: torch.device, before: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the tokens of histories, (histories, longest, at least 1).

        The first token of a prompt stands for those behind the last one; token 0 does if no prompt is penalised.
        `before` has the tokens of the step before, if the host does not know them yet.
        """
        longest = max(1, *(history.length for history in histories))
        if longest > self._table.shape[1]:
            self._grow(len(self._table), max(_MIN_WIDTH, 1 << (longest - 1).bit_length()), device)
        rows = [self._rows.get(history) or self._new_row(history, device) for history in histories]
        self._add(histories, rows, before)
        return self._table[:, :longest].index_select(0, upload([row.number for row in rows], device))

    def _add(self, histories: Sequence[TokenHistory], rows: Sequence[_Row], before: torch.Tensor | None) -> None:
        """Write the tokens that are new."""
        width = self._table.shape[1]
        places: list[int] = []
        tokens: list[int] = []
        for history, row in zip(histories, rows, strict=True):
            first = row.number * width
            places.extend(range(first + row.written, first + history.length))
            tokens.extend(history.since(row.written))
        if places:
            place, ids = upload(np.array((places, tokens), np.int64), self._table.device)
            self._table.view(-1).scatter_(0, place, known_tokens(ids, before))
        for history, row in zip(histories, rows, strict=True):  # last: after an error the tokens are still new
            row.written = history.length

    def _new_row(self, history: TokenHistory, device: torch.device) -> _Row:
        """Give a row to a history, and write its first token everywhere."""
        taken = {row.number for row in self._rows.values()}
        number = next((row for row in range(len(self._table)) if row not in taken), len(self._table))
        if number == len(self._table):
            self._grow(max(_MIN_ROWS, 2 * number), self._table.shape[1], device)
        self._table[number] = int(history.tokens[0]) if history.first_generated else 0
        self._rows[history] = row = _Row(number)
        return row

    def _grow(self, rows: int, width: int, device: torch.device) -> None:
        """Make the table larger. The first token of each row stands in its new places."""
        before, known = self._table.shape
        grown = torch.zeros((rows, width), dtype=torch.long, device=device)
        if known:
            grown[:before] = self._table[:, :1] if before else 0
            grown[:before, :known] = self._table
        self._table = grown
