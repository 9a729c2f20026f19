"""Weights in 8-bit floats on a real GPU that multiplies such.

Skipped on a machine without one. docs/hardware.md says on which ones it has run.
"""

from __future__ import annotations

import pytest
import torch
from rolling_batch_helpers import Engine, prompts
from tiny_models import llama_of_whole_blocks
from torch import nn

from handlers.checkpoints.fp8.kernels import round_rows
from handlers.checkpoints.fp8.layers import Fp8Linear, quantize_to_fp8
from handlers.rolling_batch.attention.decode_passes import CudaCapture
from handlers.rolling_batch.fused.one_row import multiply

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU of compute capability 8.9", allow_module_level=True)


def layer(outputs: int = 160, inputs: int = 2064) -> Fp8Linear:
    torch.manual_seed(outputs)
    return Fp8Linear.quantize(nn.Linear(inputs, outputs, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.parametrize("count", [0, 1, 7, 256, 300])
def test_a_layer_computes_what_it_does_on_the_cpu(count: int) -> None:
    own = layer()
    rows = torch.randn(1, count, own.in_features, dtype=torch.bfloat16, device="cuda")
    expected = layer().to("cpu")(rows.cpu()).float()
    found = own(rows).cpu().float()
    assert found.shape == expected.shape
    assert float((found - expected).norm()) <= 0.01 * float(expected.norm())


def test_rows_are_rounded_each_with_its_scale() -> None:
    rows = torch.randn(4, 3000, dtype=torch.bfloat16, device="cuda")
    rows[1] = 0
    rows[2] *= 1000
    rounded, scales = round_rows(rows)
    error = (rounded.float() * scales - rows.float()).norm(dim=1) / rows.float().norm(dim=1).clamp_min(1e-6)
    assert float(error.max()) < 0.05
    assert float(rounded[0].float().abs().max()) == 448


def test_one_row_is_multiplied_without_being_rounded() -> None:
    own = layer()
    row = torch.randn(1, own.in_features, dtype=torch.bfloat16, device="cuda")
    exact = row.double() @ (own.weight.double() * own.scales.double()[:, None]).T + own.bias.double()
    for chained in (False, True):
        found = multiply(row, own, chained=chained)
        assert float((found.double() - exact).norm() / exact.norm()) < 4e-3


def test_a_model_generates_eager_and_recorded() -> None:
    model = llama_of_whole_blocks().to("cuda", torch.bfloat16)
    details = quantize_to_fp8(model)
    assert details["weights_mib"] < details["unquantized_weights_mib"]
    engine = Engine(model, slots=4)
    eager = [engine.add(prompt, max_new_tokens=8)[1] for prompt in prompts(4)]
    engine.run()
    assert engine.runner.capture(4, CudaCapture) == 3
    recorded = [engine.add(prompt, max_new_tokens=8)[1] for prompt in prompts(4)]
    engine.run()
    for one, other in zip(eager, recorded, strict=True):
        assert len(one.tokens) == len(other.tokens) == 8, one.error or other.error
