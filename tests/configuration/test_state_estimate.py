"""What recurrent layers keep of a sequence, estimated from config.json."""

from __future__ import annotations

from typing import Any

import pytest

from handlers.huggingface.options import HuggingFaceMemory, HuggingFaceOptions
from lmi_server.configuration.model_directory.state_estimate import LayerCounts, layer_counts, state_bytes

QWEN3_NEXT = {
    "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "num_attention_heads": 16,
}  # fmt: skip
MAMBA = {"model_type": "mamba", "state_size": 16, "conv_kernel": 4, "expand": 2, "hidden_size": 768}


@pytest.mark.parametrize(
    ("text", "layers", "counts"),
    [
        ({**QWEN3_NEXT, "full_attention_interval": 4}, 48, LayerCounts(12, 36)),
        ({**QWEN3_NEXT, "layer_types": ["linear_attention", "full_attention"]}, 2, LayerCounts(1, 1)),
        (MAMBA, 24, LayerCounts(0, 24)),
        ({"num_attention_heads": 32}, 32, LayerCounts(32, 0)),
        ({"num_attention_heads": 32, "layer_types": ["sliding_attention"] * 4}, 4, LayerCounts(4, 0)),
        (
            {"mamba_d_state": 16, "mamba_d_conv": 4, "attn_layer_period": 8, "attn_layer_offset": 4, "hidden_size": 64},
            32,
            LayerCounts(4, 28),
        ),
        (
            {"hybrid_override_pattern": "M-M*-", "ssm_state_size": 16, "conv_kernel": 4, "hidden_size": 64},
            5,
            LayerCounts(1, 2),
        ),
        ({"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "hidden_size": 64}, 2, LayerCounts(1, 1)),
    ],
)
def test_layers_are_counted_by_what_they_keep(text: dict[str, Any], layers: int, counts: LayerCounts) -> None:
    assert layer_counts(text, layers) == counts


def test_a_gated_delta_net_keeps_a_matrix_for_each_head() -> None:
    text = {**QWEN3_NEXT, "full_attention_interval": 4}
    convolution, matrices = (2 * 16 * 128 + 32 * 128) * 4, 32 * 128 * 128
    assert state_bytes(text, 48, 2) == 36 * (convolution * 2 + matrices * 4)


def test_odd_values_are_no_estimate() -> None:
    assert state_bytes({"linear_conv_kernel_dim": "4"}, 2, 2) == 0
    assert layer_counts({**QWEN3_NEXT, "layer_types": "linear_attention"}, 3) == LayerCounts(3, 0)
    assert layer_counts({**QWEN3_NEXT, "full_attention_interval": 0}, 3) == LayerCounts(3, 0)
    assert layer_counts({**QWEN3_NEXT, "layer_types": [["linear_attention"]]}, 1) == LayerCounts(1, 0)


def test_a_claim_of_many_layers_makes_no_list_of_them() -> None:
    layers = 10**12
    assert layer_counts({**QWEN3_NEXT, "full_attention_interval": 4}, layers) == LayerCounts(layers, 0)
    assert layer_counts({"num_attention_heads": 32}, layers) == LayerCounts(layers, 0)


def test_encoded_images_count_for_models_that_read_them() -> None:
    options = HuggingFaceOptions.model_validate({"image_cache_gb": 0.5})
    assert HuggingFaceMemory(options).image_bytes({"vision_config": {}}) == 2**29
    assert HuggingFaceMemory(options).image_bytes({"vision_config": None}) is None
    ranks = HuggingFaceOptions.model_validate({"mpi_mode": True, "tensor_parallel_degree": 2})
    assert HuggingFaceMemory(ranks).image_bytes({"vision_config": {}}) is None
