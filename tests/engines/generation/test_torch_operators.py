"""torch's private operators are probed, and what they computed is computed without them if a torch lacks them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from handlers.checkpoints.quantization import Int8Linear
from handlers.deepspeed import int8
from handlers.torch_operators import probes

Probe = Callable[[], bool]
PROBES = (
    probes.packs_linears,
    probes.multiplies_int8_weights,
    probes.multiplies_integers,
)


def probe_anew() -> None:
    for probe in PROBES:
        probe.cache_clear()


@pytest.fixture(autouse=True)
def probed_anew() -> Iterator[None]:
    probe_anew()
    yield
    probe_anew()


def test_the_installed_torch_has_them(caplog: pytest.LogCaptureFixture) -> None:
    """A processor without bfloat16 packs no weights, and that is no warning."""
    assert probes.multiplies_int8_weights()
    assert probes.multiplies_integers()
    probes.packs_linears()
    assert not caplog.records


def fails(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("expected at most 3 arguments\nbut got 6")


def zeros(rows: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.zeros(len(rows), 32)


@pytest.mark.parametrize("other", [fails, zeros, lambda *_: torch.zeros(1)])
@pytest.mark.parametrize(
    ("place", "name", "probe"),
    [
        (torch.ops.aten, "_weight_int8pack_mm", probes.multiplies_int8_weights),
        (torch, "_int_mm", probes.multiplies_integers),
    ],
)
def test_another_operator_of_that_name_is_not_used(
    place: Any,
    name: str,
    probe: Probe,
    other: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(place, name, other)
    with caplog.at_level(logging.WARNING):
        assert not probe()
        assert not probe()
    assert [name in record.message and torch.__version__ in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("name", ["_reorder_linear_weight", "_linear_pointwise"])
def test_weights_are_not_packed_without_the_operators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, name, fails)
    assert not probes.packs_linears()


def test_layers_compute_the_same_without_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    rows = torch.randn(3, 64, dtype=torch.bfloat16)
    weight = torch.randint(-127, 128, (32, 64), dtype=torch.int8)
    linear = nn.Linear(64, 32, dtype=torch.bfloat16)
    stored: Any = nn.Linear(64, 32, bias=False)
    stored.weight = nn.Parameter(weight, requires_grad=False)
    stored.weight.SCB = torch.rand(32)
    layers = (int8.DynamicInt8Linear.quantize(linear, None), Int8Linear(stored, torch.bfloat16))
    expected = [layer(rows) for layer in layers]
    for place, name in ((torch, "_int_mm"), (torch.ops.aten, "_weight_int8pack_mm")):
        monkeypatch.setattr(place, name, fails)
    probe_anew()
    torch.testing.assert_close(layers[0](rows), expected[0], rtol=0, atol=0)
    torch.testing.assert_close(layers[1](rows), expected[1], rtol=0.02, atol=0.5)
