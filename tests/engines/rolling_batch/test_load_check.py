"""A model is served only if its logits beyond every window are those of the model as it was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rolling_batch_helpers import Received, generated, round_any_rows
from tiny_models import CONTEXT, VOCABULARY, llama_of_whole_blocks, saved_model, tiny_model
from transformers import AutoModelForCausalLM, DogeConfig

from benchmarks.tiny_checkpoints import random_model, tiny_config
from handlers.checkpoints.blocks.int8_activations import Int8BlockLinear
from handlers.checkpoints.quantization import rounds_activations
from handlers.checkpoints.transformers_loading import load_model
from handlers.huggingface import model as transformers_model
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.attention.probe import UnsupportedAttentionError
from handlers.rolling_batch.engine_loading import LoadedEngine, load_engine
from handlers.rolling_batch.runner.load_check import LoadCheck
from handlers.rolling_batch.runner.model_runner import ModelRunner
from handlers.rolling_batch.sequences.passes import SequencePasses
from lmi_server.contract.errors import ModelLoadError, RollingBatchError
from lmi_server.contract.generation import SamplingParameters

pytestmark = pytest.mark.slow

CHUNK = 32


def load(directory: Path, **options: Any) -> LoadedEngine:
    chosen = HuggingFaceOptions(dtype="fp32", kv_cache_memory_gb=0.01, **options)
    return load_engine(lambda: transformers_model.load(str(directory), chosen), chosen)


def tokens(loaded: LoadedEngine, prompt: list[int], count: int) -> list[int]:
    answer = Received()
    parameters = SamplingParameters(max_new_tokens=count, ignore_eos=True)
    loaded.engine.add("a", prompt, parameters, "", 3, answer.take)
    while loaded.engine.has_work:
        loaded.engine.step()
    return answer.tokens


def test_soft_caps_are_compared_with_eager_attention(tmp_path: Path) -> None:
    """The library's default attention leaves the soft cap out, so that the right logits looked wrong."""
    model = tiny_model("gemma2_with_soft_caps")
    loaded = load(saved_model(model, tmp_path))
    prompt = list(range(40))
    assert tokens(loaded, prompt, 8) == generated(model, prompt, 8)


def test_the_check_goes_beyond_a_window_that_the_engine_does_not_keep() -> None:
    def runner(kept: int) -> ModelRunner:
        model = tiny_model("mistral_with_window")
        model.config.sliding_window = 40  # beyond the 16 tokens that are compared in any case
        check = LoadCheck(model, CONTEXT)
        model.config.sliding_window = kept  # what the rolling batch reads
        return ModelRunner(model, CONTEXT, check=check)

    runner(40).prepare(4, CONTEXT)
    with pytest.raises(UnsupportedAttentionError, match="differ from its own"):
        runner(60).prepare(4, CONTEXT)


def test_the_check_goes_beyond_chunks_of_attention() -> None:
    def runner(kept: int) -> ModelRunner:
        model = random_model(tiny_config("llama4_text"))
        model.config.attention_chunk_size = 40
        check = LoadCheck(model, CONTEXT)
        model.config.attention_chunk_size = kept
        return ModelRunner(model, CONTEXT, check=check)

    runner(40).prepare(4, CONTEXT)
    with pytest.raises(UnsupportedAttentionError, match="differ from its own"):
        runner(60).prepare(4, CONTEXT)


def test_weights_that_make_nan_are_named_as_the_cause(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = torch.nan
    with pytest.raises(ModelLoadError) as refusal:
        load(saved_model(model, tmp_path))
    assert "computes NaN for random tokens: its weights are damaged, or too large for option.dtype; save or" in (
        refusal.value.message
    )
    assert "rolling_batch" not in refusal.value.message, "no other way to serve it has other weights"
    assert not isinstance(refusal.value, RollingBatchError), "it would be loaded again for static batches"


@pytest.mark.parametrize("quantize", [None, "q8_0"])
def test_a_checkpoint_of_zeros_is_named_as_the_cause(quantize: str | None, tmp_path: Path) -> None:
    model = llama_of_whole_blocks()
    for parameter in model.parameters():
        parameter.data.zero_()
    with pytest.raises(ModelLoadError) as refusal:
        load(saved_model(model, tmp_path), quantize=quantize)
    assert "the whole checkpoint, has only zeros; save or download the checkpoint again" in refusal.value.message
    assert "nan" not in refusal.value.message
    assert not isinstance(refusal.value, RollingBatchError), "it would be loaded again for static batches"


def test_layers_that_round_their_inputs_are_judged_by_their_error(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    check = LoadCheck(model, CONTEXT, rounds_activations=True)
    for parameter in model.parameters():
        parameter.data *= 1 + 0.02 * torch.randn_like(parameter)
    with caplog.at_level("INFO"):
        ModelRunner(model, CONTEXT, check=check).prepare(4, CONTEXT)
    assert "its layers round their inputs: on random tokens the logits differ by" in caplog.text
    other = tiny_model("llama")
    for parameter in other.parameters():
        parameter.data = torch.randn_like(parameter) * 0.15
    with pytest.raises(UnsupportedAttentionError, match="serve it unquantised"):
        ModelRunner(other, CONTEXT, check=check).prepare(4, CONTEXT)


def test_a_border_of_rounded_rows_that_is_measured_after_the_comparison_began_is_no_error(tmp_path: Path) -> None:
    """The loaded model rounds all rows to 8 bits; the served one rounds none if that is slower on its machine."""
    options = HuggingFaceOptions.model_validate({"dtype": "fp32", "quantize": "q4_0", "activation_dtype": "int8"})
    directory = saved_model(llama_of_whole_blocks(), tmp_path)
    model = load_model(AutoModelForCausalLM, str(directory), options)
    round_any_rows(model)
    runner = ModelRunner(model, CONTEXT, check=LoadCheck(model, CONTEXT, rounds_activations(model)))
    for module in model.modules():
        if isinstance(module, Int8BlockLinear):
            module.limit_exact_rows(0)
    runner.prepare(4, CONTEXT)


def test_a_mask_of_the_models_own_is_a_refusal(tmp_path: Path) -> None:
    """Doge passes its mask by name, and only longer texts than this window show what it hides."""
    config = DogeConfig(
        vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, keep_window_size=128, bos_token_id=257, eos_token_id=258,
    )  # fmt: skip
    with pytest.raises(ModelLoadError, match="its logits over a KV cache differ"):
        load(saved_model(AutoModelForCausalLM.from_config(config), tmp_path))


def test_a_window_as_long_as_the_context_costs_nothing() -> None:
    model = tiny_model("mistral_with_window")
    model.config.sliding_window = CONTEXT
    assert list(LoadCheck(model, CONTEXT)._expected) == [16]
    assert torch.equal(LoadCheck(model, 24)._ids, LoadCheck(model, CONTEXT)._ids)


@pytest.mark.parametrize(
    ("model_type", "shares"),
    # The first two count positions from the cache: learned ones, and angles that change the logits by four per cent.
    [("mvp", False), ("roformer", False), ("bloom", True), ("gptj", True)],
)
def test_in_bfloat16_sequences_share_a_call_only_if_padding_changes_nothing(model_type: str, shares: bool) -> None:
    """The rounding of bfloat16 hides no padding: the error of a padded sequence is held against one that is not."""
    runner = ModelRunner(random_model(tiny_config(model_type)).bfloat16().eval(), CONTEXT)
    runner.prepare(4, CONTEXT)
    assert isinstance(runner._eager, SequencePasses)
    assert runner._eager.together is shares
