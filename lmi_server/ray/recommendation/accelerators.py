"""The accelerators that recommendations are made for, and the models of the recommended files, by their config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RayAccelerator:
    """One device of a kind, as its data sheet has it: a GPU, or one core of Inferentia2 and Trainium.

    - `memory_gib`, `bandwidth` (bytes per second) and `flops` (per second, dense, in 16 bits) are of one device.
    - `ray_type` is Ray's name in accelerator_type:*; `resource` is what Ray counts.
    - `dtype` is vLLM's: half if there is no bfloat16.
    """

    name: str
    memory_gib: float
    bandwidth: float
    flops: float
    ray_type: str
    resource: str = "GPU"
    dtype: str = "auto"


def _gpu(name: str, memory_gib: float, gb_per_s: float, tflops: float, **more: str) -> RayAccelerator:
    return RayAccelerator(name, memory_gib, gb_per_s * 1e9, tflops * 1e12, **{"ray_type": name, **more})


_NEURON = {"ray_type": "aws-neuron-core", "resource": "neuron_cores"}
ACCELERATORS: Mapping[str, RayAccelerator] = {
    accelerator.name: accelerator
    for accelerator in (
        _gpu("T4", 15, 320, 65, dtype="half"),  # it has no bfloat16
        _gpu("L4", 22.5, 300, 121),
        _gpu("A10G", 22.5, 600, 70),
        _gpu("A100-40G", 39.5, 1555, 312),
        _gpu("A100-80G", 79.2, 2039, 312),
        _gpu("H100", 79.6, 3350, 989),
        _gpu("H200", 140.4, 4800, 989),
        _gpu("MI300X", 191.5, 5300, 1307, ray_type="AMD-Instinct-MI300X-OAM"),
        _gpu("Inf2", 16, 410, 95, **_NEURON),
        _gpu("Trn1", 16, 410, 95, **_NEURON),
    )
}


def _decoder(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, words: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": words,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", _decoder(32, 4096, 32, 8, 14336, 128256, 131072)),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B-Instruct", _decoder(80, 8192, 64, 8, 28672, 128256, 131072)),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B-Instruct", _decoder(64, 5120, 40, 8, 27648, 152064, 32768)),
    "mistral-7b": ("mistralai/Mistral-7B-Instruct-v0.3", _decoder(32, 4096, 32, 8, 14336, 32768, 32768)),
    "mixtral-8x7b": (
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        _decoder(32, 4096, 32, 8, 14336, 32000, 32768, num_local_experts=8, num_experts_per_tok=2),
    ),
    "gemma-2-9b": (
        "google/gemma-2-9b-it",
        _decoder(42, 3584, 16, 8, 14336, 256000, 8192, head_dim=256, tie_word_embeddings=True, model_type="gemma2"),
    ),
}
"""By the name of a family: the model's Hugging Face id, and its shape. Each has recommended files."""

_QWEN3 = {"head_dim": 128, "model_type": "qwen3"}
FURTHER_FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama-3.2-3b": (
        "meta-llama/Llama-3.2-3B-Instruct",
        _decoder(28, 3072, 24, 8, 8192, 128256, 131072, head_dim=128, tie_word_embeddings=True),
    ),
    "llama-3.3-70b": ("meta-llama/Llama-3.3-70B-Instruct", _decoder(80, 8192, 64, 8, 28672, 128256, 131072)),
    "qwen3-4b": (
        "Qwen/Qwen3-4B",
        _decoder(36, 2560, 32, 8, 9728, 151936, 40960, **_QWEN3, tie_word_embeddings=True),
    ),
    "qwen3-8b": ("Qwen/Qwen3-8B", _decoder(36, 4096, 32, 8, 12288, 151936, 40960, **_QWEN3)),
    "qwen3-14b": ("Qwen/Qwen3-14B", _decoder(40, 5120, 40, 8, 17408, 151936, 40960, **_QWEN3)),
    "qwen3-32b": ("Qwen/Qwen3-32B", _decoder(64, 5120, 64, 8, 25600, 151936, 40960, **_QWEN3)),
    "phi-4": ("microsoft/phi-4", _decoder(40, 5120, 40, 10, 17920, 100352, 16384)),
    "mistral-small-24b": (
        "mistralai/Mistral-Small-24B-Instruct-2501",
        _decoder(40, 5120, 32, 8, 32768, 131072, 32768, head_dim=128),
    ),
}
"""Families that are recommended for, and have no files."""

_PRODUCTS = {"A100-40G": ("A100", "40GB"), "A100-80G": ("A100", "80GB")}


def accelerator_of(product: str) -> RayAccelerator | None:
    """Return the accelerator that a GPU's product is, such as "NVIDIA A100-SXM4-80GB"; None if it is none of them."""
    words = set(re.split(r"[\s-]+", product))
    return next((each for name, each in ACCELERATORS.items() if words.issuperset(_PRODUCTS.get(name, (name,)))), None)
