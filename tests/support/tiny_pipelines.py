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


def _unet(channels: int, **more: Any) -> Any:
    from diffusers import UNet2DConditionModel

    usual = {
        "block_out_channels": (8, 16),
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "sample_size": SIDE // 2,
        "in_channels": channels,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
    }
    kind: Any = UNet2DConditionModel
    return kind(**(usual | more))


def _vae(channels: tuple[int, ...] = (8, 16), latent_channels: int = 4, **more: Any) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(  # type: ignore[no-untyped-call]
        block_out_channels=channels,
        norm_num_groups=4,
        down_block_types=["DownEncoderBlock2D"] * len(channels),
        up_block_types=["UpDecoderBlock2D"] * len(channels),
        latent_channels=latent_channels,
        sample_size=SIDE,
        **more,
    )


def _flow_vae(channels: tuple[int, ...], latent_channels: int) -> Any:
    """Return the autoencoder of a pipeline with flow matching."""
    further = {"use_quant_conv": False, "use_post_quant_conv": False, "shift_factor": 0.06, "scaling_factor": 1.5}
    return _vae(channels, latent_channels, **further)


def _vocabulary() -> dict[str, int]:
    tokens = [*_LETTERS, *(letter + "</w>" for letter in _LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return {token: number for number, token in enumerate(tokens)}


def _tokenizer() -> Any:
    from transformers import CLIPTokenizer

    return CLIPTokenizer(vocab=_vocabulary(), merges=[], model_max_length=16)


def _text_encoder() -> Any:
    from transformers import CLIPTextModel

    return CLIPTextModel(_text_config())


def _text_config(**more: Any) -> Any:
    from transformers import CLIPTextConfig

    size = len(_vocabulary())
    return CLIPTextConfig(
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        vocab_size=size,
        max_position_embeddings=16,
        bos_token_id=size - 2,
        eos_token_id=size - 1,
        pad_token_id=size - 1,
        **more,
    )


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


def save_sdxl(directory: Path) -> Path:
    """Write an SDXL: two text encoders, and a denoiser that also knows the size."""
    import torch
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
    from transformers import CLIPTextModelWithProjection

    torch.manual_seed(0)
    scheduler: Any = EulerDiscreteScheduler
    unet = _unet(
        4,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=64,
        cross_attention_dim=32,
    )
    second = CLIPTextModelWithProjection(_text_config(projection_dim=16))
    pipeline: Any = StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=_text_encoder(),
        tokenizer=_tokenizer(),
        text_encoder_2=second,
        tokenizer_2=_tokenizer(),
        unet=unet,
        scheduler=scheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1),
    )
    pipeline.save_pretrained(directory)
    return directory


def save_flux(directory: Path) -> Path:
    """Write a Flux: a transformer with flow matching, a CLIP and a T5."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from tiny_models import byte_tokenizer
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    kinds: tuple[Any, ...] = (FluxTransformer2DModel, FlowMatchEulerDiscreteScheduler)
    transformer, scheduler = kinds
    second = byte_tokenizer()
    second.pad_token = second.eos_token
    pipeline: Any = FluxPipeline(
        scheduler=scheduler(),
        text_encoder=_text_encoder(),
        tokenizer=_tokenizer(),
        text_encoder_2=T5EncoderModel(
            T5Config(d_model=32, d_ff=32, d_kv=8, num_heads=2, num_layers=1, vocab_size=len(second))
        ),
        tokenizer_2=second,
        transformer=transformer(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            axes_dims_rope=[4, 4, 8],
        ),
        vae=_flow_vae((8,), latent_channels=1),
    )
    pipeline.save_pretrained(directory)
    return directory


def save_sd3(directory: Path) -> Path:
    """Write a Stable Diffusion 3 without its T5, as it is often served."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    torch.manual_seed(0)
    kinds: tuple[Any, ...] = (SD3Transformer2DModel, FlowMatchEulerDiscreteScheduler)
    transformer, scheduler = kinds
    encoders = [CLIPTextModelWithProjection(_text_config(projection_dim=16)) for _ in range(2)]
    pipeline: Any = StableDiffusion3Pipeline(
        scheduler=scheduler(),
        text_encoder=encoders[0],
        tokenizer=_tokenizer(),
        text_encoder_2=encoders[1],
        tokenizer_2=_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
        transformer=transformer(
            sample_size=SIDE // 2,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=32,
        ),
        vae=_flow_vae((8, 16), latent_channels=16),
    )
    pipeline.save_pretrained(directory)
    return directory
