"""What a decode pass looks up is what the model's own modules compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from handlers.checkpoints.blocks.formats import Q4_0, Q8_0, Format, StoredWeight
from handlers.checkpoints.blocks.layers import StoredEmbedding
from handlers.cpu_kernels.arrays import as_numpy
from handlers.rolling_batch.cpu.lookup_tables import RotaryTable, embedding_rows

_LONGEST = 5000  # positions


def rotary(kind: str) -> LlamaRotaryEmbedding:
    parameters = {"rope_type": kind, "rope_theta": 10000.0}
    if kind == "llama3":
        parameters |= {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=128, num_attention_heads=2, max_position_embeddings=_LONGEST, rope_parameters=parameters
        )
    )


@pytest.mark.parametrize("kind", ["default", "llama3"])
def test_angles_are_those_of_the_module_at_any_position(kind: str) -> None:
    module = rotary(kind)
    table = RotaryTable(module, _LONGEST, torch.bfloat16)
    for positions in ([7], [0, 1023, 1024, 3, 3], [_LONGEST - 1, 0], [2500]):
        found = table.rows(np.array(positions))
        expected = module(torch.empty(0, dtype=torch.bfloat16), torch.tensor([positions]))
        for part, of_module in zip(found, expected, strict=True):
            np.testing.assert_array_equal(part, as_numpy(of_module[0]))


class Scaled(nn.Embedding):
    """Gemma's kind of embedding, which does more than to look rows up."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 3


def hooked() -> nn.Embedding:
    module = nn.Embedding(9, 4, dtype=torch.bfloat16)
    module.register_forward_hook(lambda module, inputs, rows: rows + 1)
    return module


def stored(form: Format, dtype: torch.dtype = torch.bfloat16) -> StoredEmbedding:
    raw = torch.randint(256, (9, 3 * form.block_bytes), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    for first in form.scales:  # finite ones: some are small enough to be subnormal
        raw.unflatten(1, (3, -1))[:, :, first + 1] &= 0b10111011
    return StoredEmbedding(StoredWeight(form, raw), dtype)


@pytest.mark.parametrize(
    "module",
    [
        nn.Embedding(9, 4, dtype=torch.bfloat16),
        Scaled(9, 4, dtype=torch.bfloat16),
        hooked(),
        stored(Q8_0),
        stored(Q4_0),
        stored(Q8_0, torch.float32),
    ],
)
def test_embeddings_are_those_of_the_module(module: nn.Module) -> None:
    ids = np.array([8, 0, 3, 3])
    with torch.inference_mode():
        np.testing.assert_array_equal(embedding_rows(module)(ids), as_numpy(module(torch.from_numpy(ids))))
