"""Small random models of every family that the rolling batch promises, and a byte tokenizer for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    HeliumConfig,
    Lfm2Config,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

VOCABULARY = 259
CONTEXT = 256
_BASE = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "bos_token_id": 257, "eos_token_id": 258}
_ROTARY = {
    **_BASE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
}
_GROUPED = {**_ROTARY, "num_key_value_heads": 2}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_GROUPED),
    "llama_with_biases": lambda: LlamaConfig(**_GROUPED, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: Qwen2Config(**_GROUPED),
    "qwen3": lambda: Qwen3Config(**_GROUPED, head_dim=16),
    "mistral_with_window": lambda: MistralConfig(**_GROUPED, sliding_window=8),
    "gemma": lambda: GemmaConfig(**_GROUPED, head_dim=16),
    "gemma2_with_soft_caps": lambda: Gemma2Config(
        **_GROUPED, head_dim=16, sliding_window=8, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    # Of Llama's structure to the eye, with a scale, a rotation or a layer of their own.
    "granite": lambda: GraniteConfig(**_GROUPED, residual_multiplier=0.3, attention_multiplier=0.2),
    "smollm3": lambda: SmolLM3Config(**_GROUPED, no_rope_layers=[1, 0]),
    "ministral3": lambda: Ministral3Config(
        **_GROUPED,
        head_dim=16,
        sliding_window=None,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 16,
        },
    ),
    "helium": lambda: HeliumConfig(**_GROUPED, head_dim=16),
    "glm4": lambda: Glm4Config(**_GROUPED, head_dim=16),
    "gpt2": lambda: GPT2Config(**_BASE, n_embd=64, n_layer=2, n_head=4),
    "gpt_neox": lambda: GPTNeoXConfig(**_ROTARY, rotary_pct=0.5),
    "opt": lambda: OPTConfig(
        **_BASE, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64
    ),
}


def llama_of_whole_blocks() -> PreTrainedModel:
    """Return a Llama whose widths are multiples of 64, as 4-bit layers need on the CPU."""
    return random_model(LlamaConfig(**(_GROUPED | {"intermediate_size": 128})))


def convolutional_hybrid() -> PreTrainedModel:
    """Return a model with a layer that keeps the state of a short convolution."""
    return random_model(Lfm2Config(**_GROUPED, layer_types=["full_attention", "conv"]))


def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a random model of a family."""
    return random_model(FAMILIES[family](), dtype)


def random_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model with random weights, whose logits differ enough that no two tokens tie."""
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15)
    return model.to(dtype).eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    vocabulary |= {"<unk>": 256, "<s>": 257, "</s>": 258}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def saved_model(model: PreTrainedModel, directory: Path) -> Path:
    """Save a model with the tokenizer of bytes; return the directory."""
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that decodes as those of Llama 2 and Mistral do, bytes falling back to tokens of their own."""
    pieces = ["<unk>", "▁a", "b", "c", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
