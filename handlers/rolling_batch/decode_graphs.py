"""Decoding as CUDA graphs (`option.enable_cuda_graph`): passes of fixed shape over buffers that stay where they are.

A small batch on a GPU is bound by the thousand calls of a pass, not by their work. A graph records these calls once and
replays them with one. It has the addresses and shapes of its recording. So inputs are copied into buffers, and a pass
takes the smallest recorded shape that it fits in: a number of rows, and a number of columns of the KV cache that they
read. The rows that are left over repeat the last one, which writes the same keys and values to the same place.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from handlers.rolling_batch.attention import SingleRows, SlotAttention
from lmi_server.contract.errors import first_line

_log = logging.getLogger(__name__)

_KEY = "option.enable_cuda_graph"
_LEAST_COLUMNS, _COLUMN_FACTOR = 256, 4
_LIMITS = {torch.float32: 1e-3}  # of the spread of the logits, as for the check at load
_LIMIT = 0.25

Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], Run]
"""Records what its argument computes; returns a function that computes it again, into the same tensor."""


class CudaCapture:
    """Records CUDA graphs, which share one pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # libraries take their workspaces in the first call, which cannot be recorded
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


class DecodeGraphs:
    """The recorded passes of `model`, for up to `rows` rows and `max_len` columns."""

    def __init__(
        self, model: Any, attention: SlotAttention, rows: int, max_len: int, device: torch.device, capture: Capture
    ) -> None:
        self._model = model
        self._attention = attention
        self._inputs = torch.zeros((3, rows), dtype=torch.long, device=device)  # token ids, positions, slots
        self._rows, self._columns = row_counts(rows), column_counts(max_len)
        # The largest first, so that the smaller ones find their memory in the pool.
        shapes = sorted(itertools.product(self._rows, self._columns), reverse=True)
        self._passes = {shape: capture(self._pass(*shape)) for shape in shapes}

    @property
    def shapes(self) -> int:
        """Return the number of recorded shapes."""
        return len(self._passes)

    def logits(self, token_ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
        """Return the logits of rows that decode, (rows, vocabulary). They are overwritten by the next pass."""
        count = len(slots)
        rows = next(number for number in self._rows if number >= count)
        columns = next(number for number in self._columns if number > max(positions))
        filled = [[*numbers, *[numbers[-1]] * (rows - count)] for numbers in (token_ids, positions, slots)]
        self._inputs[:, :rows] = torch.tensor(filled)
        return self._passes[rows, columns]()[:count]

    def _pass(self, rows: int, columns: int) -> Run:
        ids, places, slots = (self._inputs[index, :rows] for index in range(3))

        def run() -> torch.Tensor:
            self._attention.begin_decoding(SingleRows(slots, places, columns, remembers=False))
            with torch.inference_mode():
                logits = self._model(input_ids=ids[None], position_ids=places[None], use_cache=False).logits
            return logits[0]

        return run


def row_counts(most: int) -> list[int]:
    """Return powers of two, and `most`."""
    return [*itertools.takewhile(lambda count: count < most, (2**power for power in range(32))), most]


def column_counts(max_len: int) -> list[int]:
    """Return lengths that grow by a factor, and `max_len`."""
    lengths = (_LEAST_COLUMNS * _COLUMN_FACTOR**power for power in range(16))
    return [*itertools.takewhile(lambda length: length < max_len, lengths), max_len]


def captured(
    make: Callable[[], DecodeGraphs], eager: Callable[[list[int], list[int], list[int]], torch.Tensor]
) -> DecodeGraphs | None:
    """Return the graphs that `make` records if they compute what `eager` does; otherwise None, and log why.

    The slots are empty: both compute the first token of slot 0.
    """
    try:
        graphs = make()
        recorded, expected = graphs.logits([1], [0], [0]).clone(), eager([1], [0], [0])
    # torch raises RuntimeError for what a stream cannot record, and NotImplementedError, which is one, for operators.
    except RuntimeError as error:
        not_captured(first_line(error))
        return None
    spread = expected.float() - expected.float().mean(dim=-1, keepdim=True)
    difference = float((recorded.float() - expected.float()).norm() / spread.norm())
    if not difference <= _LIMITS.get(expected.dtype, _LIMIT):
        not_captured(f"the logits of a graph differ by {difference:.2g} of their spread")
        return None
    _log.info("%s: decoding runs as %d CUDA graphs", _KEY, graphs.shapes)
    return graphs


def not_captured(reason: str) -> None:
    """Log that decoding runs without graphs."""
    _log.warning("%s has no effect, decoding runs eagerly: %s", _KEY, reason)
