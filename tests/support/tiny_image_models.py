"""Small random models of every family that reads images under the rolling batch, as checkpoints with processors."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma4Config,
    Idefics3Config,
    InternVLConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    Mistral3Config,
    PixtralVisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    SiglipVisionConfig,
    SmolVLMConfig,
)

BYTES = 256
CONTEXT = 512
_ENDS = {"<unk>": 256, "<s>": 257, "</s>": 258}
_FIRST_SPECIAL = 259
VOCABULARY = 320
EOS = 258
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 257,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_VISION: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_SIGLIP = {**_VISION, "hidden_size": 32, "image_size": 32, "patch_size": 8}
_CLIP = {**_SIGLIP, "projection_dim": 32}
_QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_MEAN = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_QWEN_IMAGES = {
    **_MEAN,
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 16 * 16,
    "max_pixels": 48 * 48,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 48},
}
_CLIP_IMAGES = {
    **_MEAN,
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
}
_GRID = [[32, 64], [64, 32], [64, 64]]
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def token_id(tokens: tuple[str, ...], name: str) -> int:
    return _FIRST_SPECIAL + tokens.index(name)


@dataclass(frozen=True)
class Family:
    """A family of models: its configuration, the special tokens of images, and the files of its processor.

    `image` is what the chat template writes for an image.
    """

    config: PreTrainedConfig
    tokens: tuple[str, ...]
    image: str
    images: dict[str, Any]
    processor: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)


_DELTA_NET = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}


def _qwen2(kind: Any) -> PreTrainedConfig:
    vision = {**_QWEN_VISION, "hidden_size": 32}
    if kind is Qwen2VLConfig:
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    elif kind is Qwen2_5_VLConfig:
        vision |= {"out_hidden_size": 64, "intermediate_size": 48, "window_size": 16, "fullatt_block_indexes": [1]}
    else:
        vision |= {
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        }
    text = {**_TEXT, "rope_parameters": dict(_QWEN_ROPE)}
    if kind is Qwen3_5Config:
        vision.pop("deepstack_visual_indexes")
        text |= {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]} | _DELTA_NET
        text["rope_parameters"] = {**_QWEN_ROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    if kind is Qwen3VLConfig:
        text |= {"head_dim": 16, "rope_parameters": {**_QWEN_ROPE, "mrope_interleaved": True}}
    ids = {
        "image_token_id": token_id(_QWEN_TOKENS, "<|image_pad|>"),
        "video_token_id": token_id(_QWEN_TOKENS, "<|video_pad|>"),
        "vision_start_token_id": token_id(_QWEN_TOKENS, "<|vision_start|>"),
        "vision_end_token_id": token_id(_QWEN_TOKENS, "<|vision_end|>"),
    }
    return kind(text_config=text, vision_config=vision, **ids)


def _qwen(kind: Any, processor: str) -> Family:
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    return Family(_qwen2(kind), _QWEN_TOKENS, image, _QWEN_IMAGES, {"processor_class": processor})


def _gemma3() -> Family:
    tokens = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
    text = {
        **_TEXT,
        "head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=SiglipVisionConfig(**_SIGLIP).to_dict(),
        mm_tokens_per_image=16,
        boi_token_index=token_id(tokens, "<start_of_image>"),
        eoi_token_index=token_id(tokens, "<end_of_image>"),
        image_token_index=token_id(tokens, "<image_soft_token>"),
    )
    images = {**_MEAN, "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}}
    names = {"boi_token": tokens[0], "eoi_token": tokens[1], "image_token": tokens[2]}
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 16}
    return Family(config, tokens, "<start_of_image>", images, processor, names)


def _gemma4(per_layer: int, attention: str | None) -> Family:
    """Return Gemma 4 with inputs of each layer, as the small ones have, or with images that attend to themselves."""
    tokens = ("<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio>", "<audio|>", "<|audio|>")
    text = {
        **_TEXT,
        "head_dim": 16,
        "global_head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": VOCABULARY,
        "use_bidirectional_attention": attention,
    }
    vision = {
        **_VISION,
        "hidden_size": 32,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 256,
    }
    config = Gemma4Config(
        text_config=text,
        vision_config=vision,
        boi_token_id=token_id(tokens, tokens[0]),
        eoi_token_id=token_id(tokens, tokens[1]),
        image_token_id=token_id(tokens, tokens[2]),
        video_token_id=token_id(tokens, tokens[3]),
        boa_token_id=token_id(tokens, tokens[4]),
        eoa_token_index=token_id(tokens, tokens[5]),
        audio_token_id=token_id(tokens, tokens[6]),
    )
    images = {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    }
    names = {"boi_token": tokens[0], "eoi_token": tokens[1], "image_token": tokens[2], "boa_token": tokens[4]}
    names |= {"eoa_token": tokens[5], "audio_token": tokens[6]}
    return Family(config, tokens, tokens[2], images, {"processor_class": "Gemma4Processor"}, names)


_LLAMA = {**_TEXT, "model_type": "llama"}
_QWEN2 = {**_TEXT, "model_type": "qwen2"}
_MISTRAL = {**_TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None}


def _llava() -> Family:
    config = LlavaConfig(
        text_config=_LLAMA,
        vision_config=CLIPVisionConfig(**_CLIP).to_dict(),
        image_token_index=token_id(("<image>",), "<image>"),
    )
    images = {**_CLIP_IMAGES, "image_processor_type": "CLIPImageProcessor"}
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": 8,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    return Family(config, ("<image>",), "<image>\n", images, processor)


def _llava_next() -> Family:
    config = LlavaNextConfig(
        text_config=_MISTRAL,
        vision_config=CLIPVisionConfig(**_CLIP).to_dict(),
        image_grid_pinpoints=_GRID,
        image_token_index=token_id(("<image>",), "<image>"),
    )
    images = {
        **_CLIP_IMAGES,
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": _GRID,
    }
    processor = {
        "processor_class": "LlavaNextProcessor",
        "patch_size": 8,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    return Family(config, ("<image>",), "<image>\n", images, processor)


def _llava_onevision() -> Family:
    tokens = ("<image>", "<video>")
    config = LlavaOnevisionConfig(
        text_config=_QWEN2,
        vision_config=SiglipVisionConfig(**_SIGLIP, vision_use_head=False).to_dict(),
        image_grid_pinpoints=_GRID,
        image_token_index=token_id(tokens, "<image>"),
        video_token_index=token_id(tokens, "<video>"),
        vision_aspect_ratio="anyres_max_9",
        vision_feature_layer=-1,
    )
    images = {
        **_MEAN,
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": 32, "width": 32},
        "image_grid_pinpoints": _GRID,
    }
    processor = {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
    }
    return Family(config, tokens, "<image>\n", images, processor)


_IDEFICS_TOKENS = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)


def _idefics3(kind: Any, processor: str, images: str) -> Family:
    config = kind(
        text_config=_LLAMA,
        vision_config={**_SIGLIP, "model_type": "idefics3_vision" if kind is Idefics3Config else "smolvlm_vision"},
        image_token_id=token_id(_IDEFICS_TOKENS, "<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    files = {
        **_MEAN,
        "image_processor_type": images,
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": True,
    }
    return Family(config, _IDEFICS_TOKENS, "<image>", files, {"processor_class": processor, "image_seq_len": 4})


def _internvl() -> Family:
    tokens = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
    vision = {
        **_VISION,
        "hidden_size": 32,
        "image_size": [32, 32],
        "patch_size": [8, 8],
    }
    config = InternVLConfig(
        text_config=_QWEN2,
        vision_config=vision,
        image_token_id=token_id(tokens, "<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    images = {
        **_MEAN,
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 32, "width": 32},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 4,
    }
    names = {
        "start_image_token": tokens[0],
        "end_image_token": tokens[1],
        "context_image_token": tokens[2],
        "video_token": tokens[3],
    }
    processor = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    return Family(config, tokens, "<IMG_CONTEXT>\n", images, processor, names)


def _pixtral_vision() -> dict[str, Any]:
    vision = {**_VISION, "hidden_size": 32, "image_size": 64, "patch_size": 8, "head_dim": 16}
    return dict(PixtralVisionConfig(**vision).to_dict())


_PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


def _pixtral_images(patch: int) -> dict[str, Any]:
    return {
        **_MEAN,
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": patch, "width": patch},
        "size": {"longest_edge": 64},
    }


def _mistral3() -> Family:
    config = Mistral3Config(
        text_config=_MISTRAL,
        vision_config=_pixtral_vision(),
        image_token_index=token_id(_PIXTRAL_TOKENS, "[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    processor = {"processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 2}
    return Family(config, _PIXTRAL_TOKENS, "[IMG]", _pixtral_images(8), processor)


def _pixtral() -> Family:
    """Return Pixtral, which transformers has as a Llava with another encoder."""
    config = LlavaConfig(
        text_config=_MISTRAL,
        vision_config=_pixtral_vision(),
        image_token_index=token_id(_PIXTRAL_TOKENS, "[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    processor = {"processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 1}
    return Family(config, _PIXTRAL_TOKENS, "[IMG]", _pixtral_images(8), processor)


FAMILIES = {
    "qwen2_vl": lambda: _qwen(Qwen2VLConfig, "Qwen2VLProcessor"),
    "qwen2_5_vl": lambda: _qwen(Qwen2_5_VLConfig, "Qwen2_5_VLProcessor"),
    "qwen3_vl": lambda: _qwen(Qwen3VLConfig, "Qwen3VLProcessor"),
    "qwen3_5": lambda: _qwen(Qwen3_5Config, "Qwen3VLProcessor"),
    "gemma3": _gemma3,
    "gemma4": lambda: _gemma4(0, "vision"),
    "gemma4_of_layers": lambda: _gemma4(8, None),
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "smolvlm": lambda: _idefics3(SmolVLMConfig, "SmolVLMProcessor", "SmolVLMImageProcessor"),
    "idefics3": lambda: _idefics3(Idefics3Config, "Idefics3Processor", "Idefics3ImageProcessor"),
    "internvl": _internvl,
    "mistral3": _mistral3,
    "pixtral": _pixtral,
}

_TEMPLATE = """{%- for message in messages -%}
[{{ message['role'] }}]
{%- if message['content'] is string %}{{ message['content'] }}{% else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}[assistant]{% endif -%}"""


def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and the special tokens of the family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)} | _ENDS
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
        extra_special_tokens={**family.names} if family.names else list(family.tokens),
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens)})
    return tokenizer


def random_image_model(family: Family) -> PreTrainedModel:
    """Return a model with random weights in float32, in which every token of a prompt matters for the next one."""
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(family.config)
    scales = "Gemma" in type(model).__name__  # embeddings
    adds_one = "Gemma3" in type(model).__name__  # to the weights of norms
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3 if "q_proj" in name or "k_proj" in name else 0.15)
            if parameter.ndim == 1 and "bias" not in name:
                parameter.add_(0.0 if adds_one and "language_model" in name else 1.0)
            elif ("embed_tokens" in name or "lm_head" in name) and not scales:
                parameter.mul_(4)
    return model.float().eval()


def save_image_model(name: str, directory: Path) -> Path:
    """Write a checkpoint of a family with its tokenizer, its chat template and the files of its processor."""
    family = FAMILIES[name]()
    random_image_model(family).save_pretrained(directory)
    tokenizer = _tokenizer(family)
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", family.image)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(family.images))
    (directory / "processor_config.json").write_text(json.dumps(family.processor))
    return directory
