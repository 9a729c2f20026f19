"""Decoding in fixed shapes: a fake graph on a simulated GPU, torch.compile on the CPU, and the way back to eager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from adapter_helpers import read_adapter, save_adapter, with_adapter
from fake_graphs import FakeCapture
from rolling_batch_helpers import Engine, generated_like, prompts
from simulated_devices import SimulatedDevices
from tiny_models import FAMILIES, random_model, tiny_model
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from handlers.rolling_batch.attention import slot_attention as attention
from handlers.rolling_batch.attention.decode_passes import Step, column_counts, row_counts
from handlers.rolling_batch.engine_loading import set_kernel_threads
from handlers.rolling_batch.runner import model_runner

GPU = torch.device("meta", 0)


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
    assert column_counts(5000) == [256, 512, 1024, 2048, 4096, 5000]


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        pytest.param("gemma2_with_soft_caps", marks=pytest.mark.slow),
        pytest.param("gpt2", marks=pytest.mark.slow),
    ],
)
def test_replayed_steps_give_the_tokens_of_the_model(devices: None, family: str) -> None:
    engine, capture = on_gpu(family), FakeCapture()
    assert engine.runner.capture(6, lambda: capture) == 4  # 1, 2, 4 and 6 rows
    passes: Any = engine.runner._recorded.passes
    before = capture.replays
    answers = [(prompt, engine.add(prompt, max_new_tokens=5)[1]) for prompt in prompts(6)]
    places = [id(buffer.values) for buffer in passes._inputs]
    engine.run()
    for prompt, answer in answers:
        assert answer.tokens == engine.expected(prompt, 5), answer.error
    assert capture.replays - before >= 4
    assert [id(buffer.values) for buffer in passes._inputs] == places  # inputs are copied in: a graph has their address
    assert len(capture.graphs) == 4  # and nothing is recorded while requests run


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graphs"])
def test_adapters_share_a_gpu_with_requests_that_have_none(devices: None, tmp_path: Path, recorded: bool) -> None:
    """Steps that decode are recorded, with and without adapters."""
    engine, capture = on_gpu(), FakeCapture()
    if recorded:
        engine.runner.capture(6, lambda: capture)
    directories = [save_adapter(engine.reference, tmp_path / str(seed), seed) for seed in (1, 2)]
    models = [engine.reference, *(with_adapter(engine.reference, directory) for directory in directories)]
    adapters = [None, *(engine.engine.load_adapter(read_adapter(str(directory))) for directory in directories)]
    assert all(tensor.device == GPU for one in adapters[1:] for pair in one.layers.values() for tensor in pair)
    _, early = engine.add([5, 6, 7], max_new_tokens=12)
    for _ in range(3):
        engine.engine.step()
    assert (capture.replays > 0) is recorded
    before = capture.replays
    answers = [
        (model, prompt, engine.add(prompt, adapter=adapter, max_new_tokens=4)[1])
        for model, adapter in zip(models, adapters, strict=True)
        for prompt in ([5, 6, 7], [5, 6, 7, 8, 9])
    ]
    engine.engine.step()
    assert capture.replays == before  # the prompts
    engine.run()
    for model, prompt, answer in answers:
        assert answer.tokens == generated_like(model, prompt, answer.tokens, 4), answer.error
    assert early.tokens == engine.expected([5, 6, 7], 12)
    assert (capture.replays > before) is recorded
    assert (len(capture.graphs) > 4) is recorded
    assert not any(module._forward_hooks for adapter in adapters[1:] for module in adapter.layers)
    engine.engine.forget_adapter(adapters[1])
    assert engine.generate([5, 6, 7], adapter=adapters[2], max_new_tokens=4).tokens == answers[4][2].tokens


@pytest.mark.slow
def test_more_adapters_of_higher_ranks_are_recorded_anew(devices: None, tmp_path: Path) -> None:
    engine, capture = on_gpu(), FakeCapture()
    engine.runner.capture(6, lambda: capture)
    asked = []
    for seed, rank in enumerate((2, 4, 4, 20, 2, 2)):
        directory = save_adapter(engine.reference, tmp_path / str(seed), seed, r=rank)
        weights = engine.engine.load_adapter(read_adapter(str(directory)))
        asked.append((with_adapter(engine.reference, directory), weights))
    for some in (asked[:1], asked[1:4], asked, asked[:2]):
        answers = [(model, engine.add([5, 6, 7], adapter=one, max_new_tokens=4)[1]) for model, one in some]
        engine.run()
        for model, answer in answers:
            assert answer.tokens == generated_like(model, [5, 6, 7], answer.tokens, 4), answer.error
    bank: Any = engine.runner.lora.bank
    assert bank.version == 3  # the first adapter, a higher rank, and more adapters than there were places
    assert bank.places.shape == (6,)


@pytest.mark.slow
def test_adapters_run_eagerly_if_steps_with_them_cannot_be_recorded(
    devices: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, capture = on_gpu(), FakeCapture()
    engine.runner.capture(6, lambda: capture)
    passes: Any = engine.runner._recorded.passes
    passes._passes._capture = failing
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


def wrong(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: run().flip(-1)


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (failing, "RuntimeError: CUDA error: operation not permitted when stream is capturing"),
        (wrong, "the logits differ from the eager ones by "),
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


class FakeCompiler:
    """Stands for torch.compile: its code computes eagerly, and counts, until `failure` is set."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.calls = 0

    def __call__(self, step: Step) -> Step:
        def compiled(ids: torch.Tensor, places: torch.Tensor, slots: torch.Tensor, columns: int) -> torch.Tensor:
            if self.failure is not None:
                raise self.failure
            self.calls += 1
            return step(ids, places, slots, columns)

        return compiled


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let float32 run on torch's operators on the CPU, as it does on a GPU."""
    monkeypatch.setattr(attention, "_operators", lambda cache, dtype: attention.TorchAttention(cache))
    monkeypatch.setattr(model_runner, "is_fusible", lambda device, dtype: False)


def one_layer() -> Any:
    """Return a model that compiles in a few seconds."""
    config = FAMILIES["llama"]()
    config.num_hidden_layers = 1
    config.max_position_embeddings = 600
    return random_model(config)


@pytest.mark.slow
def test_compiled_decoding_gives_the_tokens_of_the_model(no_kernels: None, tmp_path: Path) -> None:
    torch._dynamo.reset()
    set_kernel_threads()  # as a load does; numba's threads change the number that code is compiled for when they start
    engine = Engine(one_layer(), slots=6, context=600)  # passes of 256, 512 and 600 columns
    assert engine.runner.compile(6)
    compilations = counters["stats"]["unique_graphs"]
    directory = save_adapter(engine.reference, tmp_path / "adapter", 1)
    weights = engine.engine.load_adapter(read_adapter(str(directory)))
    answers = [(prompt, engine.add(prompt, max_new_tokens=5)[1]) for prompt in prompts(6)]
    _, adapted = engine.add([5, 6, 7], adapter=weights, max_new_tokens=9)
    engine.run()
    for prompt, answer in answers:
        assert answer.tokens == engine.expected(prompt, 5), answer.error
    model = with_adapter(engine.reference, directory)
    assert adapted.tokens == generated_like(model, [5, 6, 7], adapted.tokens, 9)
    assert engine.generate([1, 2, 3], max_new_tokens=5).tokens == engine.expected([1, 2, 3], 5)
    assert counters["stats"]["unique_graphs"] == compilations == 2  # one row, and several


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"cpp.cxx": (None, "no-such-compiler")}, "InvalidCxxCompiler"), ({}, "Unsupported: ")],
    ids=["no compiler", "graph break"],
)
def test_decoding_runs_eagerly_if_it_cannot_be_compiled(
    no_kernels: None, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], reason: str
) -> None:
    torch._dynamo.reset()
    engine = Engine(one_layer(), slots=6)
    if not settings:
        engine.model.model.norm.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with caplog.at_level(logging.WARNING), inductor_config.patch(settings):
        assert not engine.runner.compile(6)
    assert "option.enable_torch_compile has no effect, decoding runs eagerly: " in caplog.text
    assert reason in caplog.text
    assert engine.generate([1, 2, 3], max_new_tokens=4).tokens == engine.expected([1, 2, 3], 4)


def test_compiled_code_that_fails_later_ends_no_request(no_kernels: None, caplog: pytest.LogCaptureFixture) -> None:
    engine, compiler = Engine(tiny_model("llama"), slots=6), FakeCompiler()
    assert engine.runner.compile(6, compiler)
    before = compiler.calls
    assert engine.generate([1, 2, 3], max_new_tokens=4).tokens == engine.expected([1, 2, 3], 4)
    assert compiler.calls == before + 3
    _, answer = engine.add([4, 5], max_new_tokens=5)
    engine.engine.step()
    compiler.failure = AssertionError("expected size 4==8, stride 1==1 at dim=0")
    with caplog.at_level(logging.WARNING):
        engine.run()
    assert answer.tokens == engine.expected([4, 5], 5)
    assert caplog.text.count("decoding runs eagerly: AssertionError: expected size") == 1


def test_a_lack_of_memory_in_compiled_code_is_no_failure_of_the_code(no_kernels: None) -> None:
    engine, compiler = Engine(tiny_model("llama"), slots=6), FakeCompiler()
    engine.runner.compile(6, compiler)
    compiler.failure = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        engine.generate([1, 2, 3], max_new_tokens=4)
    engine.engine.fail_running(caught.value)
    compiler.failure = None
    before = compiler.calls
    assert engine.generate([1, 2, 3], max_new_tokens=4).tokens == engine.expected([1, 2, 3], 4)
    assert compiler.calls > before


def test_graphs_record_the_compiled_code(devices: None) -> None:
    engine, compiler, capture = on_gpu(), FakeCompiler(), FakeCapture()
    assert engine.runner.compile(6, compiler)
    before = compiler.calls
    assert engine.runner.capture(6, lambda: capture) == 4
    assert compiler.calls > before
    assert engine.generate([1, 2, 3], max_new_tokens=4).tokens == engine.expected([1, 2, 3], 4)
    assert capture.replays >= 3


def test_a_model_on_kernels_of_the_cpu_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tiny_model("llama"))
    with caplog.at_level(logging.WARNING):
        assert not engine.runner.compile(6)
    assert "on the CPU a model in bf16 or fp32 runs on kernels of this project" in caplog.text
