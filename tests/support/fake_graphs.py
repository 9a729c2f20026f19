"""FakeGraph: stands for a CUDA graph on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

Run = Callable[[], torch.Tensor]


class FakeGraph:
    """A replay computes again, from the recorded inputs into the recorded output."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.out = run()
        self.replays = 0

    def replay(self) -> torch.Tensor:
        self.replays += 1
        with torch.inference_mode():
            return self.out.copy_(self._run())


class FakeCapture:
    """Records FakeGraphs."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def __call__(self, run: Run) -> Run:
        self.graphs.append(FakeGraph(run))
        return self.graphs[-1].replay

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)
