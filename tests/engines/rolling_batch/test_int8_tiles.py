"""Many rows in 8 bits, in tile registers: as sums of integers, and a model, say what they are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gguf_models import random_blocks
from rounded_rows import rounded, rounded_numbers
from tiny_models import tiny_model
from torch import nn

from handlers.checkpoints.blocks.formats import StoredWeight
from handlers.checkpoints.blocks.int8_activations import Int8BlockLinear, round_activations, unrounded_activations
from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.checkpoints.blocks.quantizing import quantize_to_blocks
from handlers.checkpoints.blocks.rounding import quantize
from handlers.cpu_kernels import amx
from handlers.cpu_kernels.arrays import as_numpy
from handlers.cpu_kernels.blocks.layout import EXACT_ROWS, UNPACKED_ROWS
from handlers.cpu_kernels.int8.tiles import MAX_INPUTS
from handlers.rolling_batch.cpu.block_linears import limit_exact_rows
from handlers.rolling_batch.cpu.kernel_choice import ALL, Crossovers, Work

pytestmark = pytest.mark.skipif(
    not amx.MULTIPLIES_BYTES, reason="needs tile registers; test_other_processors.py emulates them"
)


def in_tiles(
    stored: StoredWeight, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Int8BlockLinear:
    """Return a layer that multiplies any number of rows in tile registers."""
    layer = Int8BlockLinear.from_linear(BlockLinear.from_stored(stored, bias, dtype))
    layer.limit_exact_rows(0)
    layer.limit_unpacked_rows(0)
    return layer


def random_weight(outputs: int, inputs: int) -> StoredWeight:
    weight = torch.randn((outputs, inputs), generator=torch.Generator().manual_seed(outputs * inputs))
    return quantize(weight, "int8")


def random_rows(rows: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return rows whose sizes differ by powers of ten."""
    chance = torch.Generator().manual_seed(rows + inputs)
    hidden = torch.randn((rows, inputs), generator=chance)
    return (hidden * 10.0 ** torch.randint(-3, 4, (rows, 1), generator=chance)).to(dtype)


def expected(hidden: torch.Tensor, stored: StoredWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the product with a scale for each row and each output, from exact sums of integers."""
    rows, weight = hidden.float().numpy(), stored.numbers()
    numbers, scales = rounded_numbers(rows, rows.shape[1])
    sums = numbers[:, 0] @ weight.numbers.numpy().astype(np.int64).T
    scaled = sums.astype(np.float32) * weight.scales[:, 0].float().numpy() * scales[:, 0]
    found = torch.from_numpy(scaled)
    return (found if bias is None else found + bias.float()).to(hidden.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 1), (64, 33), (96, 31), (576, 100), (1280, 64), (32800, 40)])
def test_a_layer_computes_what_integers_give(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """The widest rows are more bytes than are multiplied at once."""
    stored = random_weight(outputs, inputs)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(2)).to(dtype) if outputs == 100 else None
    layer = in_tiles(stored, bias, dtype)
    for rows in (1, 15, 16, 17, 32, 33, 70) if inputs < 10_000 else (33,):
        hidden = random_rows(rows, inputs, dtype)
        assert torch.equal(layer(hidden), expected(hidden, stored, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_sums_fit_up_to_so_many_inputs(dtype: torch.dtype) -> None:
    stored = quantize(torch.ones((2, MAX_INPUTS)), "int8")
    stored.raw[1, :] = quantize(-torch.ones((1, MAX_INPUTS)), "int8").raw[0]
    for given in (1.0, -1.0):
        hidden = torch.full((1, MAX_INPUTS), given, dtype=dtype)
        found = in_tiles(stored, None, dtype)(hidden)
        assert torch.equal(found, expected(hidden, stored))
        assert float(found[0, 0] * given) > 0 > float(found[0, 1] * given)
    wider = quantize(torch.ones((1, MAX_INPUTS + 32)), "int8")
    assert not Int8BlockLinear.from_linear(BlockLinear.from_stored(wider, None, dtype)).has_tiles


def test_inputs_at_the_limits_of_float32() -> None:
    stored = random_weight(33, 96)
    layer = in_tiles(stored)
    for given in (0.0, 1e-39, -1e-33, 1e-30, 3e30):
        hidden = torch.full((1, 96), given, dtype=torch.bfloat16)
        assert torch.equal(layer(hidden), expected(hidden, stored))
    for lost in (torch.inf, -torch.inf, torch.nan):
        hidden = torch.ones((20, 96), dtype=torch.bfloat16)
        hidden[17, 40] = lost
        found = layer(hidden)
        assert bool(found[17].isnan().all())
        assert bool(found[:17].isfinite().all())
        assert bool(found[18:].isfinite().all())


def test_a_row_gets_the_same_bits_in_any_batch_and_with_any_number_of_threads() -> None:
    layer, hidden = in_tiles(random_weight(200, 1280)), random_rows(78, 1280)
    together = layer(hidden)
    for row in (0, 15, 31, 32, 77):
        assert torch.equal(layer(hidden[row : row + 1])[0], together[row])
    assert torch.equal(layer(hidden[:40]), together[:40])
    for threads in (1, 3, 5):
        out = torch.empty_like(together)
        layer._kernel(as_numpy(hidden), layer.laid, layer.added, as_numpy(out), threads)
        assert torch.equal(out, together)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("inputs", [96, 512])
def test_few_rows_have_scales_of_32_inputs_and_those_between_the_borders_none(inputs: int, dtype: torch.dtype) -> None:
    stored, hidden = random_weight(70, inputs), random_rows(9, inputs, dtype)
    plain, layer = BlockLinear.from_stored(stored, None, dtype), in_tiles(stored, None, dtype)
    plain.limit_exact_rows(0)
    layer.limit_exact_rows(5)
    layer.limit_unpacked_rows(8)
    for rows in (1, 5):
        given, weights = torch.from_numpy(rounded(hidden[:rows].float().numpy())), stored.numbers().weight().double()
        few, size = given @ weights.T, given.abs() @ weights.abs().T
        assert bool(((layer(hidden[:rows]).double() - few).abs() <= 2**-8 * few.abs() + 1e-6 * size).all())
    assert torch.equal(layer(hidden[:8]), plain(hidden[:8]))
    assert torch.equal(layer(hidden), expected(hidden, stored))
    with unrounded_activations(layer):
        assert torch.equal(layer(hidden), plain(hidden))
        assert torch.equal(layer(hidden[:5]), plain(hidden[:5]))
    assert layer.laid[0, [EXACT_ROWS, UNPACKED_ROWS]].tolist() == [5, 8]


def test_layers_beside_each_other_are_in_tiles_if_all_of_them_are() -> None:
    hidden, stored = random_rows(33, 96), [random_weight(64, 96), random_weight(40, 96)]
    layers = [in_tiles(each) for each in stored]
    joined = Int8BlockLinear.join(layers, None)
    assert joined.has_tiles
    joined.limit_exact_rows(0)
    joined.limit_unpacked_rows(0)
    assert torch.equal(joined(hidden), torch.cat([layer(hidden) for layer in layers], 1))
    other = in_tiles(random_blocks("q8_0", 40, 96))
    assert not other.has_tiles
    mixed = Int8BlockLinear.join([layers[0], other], None)
    assert not mixed.has_tiles
    for layer in (other, mixed):
        layer.limit_exact_rows(0)
        layer.limit_unpacked_rows(0)  # has no effect: tiles would not read what lies there
    assert torch.equal(mixed(hidden)[:, 64:], other(hidden))
    assert not torch.equal(mixed(hidden)[:, :64], layers[0](hidden))


@pytest.mark.parametrize(
    ("seconds", "exact_rows", "unpacked_rows"),
    [((1.0, 2.0, 3.0), ALL, ALL), ((3.0, 2.0, 1.0), 0, 0), ((2.0, 1.0, 3.0), 0, ALL), ((1.0, 3.0, 2.0), ALL, 0)],
)
def test_a_load_measures_which_of_three_ways_is_the_fastest(
    seconds: tuple[float, float, float], exact_rows: int, unpacked_rows: int
) -> None:
    layer = in_tiles(random_weight(32, 64))

    def timer(work: Work) -> float:
        """Return the seconds of few rows as stored, of unpacked weights, and of tiles."""
        work()
        limits = layer.laid[0, [EXACT_ROWS, UNPACKED_ROWS]].tolist()
        return seconds[0 if limits[0] else 1 if limits[1] else 2]

    limit_exact_rows(nn.Sequential(layer), Crossovers(seconds=timer, max_seconds=math.inf))
    assert layer.laid[0, [EXACT_ROWS, UNPACKED_ROWS]].tolist() == [exact_rows, unpacked_rows]


class _Expected(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.stored, self.bias = quantize(linear.weight, "int8"), linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        return expected(rows, self.stored, self.bias).view(*hidden.shape[:-1], -1)


def test_a_model_computes_what_reference_layers_do() -> None:
    reference, served = (tiny_model("llama_with_biases", torch.bfloat16) for _ in range(2))
    for module in list(reference.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, _Expected(child))
    quantize_to_blocks(served, "int8")
    round_activations(served)
    layers = [module for module in served.modules() if isinstance(module, Int8BlockLinear)]
    for layer in layers:
        assert layer.has_tiles
        layer.limit_exact_rows(0)
        layer.limit_unpacked_rows(0)
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        assert torch.equal(served(ids).logits, reference(ids).logits)
