"""Weights in few bits with scales of groups: the kernels compute what the weights stand for.

They run on a GPU by NVIDIA, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_models import float_llama, packed_llama
from rolling_batch_helpers import Engine, prompts
from tiny_models import llama_of_whole_blocks
from transformers import AutoModelForCausalLM

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from handlers.checkpoints.blocks.quantizing import quantize_to_blocks
from handlers.checkpoints.grouped.launch import Tiles, few_rows, splits_for, unpacked
from handlers.checkpoints.grouped.layers import GroupedLinear, GroupedWeight
from handlers.checkpoints.transformers_loading import load_model
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.attention.decode_passes import CudaCapture
from handlers.rolling_batch.fused.one_row import multiply

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
CHAINS = [False, True] if ON_GPU and torch.cuda.get_device_capability() >= (9, 0) else [False]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# bits, size of the groups (0: one scale for an output), whether there are zeros; 0 bits are floats
KINDS = [(4, 128, True), (4, 128, False), (4, 64, False), (4, 32, True), (4, 0, True), (3, 96, True),
         (8, 128, False), (8, 32, True), (8, 0, False), (0, 128, False), (0, 0, False)]  # fmt: skip


def held(kind: tuple[int, int, bool], outputs: int, inputs: int, order: bool = False) -> GroupedWeight:
    bits, group, has_zeros = kind
    chance = torch.Generator().manual_seed(outputs + inputs)
    groups = inputs // group if group else 1
    scales = (torch.rand((outputs, groups), generator=chance) + 0.5) / inputs**0.5
    by_order = torch.randperm(inputs, generator=chance).to(DEVICE) if order else None
    if not bits:
        numbers = torch.randn((outputs, inputs), generator=chance).to(torch.float8_e4m3fn)
        numbers.view(torch.uint8)[0, :8] = torch.tensor([0, 1, 7, 8, 0x7E, 0xFE, 0x80, 0x81])
        return GroupedWeight(8, numbers.to(DEVICE), scales.to(DEVICE), None, by_order)
    scales = scales.to(torch.float16) / (1 << (bits - 1))
    numbers = torch.randint(1 << bits, (outputs, inputs), generator=chance).to(torch.uint8)
    zeros = torch.randint(1 << bits, (outputs, groups), generator=chance).to(torch.uint8)
    if not has_zeros:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    return GroupedWeight(bits, numbers.to(DEVICE), scales.to(DEVICE), zeros.to(DEVICE), by_order)


def rows_of(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((count, width), generator=torch.Generator().manual_seed(count)).to(DEVICE, dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < (2e-6 if found.dtype == torch.float32 else 0.015), error


def inputs_of(kind: tuple[int, int, bool]) -> int:
    return {0: 672, 32: 672, 64: 704, 96: 1152, 128: 1152}[kind[1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_few_rows_are_multiplied(kind: Any, dtype: torch.dtype) -> None:
    width = inputs_of(kind)
    bias = torch.randn(90)
    linear = GroupedLinear(held(kind, 90, width), bias.to(DEVICE), dtype).to(DEVICE)
    exact = linear.held().plain().double()
    for count, tiles in ((1, Tiles()), (5, Tiles(waves=100)), (33, Tiles(rows=16, waves=100))):
        rows = rows_of(count, width, dtype)
        expected = rows.double() @ exact.T + linear.bias.double()
        close(few_rows(rows, linear, tiles), expected)
    assert few_rows(rows_of(0, width, dtype), linear).shape == (0, 90)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_weight_is_unpacked(kind: Any, dtype: torch.dtype) -> None:
    linear = GroupedLinear(held(kind, 21, inputs_of(kind)), None, dtype)
    close(unpacked(linear, dtype), linear.held().plain().double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("form", ["plain", "normed", "gated"])
def test_one_row_is_multiplied(kind: Any, dtype: torch.dtype, form: str) -> None:
    width, outputs = inputs_of(kind), 21
    lines = 2 * outputs if form == "gated" else outputs
    bias = torch.randn(lines).to(DEVICE) if form == "normed" else None
    linear = GroupedLinear(held(kind, lines, width), bias, dtype)
    row, residual = rows_of(1, width, dtype), rows_of(1, outputs, dtype)
    norm = SimpleNamespace(weight=torch.rand(width).to(DEVICE, dtype), epsilon=1e-5)
    given = row.double()
    if form != "plain":
        given = given * norm.weight.double() / (given.square().mean() + norm.epsilon).sqrt()
    expected = given @ linear.held().plain().double().T
    if bias is not None:
        expected += linear.bias.double()
    if form == "gated":
        gate, other = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * other
    for chained in CHAINS:
        found = multiply(row, linear, None if form == "plain" else norm, form == "gated", residual, chained)
        close(found, expected + residual.double())


def test_inputs_are_split_where_outputs_are_too_few_for_the_gpu() -> None:
    assert splits_for(4096, 128, 448, 132) == 1
    assert splits_for(4096, 128, 64, 132) == 4
    assert splits_for(4096, 128, 16, 132) == 8  # four steps for each program at least
    assert splits_for(14336, 128, 16, 132) == 16
    assert splits_for(256, 128, 1, 132) == 1


on_gpu = pytest.mark.skipif(not ON_GPU, reason="layers take the kernels on a GPU")


@on_gpu
@pytest.mark.parametrize("count", [1, 64, 128, 300])
@pytest.mark.parametrize("order", [False, True])
def test_a_layer_computes_any_number_of_rows(count: int, order: bool) -> None:
    linear = GroupedLinear(held((4, 128, True), 256, 1152, order), None, torch.bfloat16)
    rows = rows_of(count, 1152, torch.bfloat16)[None]
    given = rows[0] if linear.order is None else rows[0][:, linear.order]
    close(linear(rows)[0], given.double() @ linear.held().plain().double().T)


def check_tokens(model: Any, reference: Any) -> None:
    """Compare what a model in float32 generates, eager and recorded, with a model on the CPU."""
    engine = Engine(model, slots=4, reference=reference)
    for recorded in (False, True):
        if recorded:
            assert engine.runner.capture(4, CudaCapture) == 3
        answers = [engine.add(prompt, max_new_tokens=8)[1] for prompt in prompts(4)]
        engine.run()
        for prompt, answer in zip(prompts(4), answers, strict=True):
            assert answer.tokens == engine.expected(prompt, 8), answer.error


@on_gpu
@pytest.mark.parametrize("kind", [{}, {"method": "awq"}, {"act_order": True}, {"bits": 8}], ids=str)
def test_a_packed_checkpoint_generates_what_its_weights_say(tmp_path: Path, kind: dict[str, Any]) -> None:
    reference = packed_llama(tmp_path, **kind)
    model = load_model(AutoModelForCausalLM, str(tmp_path), HuggingFaceOptions(dtype="fp32"))
    assert isinstance(model.model.layers[0].mlp.down_proj, GroupedLinear)
    check_tokens(model, reference)


@on_gpu
@pytest.mark.parametrize("form", ["blocks", "outputs"])
def test_a_checkpoint_in_8_bit_floats_generates_what_its_weights_say(tmp_path: Path, form: str) -> None:
    reference = float_llama(tmp_path, form)
    check_tokens(load_model(AutoModelForCausalLM, str(tmp_path), HuggingFaceOptions(dtype="fp32")), reference)


@on_gpu
@pytest.mark.parametrize("name", ["q8_0", "q4_0", "int8"])
def test_a_quantised_model_generates_what_it_does_on_the_cpu(name: str) -> None:
    model, reference = llama_of_whole_blocks().to("cuda"), llama_of_whole_blocks()
    quantize_to_blocks(model, name, on_gpu=True)
    quantize_to_blocks(reference, name)
    check_tokens(model, reference)
