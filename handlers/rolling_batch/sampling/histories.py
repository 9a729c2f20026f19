"""The tokens that penalties count, on their device: a step adds the newest token of each request, and copies no other.

The tokens of the step before are added before the host knows them. How many tokens of a row count is known to the host
at any time, so that nothing has to be taken back: what a row has behind them, from a former request or from a step
behind the end of one, does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch

from handlers.rolling_batch.device_arrays import known_tokens, upload
from handlers.rolling_batch.sampling.state import TokenHistory

_MIN_ROWS, _MIN_WIDTH = 4, 64


class DeviceHistories:
    """A table with a row for each history that was asked for; the row of one that is gone gets the next one."""

    def __init__(self) -> None:
        self._table = torch.empty((0, 0), dtype=torch.int32)
        self._rows: WeakKeyDictionary[TokenHistory, int] = WeakKeyDictionary()
        self._written: WeakKeyDictionary[TokenHistory, int] = WeakKeyDictionary()  # tokens

    @property
    def shape(self) -> tuple[int, int]:
        """Return for how many histories there is room, and for how many tokens of each."""
        rows, width = self._table.shape
        return rows, width

    def tokens(
        self, histories: Sequence[TokenHistory], device: torch.device, before: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the tokens of histories, (histories, longest, at least 1), with others behind a shorter one's own.

        `before` has the tokens of the step before, if the host does not know them yet.
        """
        longest = max(1, *(history.length for history in histories))
        self._make_room(histories, longest, device)
        rows = [self._rows[history] for history in histories]
        self._add(histories, rows, before)
        return self._table[upload(rows, device), :longest].long()

    def _add(self, histories: Sequence[TokenHistory], rows: list[int], before: torch.Tensor | None) -> None:
        """Write the tokens that are new."""
        places, tokens = [], []
        for history, row in zip(histories, rows, strict=True):
            written = self._written.get(history, 0)
            if history.length > written:
                places.append(np.arange(written, history.length) + row * self._table.shape[1])
                tokens.append(history.tokens[written:])
        if not places:
            return
        place, ids = upload(np.stack((np.concatenate(places), np.concatenate(tokens))), self._table.device)
        self._table.view(-1)[place] = known_tokens(ids, before).int()
        for history in histories:
            self._written[history] = history.length

    def _make_room(self, histories: Sequence[TokenHistory], longest: int, device: torch.device) -> None:
        """Give a row to each history, and make the table as large as they need."""
        fresh = [history for history in dict.fromkeys(histories) if history not in self._rows]
        free = sorted(set(range(len(self._table))) - set(self._rows.values()), reverse=True) if fresh else []
        rows, width = self._table.shape
        if len(fresh) > len(free) or longest > width:
            more = rows
            while more - rows + len(free) < len(fresh):
                more = max(_MIN_ROWS, 2 * more)
            wider = width if longest <= width else max(_MIN_WIDTH, 1 << (longest - 1).bit_length())
            grown = torch.zeros((more, wider), dtype=torch.int32, device=device)
            grown[:rows, :width] = self._table
            self._table = grown
            free = [*range(more - 1, rows - 1, -1), *free]
        for history in fresh:
            self._rows[history] = free.pop()
