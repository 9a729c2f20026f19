"""Steps with prompts as recorded passes over pages: a fake graph on the CPU, token for token, and the way to eager."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_helpers import ALL_LINEAR, read_adapter, save_adapter, with_adapter
from fake_graphs import FakeCapture, FakeGraph
from rolling_batch_helpers import Engine, generated_like, prompts
from tiny_models import tiny_model

from handlers.rolling_batch.attention.rows import ChunkRows
from handlers.rolling_batch.pages import mixed_passes

PAGE = 8
ROWS = 64  # of the largest recorded pass here


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record few and small passes, and read chunks in small pieces."""
    monkeypatch.setattr(mixed_passes, "MAX_ROWS", ROWS)
    monkeypatch.setattr(mixed_passes, "_PIECE", 16)


def recorded(family: str = "llama", sequences: int = 6, capture: Any = None, **limits: Any) -> tuple[Engine, Any]:
    """Return an engine over pages whose steps are recorded, and what has recorded them."""
    engine = Engine(tiny_model(family), page=PAGE, slots=sequences, **limits)
    engine.runner.uncapturable = lambda: None  # type: ignore[method-assign]  # it would say that this is no GPU
    capture = capture or FakeCapture()
    assert engine.runner.capture(sequences, lambda: capture)
    return engine, capture


def eager_steps(engine: Engine) -> list[int]:
    """Return a list that gets the number of rows of each eager pass from now on."""
    rows: list[int] = []
    compute = engine.runner._eager.logits

    def counted(step: Any, *more: Any) -> torch.Tensor:
        rows.append(len(step.token_ids))
        return compute(step, *more)

    engine.runner._eager.logits = counted  # type: ignore[method-assign, union-attr]
    return rows


def test_the_recorded_numbers_of_rows() -> None:
    assert mixed_passes.row_counts() == [16, 32, 64]


def test_steps_are_recorded_up_to_what_launches_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_passes, "MAX_ROWS", 2048)
    counts = mixed_passes.row_counts()
    assert counts == [
        16, *range(32, 257, 32), 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048,
    ]  # fmt: skip
    asked = []

    def share(border: int, count: int) -> float:
        asked.append(count)
        return 0.99 if count <= border else 0.5

    for border in (0, 100, 512, 4000):
        assert mixed_passes.paying(counts, lambda count: share(border, count)) == [  # noqa: B023
            count for count in counts if count <= border
        ]
    assert len(asked) < 4 * 6


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2_with_soft_caps", "gpt2"])
@pytest.mark.parametrize("ahead", [False, True])
def test_prompts_that_keep_arriving_get_the_tokens_of_the_model(family: str, ahead: bool) -> None:
    engine, capture = recorded(family, chunk=40)
    if ahead:
        engine.engine.run_ahead()
    graphs, eager = len(capture.graphs), eager_steps(engine)
    asked = []
    for prompt in prompts(9, seed=3):
        asked.append((prompt, engine.add(prompt, max_new_tokens=8)[1]))
        engine.engine.step()
        engine.engine.step()
    engine.run()
    for prompt, answer in asked:
        assert answer.tokens == engine.expected(prompt, 8), answer.error
    assert not eager
    assert capture.replays
    assert len(capture.graphs) == graphs, "nothing is recorded while requests run"


def test_prompts_of_one_sequence_at_a_time_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = recorded(sequences=1, chunk=40)
    eager = eager_steps(engine)
    for prompt in prompts(2, seed=3):
        assert engine.generate(prompt, max_new_tokens=4).tokens == engine.expected(prompt, 4)
    assert not eager
    assert "has no effect" not in caplog.text


def test_shared_prefixes_and_retractions_change_no_token() -> None:
    engine, _ = recorded(kv_tokens=20 * PAGE, conservativeness=0.05, chunk=40)
    engine.engine.run_ahead()
    eager = eager_steps(engine)
    chance = random.Random(2)
    common = [chance.randrange(250) for _ in range(21)]
    asked = []
    for number, prompt in enumerate(prompts(10, seed=5)):
        prompt = common + prompt if number % 2 else prompt[:60]
        asked.append((prompt, engine.add(prompt, max_new_tokens=20)[1]))
        engine.engine.step()
    engine.run()
    for prompt, answer in asked:
        assert answer.tokens == engine.expected(prompt, 20), answer.error
    assert engine.engine.stats.retracted_requests
    assert engine.engine.stats.cached_prompt_tokens
    assert not eager


@pytest.mark.parametrize("why", ["rows", "pieces", "scores"])
def test_steps_that_no_recorded_pass_takes_run_eagerly(why: str) -> None:
    sequences = 12 if why == "pieces" else 6
    engine, capture = recorded(sequences=sequences, chunk=90)
    eager, before = eager_steps(engine), capture.replays
    lengths = {"rows": [80], "pieces": [2] * 12, "scores": [20]}[why]
    more = {"prompt_logprobs": 0} if why == "scores" else {}
    asked = [[number] * length for number, length in enumerate(lengths)]
    answers = [engine.add(prompt, max_new_tokens=4, **more)[1] for prompt in asked]
    engine.engine.step()
    assert (eager, capture.replays) == ([sum(lengths)], before)
    engine.run()
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.tokens == engine.expected(prompt, 4), answer.error


@pytest.mark.slow
@pytest.mark.parametrize("head", [False, True])
def test_prompts_with_adapters_are_recorded(tmp_path: Path, head: bool) -> None:
    """Also where an adapter changes the head, which computes fewer rows than the layers."""
    engine, _ = recorded(chunk=40)
    more = {"target_modules": [*ALL_LINEAR, "lm_head"]} if head else {}
    directories = [save_adapter(engine.reference, tmp_path / str(seed), seed, **more) for seed in (1, 2)]
    models = [engine.reference, *(with_adapter(engine.reference, directory) for directory in directories)]
    adapters = [None, *(engine.engine.load_adapter(read_adapter(str(directory))) for directory in directories)]
    eager, asked = eager_steps(engine), []
    for prompt in prompts(4, seed=4):
        for model, adapter in zip(models, adapters, strict=True):
            asked.append((model, prompt, engine.add(prompt, adapter=adapter, max_new_tokens=6)[1]))
            engine.engine.step()
    engine.run()
    for model, prompt, answer in asked:
        assert answer.tokens == generated_like(model, prompt, answer.tokens, 6), answer.error
    assert not eager


@pytest.mark.slow
def test_a_chunk_that_keeps_no_row_has_its_adapter(tmp_path: Path) -> None:
    """The prompt takes three steps, and no other request runs."""
    engine, _ = recorded(chunk=40)
    directory = save_adapter(engine.reference, tmp_path / "adapter", 1, target_modules=[*ALL_LINEAR, "lm_head"])
    weights = engine.engine.load_adapter(read_adapter(str(directory)))
    eager, prompt = eager_steps(engine), [7 * place % 250 for place in range(100)]
    answer = engine.add(prompt, adapter=weights, max_new_tokens=5)[1]
    engine.run()
    adapted = with_adapter(engine.reference, directory)
    assert answer.tokens == generated_like(adapted, prompt, answer.tokens, 5), answer.error
    assert not eager


@pytest.mark.slow
def test_prompts_with_adapters_that_cannot_be_recorded_run_eagerly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = recorded(chunk=40)
    engine.runner._recorded.mixed._passes._capture = failing  # type: ignore[union-attr]
    directory = save_adapter(engine.reference, tmp_path / "adapter", 1)
    weights = engine.engine.load_adapter(read_adapter(str(directory)))
    adapted = with_adapter(engine.reference, directory)
    for _ in range(2):
        answer = engine.add([5, 6, 7], adapter=weights, max_new_tokens=5)[1]
        _, plain = engine.add([5, 6, 7, 8], max_new_tokens=5)
        engine.run()
        assert answer.tokens == generated_like(adapted, [5, 6, 7], answer.tokens, 5), answer.error
        assert plain.tokens == engine.expected([5, 6, 7, 8], 5)
    assert caplog.text.count("option.enable_cuda_graph has no effect on steps with adapters, they run eagerly: ") == 1


def failing(run: Any) -> Any:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nAdvice for developers")


class Spoiling(FakeCapture):
    """Records FakeGraphs, but fails, or flips the logits, from some graph on: the first are those of decoding."""

    def __init__(self, spoil: Callable[[Callable[[], torch.Tensor]], Any]) -> None:
        super().__init__()
        self._spoil = spoil

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if len(self.graphs) < 4:
            return super().__call__(run)
        self.graphs.append(FakeGraph(run))
        spoiled: Callable[[], torch.Tensor] = self._spoil(run)
        return spoiled


def flipped(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: run().flip(-1)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (failing, "RuntimeError: CUDA error: operation not permitted when stream is capturing"),
        (flipped, "the logits differ from the eager ones by "),
    ],
)
def test_prompts_run_eagerly_if_steps_with_them_cannot_be_recorded(
    caplog: pytest.LogCaptureFixture, spoil: Any, reason: str
) -> None:
    with caplog.at_level(logging.WARNING):
        engine, capture = recorded(capture=Spoiling(spoil))
    message = "option.enable_cuda_graph has no effect, steps with prompts run eagerly: "
    assert caplog.text.count(message + reason) == 1
    assert "Advice" not in caplog.text
    before = capture.graphs[0].replays
    assert engine.generate([1, 2, 3], max_new_tokens=4).tokens == engine.expected([1, 2, 3], 4)
    assert capture.graphs[0].replays + sum(graph.replays for graph in capture.graphs[1:4]) > before


def test_the_check_of_recorded_steps_leaves_no_pages() -> None:
    engine, _ = recorded()
    cache: Any = engine.runner.cache
    assert all((table[:2, 0] == cache.pages).all() for table in cache.tables.values())


def test_chunks_are_read_in_pieces() -> None:
    assert mixed_passes._pieces_of(ChunkRows(3, 10, 45, 7, 42, 3)) == [(7, 16, 10, 3), (23, 16, 26, 3), (39, 3, 42, 3)]
