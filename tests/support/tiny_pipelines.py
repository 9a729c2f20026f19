"""Tiny pipelines of diffusers with random weights, and files of images.

diffusers is imported when it is used: it takes ten seconds of processor time.
"""

from __future__ import annotations

import io
import string
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_LETTERS = string.ascii_lowercase
SIDE = 16
"""Width and height of an image if a request does not say, in pixels."""


def save_pipeline(directory: Path, seed: int = 0, inpaints_only: bool = False) -> Path:
    """Write a Stable Diffusion whose images are 16 x 16 pixels; one that `inpaints_only` has the denoiser of such."""
    import torch
    from diffusers import DDIMScheduler, StableDiffusionInpaintPipeline, StableDiffusionPipeline

    torch.manual_seed(seed)
    kind: Any = StableDiffusionInpaintPipeline if inpaints_only else StableDiffusionPipeline
    pipeline = kind(
        vae=_vae(),
        text_encoder=_text_encoder(),
        tokenizer=_tokenizer(),
        unet=_unet(9 if inpaints_only else 4),
        scheduler=DDIMScheduler(  # type: ignore[no-untyped-call]
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(directory)
    return directory


def _unet(channels: int) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(  # type: ignore[no-untyped-call]
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=SIDE // 2,
        in_channels=channels,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
    )


def _vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(  # type: ignore[no-untyped-call]
        block_out_channels=[8, 16],
        norm_num_groups=4,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
        sample_size=SIDE,
    )


def _vocabulary() -> dict[str, int]:
    tokens = [*_LETTERS, *(letter + "</w>" for letter in _LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return {token: number for number, token in enumerate(tokens)}


def _tokenizer() -> Any:
    from transformers import CLIPTokenizer

    return CLIPTokenizer(vocab=_vocabulary(), merges=[], model_max_length=16)


def _text_encoder() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    size = len(_vocabulary())
    config = CLIPTextConfig(
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        vocab_size=size,
        max_position_embeddings=16,
        bos_token_id=size - 2,
        eos_token_id=size - 1,
        pad_token_id=size - 1,
    )
    return CLIPTextModel(config)


def picture(size: tuple[int, int] = (SIDE, SIDE), seed: int = 0, kind: str = "PNG") -> bytes:
    """Return the file of an image with random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return file_of(Image.fromarray(pixels), kind)


def half_transparent(size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    """Return the file of a mask of OpenAI's: its left half is transparent, and is drawn anew."""
    mask = Image.new("RGBA", size, (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, size[0] // 2, size[1]))
    return file_of(mask)


def half_white(size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    """Return the file of a mask of diffusers': its left half is white, and is drawn anew."""
    mask = Image.new("L", size, 0)
    mask.paste(255, (0, 0, size[0] // 2, size[1]))
    return file_of(mask)


def file_of(image: Any, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def opened(data: bytes) -> Any:
    """Return the image in a file."""
    return Image.open(io.BytesIO(data))


def pixels(data: bytes) -> Any:
    """Return the pixels of a file as numbers from 0 to 255, (height, width, 3)."""
    return np.asarray(opened(data).convert("RGB"), dtype=int)


def save_lora(pipeline_dir: Path, directory: Path, seed: int = 0) -> Path:
    """Write a LoRA adapter for the denoiser of a pipeline, with random weights, as diffusers writes them."""
    import torch
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    unet: Any = UNet2DConditionModel.from_pretrained(pipeline_dir / "unet")  # type: ignore[no-untyped-call]
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(weight.shape, generator=generator) for name, weight in get_peft_model_state_dict(unet).items()
    }
    StableDiffusionPipeline.save_lora_weights(str(directory), unet_lora_layers=weights)
    return directory
