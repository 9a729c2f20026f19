"""Compiles the CPU kernels of the rolling batch before the first model is loaded.

    python -m handlers.huggingface.kernel_compilation [bf16] [fp32]

numba keeps compiled code beside the kernels' files: every later start on this kind of processor finds it.
What is compiled depends on data types and layouts, not on sizes: a small random Llama in each data type needs the same
kernels as a large one.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from handlers.huggingface.handler import HuggingFaceHandler
from handlers.huggingface.options import HuggingFaceOptions
from lmi_server.contract.generation import GenerationRequest, SamplingParameters
from lmi_server.processes import model_imports

_CONTEXT = 512
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # names in option.dtype, and of torch


def compile_kernels(dtypes: Sequence[str]) -> None:
    """Load a small Llama in each of these data types, by their names in option.dtype, and generate with it."""
    for name in dtypes:
        with tempfile.TemporaryDirectory() as directory:
            save_small_llama(Path(directory), _DTYPES[name])
            options = HuggingFaceOptions.model_validate({"dtype": name, "max_model_len": _CONTEXT})
            asyncio.run(_generate(directory, options))


def save_small_llama(directory: Path, dtype: str) -> None:
    """Save a model with random weights; the rolling batch fuses every part of it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {str(number): number for number in range(254)} | {"<s>": 254, "</s>": 255}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(directory)
    config = LlamaConfig(
        initializer_range=0.1,  # with smaller weights a layer adds little more than rounding errors, and is not fused
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_CONTEXT,
        bos_token_id=254,
        eos_token_id=255,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory)


async def _generate(directory: str, options: HuggingFaceOptions) -> None:
    """Answer a prompt of several chunks, then a prompt that begins like it."""
    handler = HuggingFaceHandler()
    await handler.start(directory, options)
    prompt = " ".join(str(number % 254) for number in range(_CONTEXT - 64))
    for request_id in ("1", "2"):
        sampling = SamplingParameters(max_new_tokens=8, ignore_eos=True)
        async for _ in handler.generate(GenerationRequest(request_id=request_id, prompt=prompt, sampling=sampling)):
            pass
    await handler.stop()


if __name__ == "__main__":
    model_imports.prepare()
    compile_kernels(sys.argv[1:] or tuple(_DTYPES))
