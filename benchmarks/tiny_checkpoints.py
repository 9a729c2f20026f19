"""Makes a tiny random checkpoint of any causal language model that transformers has a configuration for.

A rule shrinks the default configuration: each number whose name says a width, a count or a length gets a small value.
`EXCEPTIONS` has what the rule gets wrong, with the reason.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.support.tiny_models import CONTEXT, VOCABULARY, byte_tokenizer

WINDOW, CHUNK = 16, 32  # tokens; prompts are longer than both
_PAD, _BOS, _EOS = 256, 257, 258
_FIXED = {"pad_token_id": _PAD, "bos_token_id": _BOS, "eos_token_id": _EOS, "is_decoder": True}
# The first pattern that matches a whole name decides; only numbers above the value are replaced.
_RULES: tuple[tuple[str, int], ...] = (
    (r"(image|video|audio|boi|eoi|eoa|boa)\w*token_(id|index)", VOCABULARY - 4),
    (r"\w*vocab_size\w*|\w*group_vocab", VOCABULARY),
    (r"(max|original_max|encoder_max)_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions"
     r"|model_max_length|context_length|rel_extent|(relative|position_bias)_max_distance", CONTEXT),
    (r"\w*sliding_window(_size)?|(attention_|keep_)?window_size|local_attention|local_attn_chunk_length"
     r"|lsh_attn_chunk_length|index_topk", WINDOW),
    (r"\w*chunk_?size|block_size|floor_scale", CHUNK),
    (r"index_block_size", 8),
    (r"index_topk_blocks", 2),
    (r"\w*(num_key_value_heads|num_kv_heads|num_query_groups)", 2),
    (r"\w*(attention_|value_|key_|mamba_n_|linear_num_|mamba_num_)heads|(n|num)_heads?", 4),
    (r"index_n_heads", 32),  # with few heads, many tokens have the same score, 0, and any of them is chosen
    (r"\w*experts_per_tok(en)?|moe_top_?k|moe_k", 2),
    (r"\w*num_(local_|routed_)?experts|n_routed_experts|zero_expert_num", 4),
    (r"\w*head_(dim|size)|dim_head|d_head|kv_channels|head_dim_\w+|mamba_(headdim|d_head)", 32),
    (r"\w*(lora_rank|_rank|dt_rank)", 16),
    (r"\w*(state_size|d_state)", 16),
    (r"\w*(ffn|intermediate|mlp|feed_forward)\w*(size|dim)\w*|dff|d_inner|dim_ff|lru_width", 96),
    (r"(num_|n_)?(\w+_)?layers?|num_blocks|num_layers_per_stack", 2),
    (r"(\w+_)?(hidden_size|embedding_size|embedding_dim|embed_dim|embed_proj_dim)|d_model|n_embd|emb_dim"
     r"|attention_hidden_size|hidden_size_per_layer_input|query_pre_attn_scalar", 128),
)  # fmt: skip


class Deviation(NamedTuple):
    """What the rule gets wrong for a configuration: the values instead, and why."""

    values: dict[str, Any]
    reason: str


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a configuration of the type with a context of 256 tokens, windows of 16 and chunks of 32."""
    return _shrunk(CONFIG_MAPPING[model_type], model_type)


def _shrunk(config_class: Any, model_type: str, place: str = "") -> PreTrainedConfig:
    nested = {name: _shrunk(child, model_type, name) for name, child in _nested(config_class)}
    declared = {field.name: field.default for field in dataclasses.fields(config_class)}
    exception = EXCEPTIONS.get(f"{model_type}:{place}".rstrip(":"))
    values = {name: small for name, value in declared.items() if (small := _small(name, value)) is not None}
    values |= {name: value for name, value in _FIXED.items() if name in declared} | nested
    if "kv_lora_rank" in declared:
        values["num_key_value_heads"] = values["num_attention_heads"]  # latent attention has no groups of heads
    if "head_dim" in declared and declared["head_dim"] is None:
        values["head_dim"] = 32
    values |= {} if exception is None else exception.values
    return config_class(**_layers(config_class, values) | values)


def _nested(config_class: Any) -> Iterator[tuple[str, Any]]:
    """Yield the key and the class of each configuration inside another."""
    default = config_class() if config_class.sub_configs else None
    for name in config_class.sub_configs:
        child = getattr(default, name)
        if child is not None:
            yield name, type(child)


def _small(name: str, value: Any) -> int | None:
    """Return the small value of a key; None if the default stays."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    small = next((number for pattern, number in _RULES if re.fullmatch(pattern, name)), None)
    return small if small is not None and value > small else None


def _layers(config_class: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return one layer of each kind that the default has, or two of the only one."""
    if values.keys() & {"layer_types", "layers_block_type"}:
        return {}
    default = config_class(**{name: value for name, value in values.items() if isinstance(value, PreTrainedConfig)})
    for name in ("layer_types", "layers_block_type"):
        kinds = list(dict.fromkeys(getattr(default, name, None) or ()))
        if kinds and name in {field.name for field in dataclasses.fields(config_class)}:
            kinds = kinds * 2 if len(kinds) == 1 else kinds
            return {name: kinds, "num_hidden_layers": len(kinds)}
    return {}


_CONVOLVED = Deviation({"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}, "no default")
_EARLY_PADDING = Deviation(
    {"pad_token_id": 1, "max_position_embeddings": CONTEXT + 2}, "positions begin behind the pad token's id"
)
EXCEPTIONS: dict[str, Deviation] = {
    **dict.fromkeys(
        ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
        _EARLY_PADDING,
    ),
    "mamba2": Deviation({"num_heads": 8}, "the heads of Mamba make up twice the width"),
    "nemotron_h": Deviation({"mamba_num_heads": 8}, "the heads of Mamba make up twice the width, in groups of 8"),
    "codegen": Deviation({"rotary_dim": 8}, "the rotated part is no longer than a head"),
    "gptj": Deviation({"rotary_dim": 8}, "the rotated part is no longer than a head"),
    "gpt_neo": Deviation({"attention_types": [[["global", "local"], 1]]}, "it names a kind for each layer"),
    "jamba": Deviation({"attn_layer_period": 2, "attn_layer_offset": 1}, "the second of two layers attends"),
    "lfm2": _CONVOLVED,
    "lfm2_moe": _CONVOLVED,
    "nemotron": Deviation({"num_key_value_heads": 2}, "no default"),
    "dots1": Deviation({"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}, "no default"),
    "prophetnet": Deviation({"pad_token_id": 0}, "the pad token's id is below the number of positions"),
    "axk1": Deviation({"n_group": 1, "topk_group": 1}, "8 groups of experts"),
    "deepseek_v2": Deviation({"num_experts_per_tok": 2}, "no default"),
    "bamba": Deviation(
        {"mamba_n_heads": 8, "attn_layer_indices": [1]},
        "the heads of Mamba make up twice the width, and no layer attends by default",
    ),
    "granitemoehybrid": Deviation(
        {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
        "the heads of Mamba make up twice the width, and no layer attends by default",
    ),
    "cohere_compass_text": Deviation(
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
            }
        },
        "no default",
    ),
    "dbrx:attn_config": Deviation({"rope_theta": 10_000.0, "clip_qkv": 8}, "no default"),
    "gemma3n_text": Deviation(
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
        "the last layers share keys and values with one of each kind before them",
    ),
    **dict.fromkeys(
        ("qwen4_exp_text", "qwen4_exp:text_config"),
        Deviation(
            {
                "indexer_n_heads": 2,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 32,
                "indexer_budget": 16,
                "indexer_compress_ratio": 4,
                "hc_lowrank": 16,
            },
            "no default",
        ),
    ),
    "reformer": Deviation(
        {"axial_pos_embds_dim": [64, 64], "axial_pos_shape": [16, 16], "attn_layers": ["local", "local"]},
        "positions are two factors, and its other layers hash at random",
    ),
    "xmod": Deviation(
        {
            "pad_token_id": 1,
            "max_position_embeddings": CONTEXT + 2,
            "languages": ["en_XX"],
            "default_language": "en_XX",
        },
        "no default",
    ),
    "zamba": Deviation(
        {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
        "hybrid layers share weights with each other",
    ),
}
"""By model type, and for a nested configuration "type:key"."""

NOT_BUILT: dict[str, str] = {
    "blt": "generate() asks for num_hidden_layers, which its configuration has not",
    "emu3": "AutoModelForCausalLM does not load its text model alone",
    "mllama": "AutoModelForCausalLM does not load its text model alone",
    "whisper": "it drafts tokens for Whisper's own decoder",
    "gemma3n": "its images need the package timm; gemma3n_text is its text model",
    "gemma4_assistant": "it drafts tokens for another model",
    "gemma4_unified_assistant": "it drafts tokens for another model",
    "moshi": "it speaks: its tokens are codes of audio",
    "musicgen": "it makes music: its tokens are codes of audio",
    "musicgen_melody": "it makes music: its tokens are codes of audio",
}
"""Types that the zoo leaves out, and why."""


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model with random weights that attend to their context, so that wrong positions or masks show."""
    torch.manual_seed(7)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model.float().eval()


def save(model_type: str, directory: Path) -> None:
    """Write a tiny checkpoint of the type, with a tokenizer of one token per byte."""
    random_model(tiny_config(model_type)).save_pretrained(directory)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.unk_token
    tokenizer.save_pretrained(directory)
