"""option.activation_dtype=int8: layers of blocks that round their inputs to 8 bits, as a reference in numpy does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import mixed_gguf, random_blocks
from rolling_batch_helpers import Received, generated, generated_like, prompts, round_any_rows
from rounded_rows import rounded
from tiny_models import llama_of_whole_blocks, saved_model, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from handlers.checkpoints.blocks.formats import FORMATS, StoredWeight
from handlers.checkpoints.blocks.int8_activations import Int8BlockLinear, round_activations
from handlers.checkpoints.blocks.layers import BlockLinear, KeptLayer
from handlers.checkpoints.transformers_loading import load_model
from handlers.cpu_kernels.arrays import as_numpy
from handlers.huggingface import model as transformers_model
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.engine_loading import load_engine
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.generation import SamplingParameters


class ReferenceLinear(nn.Module):
    """Multiplies rounded rows by unpacked weights, in float64."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = torch.from_numpy(rounded(hidden.reshape(-1, hidden.shape[-1]).float().numpy()))
        out = (rows @ self.weight.double().T).view(*hidden.shape[:-1], -1).to(hidden.dtype)
        return out if self.bias is None else out + self.bias


@functools.cache
def known(name: str, outputs: int, inputs: int) -> tuple[StoredWeight, torch.Tensor]:
    """Return random blocks, and the weight that they hold in float64."""
    stored = random_blocks(name, outputs, inputs)
    return stored, stored.numbers().weight().double()


def int8_layer(stored: StoredWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> Int8BlockLinear:
    return Int8BlockLinear.from_linear(BlockLinear.from_stored(stored, bias, dtype))


@pytest.mark.parametrize("rows", [0, 1, 6, 70])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 1), (512, 100), pytest.param(4608, 130, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*FORMATS, "q4_zero"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_computes_what_rounded_inputs_give(
    rows: int, inputs: int, outputs: int, name: str, dtype: torch.dtype
) -> None:
    stored, weights = known(name, outputs, inputs)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(2)).to(dtype) if outputs == 100 else None
    hidden = torch.randn((1, rows, inputs), generator=torch.Generator().manual_seed(1)).to(dtype)
    given = torch.from_numpy(rounded(hidden[0].float().numpy()))
    expected = given @ weights.T + (0.0 if bias is None else bias.double())
    layer, size = int8_layer(stored, bias, dtype), given.abs() @ weights.abs().T
    layer.limit_exact_rows(rows)
    rounding = 2**-8 * expected.abs() if dtype == torch.bfloat16 else 0.0
    assert bool(((layer(hidden)[0].double() - expected).abs() <= rounding + 1e-6 * size).all())


@pytest.mark.parametrize("name", ["q8_0", "q4_1"])
def test_rows_above_the_border_are_not_rounded(name: str) -> None:
    stored = random_blocks(name, 100, 512)
    hidden = torch.randn((9, 512), generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16):
        layer, plain = int8_layer(stored, None, dtype), BlockLinear.from_stored(stored, None, dtype)
        layer.limit_exact_rows(8)
        plain.limit_exact_rows(8)
        assert torch.equal(layer(hidden.to(dtype)), plain(hidden.to(dtype)))
        assert not torch.equal(layer(hidden[:8].to(dtype)), plain(hidden[:8].to(dtype)))


def test_inputs_at_the_limits_of_float32() -> None:
    layer = int8_layer(random_blocks("q8_0", 33, 64), None, torch.float32)
    for given in (0.0, 1e-44, -1e-39, 1e-30, 3e30):
        hidden = torch.full((1, 64), given)
        expected = ReferenceLinear(random_blocks("q8_0", 33, 64).numbers().weight(), None)(hidden)
        torch.testing.assert_close(layer(hidden), expected, rtol=1e-4, atol=1e-30)
    for lost in (torch.inf, -torch.inf, torch.nan):
        hidden = torch.ones((2, 64))
        hidden[0, 40] = lost
        assert not bool(layer(hidden)[0].isfinite().any())
        assert bool(layer(hidden)[1].isfinite().all())


@pytest.mark.parametrize("name", ["q8_0", "q4_1", "q6_k"])
def test_a_row_gets_the_same_bits_in_any_batch_and_with_any_number_of_threads(name: str) -> None:
    layer = int8_layer(random_blocks(name, 200, 1280), None, torch.bfloat16)
    layer.limit_exact_rows(100)
    hidden = torch.randn((78, 1280), generator=torch.Generator().manual_seed(1)).bfloat16()
    together = layer(hidden)
    for row in (0, 1, 4, 63, 64, 77):
        assert torch.equal(layer(hidden[row : row + 1])[0], together[row])
    for threads in (1, 3, 5):
        out = torch.empty_like(together)
        layer._kernel(as_numpy(hidden), layer.laid, layer.added, as_numpy(out), threads)
        assert torch.equal(out, together)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(llama_of_whole_blocks(), tmp_path_factory.mktemp("plain"))


def with_reference_layers(model: nn.Module) -> nn.Module:
    """Put reference layers in the place of blocks that a load has quantised."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, BlockLinear):
                weight = child(torch.eye(child.in_features)).T
                setattr(module, name, ReferenceLinear(weight.contiguous(), child.bias))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_k", "int8"])
def test_a_model_generates_what_reference_layers_do(plain: Path, kind: str) -> None:
    options = HuggingFaceOptions(dtype="fp32", quantize=kind)
    reference = with_reference_layers(load_model(AutoModelForCausalLM, str(plain), options))
    served = load_model(AutoModelForCausalLM, str(plain), options.model_copy(update={"activation_dtype": "int8"}))
    round_any_rows(served)
    for prompt in prompts(6):
        tokens = generated(served, prompt, 12)
        assert tokens == generated_like(reference, prompt, tokens, 12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_rolling_batch_serves_what_the_model_computes(plain: Path, dtype: str) -> None:
    """Rounding makes the slightest difference grow, so that the first token is compared."""
    options = HuggingFaceOptions.model_validate({"dtype": dtype, "quantize": "q8_0", "activation_dtype": "int8"})
    loaded = load_engine(lambda: transformers_model.load(str(plain), options), options)
    reference = load_model(AutoModelForCausalLM, str(plain), options)
    served: Any = loaded.engine._runner
    for model in (reference, served._model):
        round_any_rows(model)
    answers = [Received() for _ in prompts(6)]
    for number, (prompt, answer) in enumerate(zip(prompts(6), answers, strict=True)):
        loaded.engine.add(f"{number}", prompt, SamplingParameters(max_new_tokens=8), "", len(prompt), answer.take)
    while loaded.engine.has_work:
        loaded.engine.step()
    assert [answer.tokens[0] for answer in answers] == [generated(reference, prompt, 1)[0] for prompt in prompts(6)]
    assert loaded.details["fused_modules"]["decoder_layers"] == 2
    assert loaded.details["fused_modules"]["models"] == (dtype == "bf16")


@pytest.mark.slow
def test_the_demo_model_decodes_in_one_call(demo_model_dir: Path) -> None:
    """Rounding makes the differences of its 30 layers grow, but the comparison of both ways at the load is without."""
    options = HuggingFaceOptions(dtype="bf16", quantize="q8_0", activation_dtype="int8", max_model_len=64)
    loaded = load_engine(lambda: transformers_model.load(str(demo_model_dir), options), options)
    assert loaded.details["fused_modules"]["models"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("most", "others"), [("q4_k", "q6_k"), ("q5_k", "q6_k")], ids="-".join)
def test_a_file_in_gguf_generates_what_reference_layers_do(tmp_path: Path, most: str, others: str) -> None:
    path, options = str(mixed_gguf(tmp_path / "model.gguf", most, others)), HuggingFaceOptions(activation_dtype="int8")
    in_float32 = load_model(AutoModelForCausalLM, path, HuggingFaceOptions(dtype="fp32"))
    for module in list(in_float32.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, ReferenceLinear(child.weight.detach(), child.bias))
    served = load_model(AutoModelForCausalLM, path, options)
    round_any_rows(served)
    ids = torch.tensor([[5, 70, 11, 200, 3]])
    with torch.inference_mode():
        expected, found = in_float32(ids).logits, served(ids).logits.float()
    assert float((found - expected).std() / expected.std()) < 0.1  # activations between layers are in bfloat16


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"option\.activation_dtype=int8 .* set option\.quantize=q8_0"):
        round_activations(tiny_model("llama"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layers_in_another_order_round_what_they_reorder(dtype: torch.dtype) -> None:
    stored, order = random_blocks("q4_zero", 40, 96), torch.randperm(96, generator=torch.Generator().manual_seed(3))
    model = nn.Sequential(KeptLayer(stored, None, order).module(dtype))
    round_activations(model)
    hidden = torch.randn((3, 96), generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = ReferenceLinear(stored.numbers().weight(), None)(hidden[:, order])
    torch.testing.assert_close(model(hidden), expected, rtol=1e-3, atol=1e-3)
