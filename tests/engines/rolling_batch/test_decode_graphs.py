"""Decoding as CUDA graphs, with a fake graph on a simulated GPU: shapes, static buffers, and the way back to eager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from adapter_helpers import read_adapter, save_adapter, with_adapter
from rolling_batch_helpers import Engine, generated, prompts
from simulated_devices import SimulatedDevices
from tiny_models import tiny_model

from handlers.rolling_batch.decode_graphs import column_counts, row_counts


class FakeGraph:
    """Stands for a CUDA graph: a replay computes again, from the recorded inputs into the recorded output."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run = run
        self.out = run()
        self.replays = 0

    def replay(self) -> torch.Tensor:
        self.replays += 1
        return self.out.copy_(self._run())


class FakeCapture:
    """Records FakeGraphs."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.graphs.append(FakeGraph(run))
        return self.graphs[-1].replay

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)


@pytest.fixture
def devices() -> Iterator[None]:
    with SimulatedDevices():
        yield


def on_gpu(family: str = "llama") -> Engine:
    reference, model = tiny_model(family), tiny_model(family)
    dispatch_model(model, {"": "meta:0"}, force_hooks=True)
    return Engine(model, slots=6, reference=reference)


def test_the_recorded_shapes() -> None:
    assert row_counts(1) == [1]
    assert row_counts(32) == [1, 2, 4, 8, 16, 32]
    assert row_counts(40) == [1, 2, 4, 8, 16, 32, 40]
    assert column_counts(100) == [100]
    assert column_counts(5000) == [256, 1024, 4096, 5000]


@pytest.mark.parametrize("family", ["llama", "gemma2_with_soft_caps", "gpt2"])
def test_replayed_steps_give_the_tokens_of_the_model(devices: None, family: str) -> None:
    engine, capture = on_gpu(family), FakeCapture()
    assert engine.runner.capture(6, lambda: capture) == 4  # 1, 2, 4 and 6 rows
    graphs: Any = engine.runner._graphs
    before = capture.replays
    answers = [(prompt, engine.add(prompt, max_new_tokens=5)[1]) for prompt in prompts(6)]
    place = id(graphs._inputs.values)
    engine.run()
    for prompt, answer in answers:
        assert answer.tokens == engine.expected(prompt, 5), answer.error
    assert capture.replays - before >= 4
    assert id(graphs._inputs.values) == place  # inputs are copied in: a graph has their address
    assert len(capture.graphs) == 4  # and nothing is recorded while requests run


def test_rows_with_an_adapter_run_eagerly(devices: None, tmp_path: Path) -> None:
    engine, capture = on_gpu(), FakeCapture()
    engine.runner.capture(6, lambda: capture)
    directory = save_adapter(engine.reference, tmp_path / "adapter", 1)
    weights = engine.engine.load_adapter(read_adapter(str(directory)))
    before = capture.replays
    _, answer = engine.add([5, 6, 7], adapter=weights, max_new_tokens=4)
    engine.run()
    assert answer.tokens == generated(with_adapter(engine.reference, directory), [5, 6, 7], 4)
    assert capture.replays == before
    assert engine.generate([5, 6, 7], max_new_tokens=4).tokens == engine.expected([5, 6, 7], 4)
    assert capture.replays > before


def failing(run: Any) -> Any:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nAdvice for developers")


def wrong(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: run().flip(-1)


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (failing, "RuntimeError: CUDA error: operation not permitted when stream is capturing"),
        (wrong, "the logits of a graph differ by "),
    ],
)
def test_decoding_runs_eagerly_if_it_cannot_be_recorded(
    devices: None, caplog: pytest.LogCaptureFixture, capture: Any, reason: str
) -> None:
    engine = on_gpu()
    with caplog.at_level(logging.WARNING):
        assert engine.runner.capture(6, lambda: capture) == 0
    assert f"option.enable_cuda_graph has no effect, decoding runs eagerly: {reason}" in caplog.text
    assert "Advice" not in caplog.text
    assert engine.generate([1, 2, 3], max_new_tokens=4).tokens == engine.expected([1, 2, 3], 4)


def test_the_cpu_has_no_graphs_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tiny_model("llama"))
    with caplog.at_level(logging.WARNING):
        assert engine.runner.capture(6, FakeCapture) == 0
    assert "decoding runs eagerly: the model is on the CPU" in caplog.text
