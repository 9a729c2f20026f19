"""Linear layers of bfloat16 laid out for the CPU, against products in double precision."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
from torch import nn

from handlers.cpu_kernels.arrays import as_numpy
from handlers.cpu_kernels.linear import linear as kernel
from handlers.rolling_batch.cpu.kernel_choice import Crossovers
from handlers.rolling_batch.cpu.linears import PackedLinear, TiledLinear, lay_out_linears
from handlers.torch_operators.read_weights import read_weights
from lmi_server.machine import tile_registers


def plain(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias, device="meta")
    chance = torch.Generator().manual_seed(inputs * outputs)
    for name, shape in (("weight", (outputs, inputs)), *([("bias", (outputs,))] if bias else [])):
        setattr(linear, name, nn.Parameter(torch.randn(shape, generator=chance).bfloat16()))
    return linear


def activations(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 70, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (30, 64), (2200, 130), (64, 100)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_tiled_layer_multiplies_and_adds_its_bias(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    linear, hidden = plain(inputs, outputs, bias), activations(1, rows, inputs)
    added = 0.0 if linear.bias is None else linear.bias.detach().double()
    expected = hidden.double() @ linear.weight.detach().double().T + added
    found = TiledLinear(linear)(hidden)
    assert found.shape == (1, rows, outputs)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=inputs**0.5 * 1e-5)


def test_a_row_gets_the_same_bits_in_any_batch_and_with_any_number_of_threads() -> None:
    linear, hidden = TiledLinear(plain(1100, 200, bias=True)), activations(77, 1100)
    together = linear(hidden)
    for row in (0, 1, 4, 76):
        assert torch.equal(linear(hidden[row : row + 1])[0], together[row])
    for threads in (1, 3, 5):
        out = torch.empty_like(together)
        kernel(as_numpy(hidden), linear.laid, linear.added, as_numpy(out), threads)
        assert torch.equal(out, together)


def test_rows_that_are_not_contiguous() -> None:
    linear, hidden = TiledLinear(plain(30, 64, bias=False)), activations(30, 5)
    assert torch.equal(linear(hidden.T), linear(hidden.T.contiguous()))


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies no bfloat16 here")
def test_onednn_and_the_tiles_agree() -> None:
    linear, hidden = plain(96, 130, bias=True), activations(9, 96)
    by_tiles, by_onednn = TiledLinear(linear)(hidden), PackedLinear(linear)(hidden)
    torch.testing.assert_close(by_tiles, by_onednn, rtol=2**-7, atol=1e-3)


class _Reading(nn.Module):
    """Reads the weights of `read` and `listed`, those of `built` while it is made, and the type of `asked`'s."""

    def __init__(self) -> None:
        super().__init__()
        self.built = nn.Linear(2, 2)
        self.read, self.listed, self.called, self.asked = (nn.Linear(2, 2) for _ in range(4))
        self.device = self.built.weight.device

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training and len(hidden):
            return hidden @ self.called.weight
        scales = [float((self.listed.weight * factor).sum()) for factor in range(2)]
        return self.called(hidden.to(self.asked.weight.dtype) @ self.read.weight) * sum(scales)


class _Heir(_Reading):
    pass


@pytest.mark.parametrize("kind", [_Reading, _Heir])
def test_the_layers_whose_weights_a_module_reads_are_known(kind: type[nn.Module]) -> None:
    assert read_weights(kind) == {"read", "listed", "asked"}
    assert read_weights(kind, numbers=True) == {"read", "listed"}


@pytest.mark.skipif(torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies bfloat16 here")
def test_the_tiles_are_chosen_where_onednn_multiplies_no_bfloat16() -> None:
    """test_other_processors.py runs it for such a processor."""
    layers = [nn.Linear(4, 4, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    model = nn.Sequential(*layers, nn.Linear(3, 4, dtype=torch.bfloat16))
    assert lay_out_linears(model, Crossovers()) == 1
    assert [type(layer) for layer in model] == [TiledLinear, nn.Linear, nn.Linear]


class _RefusingLibrary:
    """A fake C library of a system that lets no process use the tile registers, as Linux before 5.16 does."""

    def syscall(self, *_: int) -> int:
        return -1


def test_tile_registers_that_the_system_does_not_give_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_registers.ctypes, "CDLL", lambda _: _RefusingLibrary())
    assert not tile_registers.ask_for_tile_registers()


def test_vllm_asks_for_the_tile_registers_in_each_of_its_processes() -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="tile-registers")
    assert [plugin.load() for plugin in found] == [tile_registers.ask_for_tile_registers]
