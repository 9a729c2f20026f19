"""How far logits are from expected ones."""

from __future__ import annotations

import math

import pytest
import torch

from handlers.logits import refuse_broken, relative_error
from lmi_server.contract.errors import ModelLoadError


def test_an_error_is_a_share_of_the_spread() -> None:
    expected = torch.tensor([[1000.0, 1001.0], [1000.0, 1001.0]])
    assert relative_error(expected + torch.tensor([0.0, 0.1]), expected) == pytest.approx(0.1414, rel=0.01)
    assert relative_error(expected, expected) == 0
    assert math.isnan(relative_error(expected.log() * torch.nan, expected))


def test_without_a_spread_it_is_a_share_of_the_size() -> None:
    label = torch.tensor([[2.0], [-2.0]])
    assert relative_error(label * 1.01, label) == pytest.approx(0.01, rel=1e-3)
    zeros = torch.zeros(3, 4)
    assert relative_error(zeros, zeros) == 0
    assert relative_error(zeros + 1e-6, zeros) == math.inf
    assert math.isnan(relative_error(zeros + torch.nan, zeros))


@pytest.mark.parametrize("value", [0.0, 0.1, -1e4])
def test_a_model_that_finds_all_tokens_equally_likely_is_refused(value: float) -> None:
    logits = torch.full((4, 259), value)
    with pytest.raises(ModelLoadError, match="Tiny finds all tokens equally likely after random ones"):
        refuse_broken(logits, "Tiny")
    logits[3, 5] += 0.5
    refuse_broken(logits, "Tiny")


def test_a_model_that_computes_nan_is_refused() -> None:
    logits = torch.zeros(4, 259)
    logits[3, 5] = torch.nan
    with pytest.raises(ModelLoadError, match=r"Tiny as it was loaded computes NaN .* option\.dtype=fp32"):
        refuse_broken(logits, "Tiny")
