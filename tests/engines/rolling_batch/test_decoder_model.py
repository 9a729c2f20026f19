"""One kernel computes a pass of a whole model if, and only if, the result is that of the model's own layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rolling_batch_helpers import Engine, check_log_probabilities, prompts, tiles_for_any_rows
from tiny_models import CONTEXT, tiny_model

from handlers.rolling_batch.attention.rows import ChunkRows, StepRows
from handlers.rolling_batch.cpu import kernel_choice
from handlers.rolling_batch.lora.layers import LoraPair
from handlers.rolling_batch.runner.model_runner import ModelRunner

pytestmark = pytest.mark.slow

OF_LLAMAS_STRUCTURE = ["llama", "llama_with_biases", "qwen2", "mistral_with_window"]


@pytest.fixture(autouse=True)
def tiles_on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use tiles whatever the processor: where they are slower, they are still correct."""
    monkeypatch.setattr(kernel_choice, "load_crossovers", tiles_for_any_rows)


def runner_of(model: Any) -> ModelRunner:
    runner = ModelRunner(model, CONTEXT)
    runner.prepare(4, CONTEXT)
    return runner


def logits(runner: ModelRunner, at_once: bool) -> torch.Tensor:
    """Return the logits of tokens 0 to 19 of one sequence and 0 to 4 of another, computed in one pass."""
    slots = np.array([0] * 20 + [2] * 5)
    positions = np.array([*range(20), *range(5)])
    runner._eager.attention.begin(StepRows(slots, positions, []))
    ids = torch.arange(100, 125)[None]
    with torch.inference_mode():
        if at_once:
            assert runner._eager.decoder is not None
            found = runner._eager.decoder.logits(ids[0].numpy(), positions, np.arange(25))
            assert found is not None
            return found
        inputs = {"input_ids": ids, "position_ids": torch.from_numpy(positions)[None], "use_cache": False}
        return runner._model(**inputs).logits[0]


@pytest.mark.parametrize("family", OF_LLAMAS_STRUCTURE)
def test_a_pass_at_once_gives_the_bits_of_layer_by_layer(family: str) -> None:
    runner = runner_of(tiny_model(family, torch.bfloat16))
    assert runner.fused["models"] == 1
    assert torch.equal(logits(runner, at_once=True), logits(runner, at_once=False))


@pytest.mark.parametrize("family", ["granite", "smollm3", "ministral3", "gemma", "qwen3", "helium", "gpt2"])
def test_a_model_that_computes_anything_else_is_not_taken_for_one(family: str) -> None:
    assert runner_of(tiny_model(family, torch.bfloat16)).fused["models"] == 0


def test_a_model_that_scales_its_embeddings_is_not_taken_for_one() -> None:
    model = tiny_model("llama", torch.bfloat16)
    embed = model.model.embed_tokens
    model.model.register_forward_pre_hook(
        lambda module, inputs, named: (
            (),
            {**named, "input_ids": None, "inputs_embeds": 3 * embed(named["input_ids"])},
        ),
        with_kwargs=True,
    )
    assert runner_of(model).fused["models"] == 0


@pytest.mark.parametrize("family", OF_LLAMAS_STRUCTURE)
def test_requests_get_near_what_float32_gives_them(family: str) -> None:
    engine = Engine(tiny_model(family, torch.bfloat16))
    exact = tiny_model(family)
    asked = [(prompt, engine.add(prompt, max_new_tokens=12, logprobs=0, ignore_eos=True)[1]) for prompt in prompts(9)]
    engine.run()
    check_log_probabilities(exact, asked)


def test_a_model_with_a_hook_is_computed_layer_by_layer() -> None:
    runner = runner_of(tiny_model("llama", torch.bfloat16))
    before = logits(runner, at_once=True)
    decoder, layer = runner._eager.decoder, runner._model.model.layers[1]
    hook = layer.mlp.down_proj.register_forward_hook(lambda module, inputs, output: output + 1)
    assert decoder.logits(np.zeros(1, np.int64), np.zeros(1, np.int64), np.arange(1)) is None
    assert not torch.equal(logits(runner, at_once=False), before)
    hook.remove()
    assert torch.equal(logits(runner, at_once=True), before)


def test_a_pass_that_keeps_no_row_has_no_logits() -> None:
    runner = runner_of(tiny_model("llama", torch.bfloat16))
    decoder, nothing = runner._eager.decoder, np.zeros(0, np.int64)
    assert decoder is not None
    gathering = torch.nn.Sequential(decoder.head)  # as of ranks: it is no kernel
    for head, rows in ((decoder.head, decoder.max_head_rows), (gathering, 0)):
        decoder.head, decoder.max_head_rows = head, rows
        runner._eager.attention.begin(StepRows(np.zeros(2, np.int64), np.arange(2), []))
        with torch.inference_mode():
            found = decoder.logits(np.array([5, 6]), np.arange(2), nothing)
        assert found is not None
        assert found.shape == (0, runner.vocabulary)


def test_after_an_adapters_request_the_kernel_computes_the_others_again() -> None:
    engine = Engine(tiny_model("llama", torch.bfloat16))
    before = engine.generate([1, 2, 3], max_new_tokens=9).tokens
    chance = torch.Generator().manual_seed(4)
    down, up = torch.randn((2, 64), generator=chance), torch.randn((64, 2), generator=chance)
    adapter = engine.engine.load_adapter({"model.layers.0.self_attn.q_proj": LoraPair(down, up, 3.0)})
    engine.add([1, 2, 3], adapter, max_new_tokens=4)
    decoder = engine.engine._runner._eager.decoder
    assert decoder is not None
    engine.engine.step()
    assert any(decoder._hooks)
    engine.run()
    assert engine.generate([1, 2, 3], max_new_tokens=9).tokens == before
    assert not any(decoder._hooks)


def test_a_chunk_is_left_to_the_layers() -> None:
    runner = runner_of(tiny_model("llama", torch.bfloat16))
    chunk = ChunkRows(slot=1, start=0, end=30, first=1, last=31, source=1)
    decoder = runner._eager.decoder
    runner._eager.attention.begin(StepRows(np.zeros(1, np.int64), np.zeros(1, np.int64), [chunk]))
    assert decoder.logits(np.zeros(31, np.int64), np.arange(31), np.arange(1)) is None
