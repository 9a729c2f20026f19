"""Decoding in passes of fixed shape: recorded as CUDA graphs (`option.enable_cuda_graph`), compiled, or both.

A small batch on a GPU is bound by the thousand calls of a pass, not by their work. A graph records these calls once and
replays them with one. It has the addresses and shapes of its recording. So inputs are copied into buffers, and a pass
takes the smallest recorded shape that it fits in: a number of rows, and a number of columns of the KV cache that they
read. The remaining rows repeat the last one, and write the same keys and values to the same place. Over pages, the
columns are no shape, and the remaining rows are the first token of a slot without a sequence.

Compiled code (compiled_step.py) takes the same shapes: all of them run when the model loads, and nothing is compiled
while requests wait.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

import torch

from handlers.logits import relative_error
from handlers.rolling_batch.attention.flat import FlatAttention
from handlers.rolling_batch.attention.pass_inputs import PassInputs
from handlers.rolling_batch.attention.torch_attention import SingleRows
from handlers.rolling_batch.device_arrays import upload
from lmi_server.contract.errors import first_line

logger = logging.getLogger(__name__)

GRAPH_KEY = "option.enable_cuda_graph"
COMPILE_KEY = "option.enable_torch_compile"
_MIN_COLUMNS, _COLUMN_FACTOR = 256, 2
_LIMITS = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the spread of the logits, as for the check at load
_LIMIT = 0.25

Shape = TypeVar("Shape")

Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], Run]
"""Records what its argument computes; returns a function that computes it again, into the same tensor."""


class Step(Protocol):
    """Computes the logits, (rows, vocabulary), of rows that decode and read `columns` columns of their slots.

    `more` are further numbers of each row that a model needs, (rows,) each.
    """

    def __call__(
        self, ids: torch.Tensor, places: torch.Tensor, slots: torch.Tensor, columns: int, *more: torch.Tensor
    ) -> torch.Tensor: ...


class DecodedStates(Protocol):
    """The states of layers; they are told which of them the rows of the next passes have."""

    def begin_decoding(self, rows: torch.Tensor) -> None: ...


class DecodeStep:
    """The decode step of `model` as Python calls it, operator by operator.

    `more` of a call are the positions for rotary embeddings, if the model `turns` rows by others than their places,
    then the rows of `states`, if the model keeps some.
    """

    def __init__(
        self,
        model: Any,
        attention: FlatAttention,
        inputs: PassInputs,
        turns: bool = False,
        states: DecodedStates | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self.turns = turns
        self._states = states

    def __call__(
        self, ids: torch.Tensor, places: torch.Tensor, slots: torch.Tensor, columns: int, *more: torch.Tensor
    ) -> torch.Tensor:
        self._attention.begin_decoding(SingleRows(slots, places, columns, remembers=False))
        if self._states is not None:
            self._states.begin_decoding(more[-1])
        turned = more[0] if self.turns else places
        logits: torch.Tensor = self._model(**self._inputs(ids[None], turned[None])).logits
        return logits[0]


class Additions(Protocol):
    """What is added to the outputs of modules in recorded passes; `version` tells when to record anew."""

    version: int

    def hooks(self) -> AbstractContextManager[None]: ...


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


def run_once(run: Run) -> Run:
    """Record nothing; run it, so that its code is compiled."""
    run()
    return run


class Recordings(Generic[Shape]):
    """The recorded passes of `shapes`, the first shape first, which `make` makes.

    Passes with additions are recorded as they are needed.
    """

    def __init__(self, make: Callable[[Shape], Run], shapes: Sequence[Shape], capture: Capture) -> None:
        self._make = make
        self._capture = capture
        self._plain = {shape: capture(make(shape)) for shape in shapes}
        self._added: dict[Shape, Run] = {}
        self._version = 0  # of the additions

    def __len__(self) -> int:
        return len(self._plain)

    def run(self, shape: Shape, additions: Additions | None) -> torch.Tensor:
        """Compute a pass. Raises RuntimeError if one with additions cannot be recorded."""
        return self._plain[shape]() if additions is None else self._with(additions, shape)()

    def _with(self, additions: Additions, shape: Shape) -> Run:
        """Return a pass with additions; record it if it has not been needed before."""
        if additions.version != self._version:
            self._added.clear()
            self._version = additions.version
        if shape not in self._added:
            plain = self._make(shape)

            def run() -> torch.Tensor:
                with additions.hooks():
                    return plain()

            self._added[shape] = self._capture(run)
        return self._added[shape]


class DecodePasses:
    """The passes of `step` for up to `rows` rows and `max_len` columns; with pages, `idle_slot` has no sequence.

    `more_idle` has, for each further input of the step, the number that fills up its rows with pages.
    """

    def __init__(
        self,
        step: Step,
        rows: int,
        max_len: int,
        device: torch.device,
        capture: Capture,
        idle_slot: int | None = None,
        more_idle: Sequence[int] = (),
    ) -> None:
        self._step = step
        self._idle_slot = idle_slot
        self._more_idle = more_idle
        # Token ids, positions, slots, and more: torch.compile compiles anew for each part of one tensor, and for each
        # view that autograd keeps track of.
        with torch.inference_mode():
            self._inputs = [torch.zeros(rows, dtype=torch.long, device=device) for _ in range(3 + len(more_idle))]
        if idle_slot is None:
            self._rows, self._columns = row_counts(rows), column_counts(max_len)
        else:
            self._rows, self._columns = close_row_counts(rows), [max_len]
        # The largest first, so that the smaller ones find their memory in the pool.
        shapes = sorted(itertools.product(self._rows, self._columns), reverse=True)
        self._passes = Recordings(self._pass, shapes, capture)

    @property
    def max_rows(self) -> int:
        """Return how many rows the largest pass has."""
        return self._rows[-1]

    @property
    def shapes(self) -> int:
        """Return the number of shapes."""
        return len(self._passes)

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: Sequence[int],
        slots: Sequence[int],
        additions: Additions | None = None,
        more: Sequence[Sequence[int]] = (),
    ) -> torch.Tensor:
        """Return the logits of rows that decode, (rows, vocabulary). They are overwritten by the next pass.

        `token_ids` (rows,) may be on the device: nothing here waits for it. Raises RuntimeError if a pass with
        `additions` cannot be recorded.
        """
        count = len(slots)
        rows = next(number for number in self._rows if number >= count)
        columns = next(number for number in self._columns if number > max(positions))
        given = (positions, slots, *more)
        fills = [own[-1] for own in given] if self._idle_slot is None else [0, self._idle_slot, *self._more_idle]
        with torch.inference_mode():
            ids, *others = self._inputs
            ids[:count], ids[count:rows] = token_ids, token_ids[-1] if self._idle_slot is None else 0
            for buffer, numbers, fill in zip(others, given, fills, strict=True):
                padded = upload([*numbers, *[fill] * (rows - count)], buffer.device)
                buffer[:rows].copy_(padded, non_blocking=True)
        return self._passes.run((rows, columns), additions)[:count]

    def _pass(self, shape: tuple[int, int]) -> Run:
        rows, columns = shape
        with torch.inference_mode():
            ids, places, slots, *more = (buffer[:rows] for buffer in self._inputs)

        def run() -> torch.Tensor:
            with torch.inference_mode():
                return self._step(ids, places, slots, columns, *more)

        return run


def row_counts(most: int) -> list[int]:
    """Return powers of two, and `most`."""
    return [*itertools.takewhile(lambda count: count < most, (2**power for power in range(32))), most]


def close_row_counts(most: int) -> list[int]:
    """Return 1, 2, 4, 8, then multiples of 8, 16 and 32, and `most`."""
    steps = ((1, 2, 4, 8), range(16, 64, 8), range(64, 128, 16), range(128, most, 32))
    return [*itertools.takewhile(lambda count: count < most, itertools.chain(*steps)), most]


def column_counts(max_len: int) -> list[int]:
    """Return lengths that grow by a factor, and `max_len`."""
    lengths = (_MIN_COLUMNS * _COLUMN_FACTOR**power for power in range(16))
    return [*itertools.takewhile(lambda length: length < max_len, lengths), max_len]


def make_passes(
    key: str,
    make: Callable[[], DecodePasses],
    recorded: Callable[[DecodePasses], torch.Tensor],
    eager: Callable[[], torch.Tensor],
) -> DecodePasses | None:
    """Return the passes of `make` if they compute the same as `eager`; otherwise None, and log why `key` fails.

    `recorded` lets them compute a row, as `eager` does.
    """
    try:
        passes = make()
        computed, expected = recorded(passes).clone(), eager()
    # torch raises RuntimeError for calls that a stream cannot record, and its subclass NotImplementedError for
    # operators.
    except RuntimeError as error:
        log_no_effect(key, first_line(error))
        return None
    if difference := difference_of(computed, expected):
        log_no_effect(key, difference)
        return None
    return passes


def difference_of(computed: torch.Tensor, expected: torch.Tensor) -> str:
    """Say by how much the logits of a recorded pass differ from the eager ones; empty if by rounding alone."""
    difference = relative_error(computed.float(), expected.float())
    if difference <= _LIMITS.get(expected.dtype, _LIMIT):
        return ""
    return f"the logits differ from the eager ones by {difference:.2g} of their spread"


def log_no_effect(key: str, reason: str, steps: str = "decoding runs eagerly") -> None:
    """Log that decoding, or other steps, run without the feature of `key`."""
    logger.warning("%s has no effect, %s: %s", key, steps, reason)
