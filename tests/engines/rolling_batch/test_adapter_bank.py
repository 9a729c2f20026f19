"""The places of adapters in recorded steps."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from handlers.rolling_batch.lora.bank import AdapterBank
from handlers.rolling_batch.lora.layers import LoraWeights


def adapter(module: nn.Module, rank: int, number: float) -> LoraWeights:
    return LoraWeights({module: (torch.full((rank, 3), number), torch.full((rank, 2), 1.0))})


def updates(bank: AdapterBank, module: nn.Module, rows: int) -> list[float]:
    with torch.inference_mode(), bank.hooks():
        return [float(row[0]) for row in module(torch.ones(rows, 3))]


@pytest.fixture
def module() -> nn.Linear:
    layer = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def test_each_row_has_the_update_of_its_adapter_however_often_places_change(module: nn.Linear) -> None:
    bank = AdapterBank(4, torch.device("cpu"))
    adapters = [adapter(module, 1 + number % 3, float(number)) for number in range(1, 9)]
    for chosen in ([0, 1, None, 2], [7, 3, 4, None], [0, 0, 5, 6], [None, 1, 2, 7], [3, 2, 1, 0]):
        bank.begin([None if number is None else adapters[number] for number in chosen])
        wanted = [0.0 if number is None else 3.0 * (number + 1) * (1 + (number + 1) % 3) for number in chosen]
        assert updates(bank, module, 4) == wanted


def test_an_adapter_that_is_removed_goes_with_its_last_request(module: nn.Linear) -> None:
    bank = AdapterBank(1, torch.device("cpu"))
    removed, other = adapter(module, 2, 5.0), adapter(module, 2, 7.0)
    bank.begin([removed])
    removed.is_forgotten = True
    bank.begin([removed])  # a request that still runs with it
    assert updates(bank, module, 1) == [30.0]
    kept = weakref.ref(removed)
    del removed
    gc.collect()
    assert kept() is None
    bank.begin([other])
    assert updates(bank, module, 1) == [42.0]


def test_a_larger_bank_is_made_without_the_memory_of_the_smaller_one(module: nn.Linear) -> None:
    bank = AdapterBank(1, torch.device("cpu"))
    first, larger = adapter(module, 2, 1.0), adapter(module, 40, 1.0)
    bank.begin([first])
    before = weakref.ref(bank._matrices[module].down)
    seen = []

    class Layers(dict[nn.Module, tuple[torch.Tensor, torch.Tensor]]):
        """Looks, when the matrices are copied, whether those of the smaller bank are gone."""

        def get(self, key: object, default: object = None) -> object:
            seen.append(before() is None)
            return super().get(key, default)  # type: ignore[call-overload]

    larger.layers = Layers(larger.layers)
    bank.begin([larger])
    assert seen == [True]
    assert updates(bank, module, 1) == [120.0]
