"""A tiny model that fits vLLM's kernels, vLLM's own server to compare with, and handlers without a server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import torch
from forked_servers import ForkedPython
from paths import MODEL_CODE
from ports import reserved_port
from process_log import LIMIT_S, ProcessLog
from tiny_models import CONTEXT, VOCABULARY, byte_tokenizer, random_model
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    LlamaConfig,
    OPTConfig,
    PreTrainedModel,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

SETTINGS = {
    "rolling_batch": "vllm",
    "dtype": "fp32",
    "max_rolling_batch_size": "32",
    "kv_cache_memory_gb": "0.125",
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{% if tools %}{# <tool_call> #}{% endif %}"
)

_IMAGE_TEMPLATE = (  # vLLM puts the image before the prompt
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def tiny_llama() -> PreTrainedModel:
    """Return a random Llama in float32 with a head size of 32, which vLLM's CPU kernels support."""
    return random_model(
        LlamaConfig(
            vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, bos_token_id=257, eos_token_id=258,
            hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip


def make_tiny_model(directory: Path, chat_template: str | None = _CHAT_TEMPLATE) -> Path:
    """Save `tiny_llama` with a byte tokenizer and a chat template; return the directory."""
    tiny_llama().save_pretrained(directory)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return directory


def make_image_model(directory: Path) -> tuple[Path, Blip2ForConditionalGeneration]:
    """Save a random BLIP-2, which vLLM runs without torchvision; return the directory and the model."""
    tokenizer = byte_tokenizer()
    size = {"height": 28, "width": 28}
    processor = Blip2Processor(BlipImageProcessorPil(size=size), tokenizer, num_query_tokens=4)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"hidden_size": 64, "intermediate_size": 64, "image_size": 28, "patch_size": 14, **layers}
    queries = {"hidden_size": 64, "intermediate_size": 64, "encoder_hidden_size": 64, "vocab_size": 64, **layers}
    text = OPTConfig(
        vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, bos_token_id=257, eos_token_id=258, hidden_size=128,
        ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    config = Blip2Config(
        vision_config=vision, qformer_config={**queries, "cross_attention_frequency": 1}, text_config=text.to_dict(),
        num_query_tokens=4, image_token_index=tokenizer.convert_tokens_to_ids("<image>"), tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(7)
    model = Blip2ForConditionalGeneration(config).eval()
    for weights in (parameter.data for parameter in model.parameters() if parameter.dim() > 1):
        weights.normal_(std=0.3)
    model.save_pretrained(directory)
    tokenizer.chat_template = _IMAGE_TEMPLATE
    processor.save_pretrained(directory)
    return directory, model


@contextlib.contextmanager
def vllm_server(model: Path, name: str, *arguments: str) -> Iterator[httpx.Client]:
    """Run `python -m vllm.entrypoints.openai.api_server` on `model` and yield a client of it.

    It is a fork that has imported vLLM, and so are the processes of its engine.
    """
    with reserved_port() as port:
        command = [str(MODEL_CODE / "forked_engines.py"), "--model", str(model)]
        command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), *arguments]
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        server = ForkedPython(command, {**os.environ, **own}, "vllm")
        log = ProcessLog(server.stdout)
        try:
            log.wait_for("Application startup complete")
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client:
                yield client
        finally:
            server.stdin.close()
            server.terminate()
            try:
                server.wait(LIMIT_S)
            except subprocess.TimeoutExpired:  # a signal during its start may be lost
                server.kill()
                server.wait(LIMIT_S)
            log.close()


class Loader:
    """vllm_loader.py, which loads a model for each line that it gets."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
        self._process = ForkedPython([str(MODEL_CODE / "vllm_loader.py")], environment, "vllm", errors=2)
        self._log = ProcessLog(self._process.stdout)

    def load(self, **asked: Any) -> Any:
        """Return the answers of a model and its log; a text that says why there are none."""
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self.next_line()

    def next_line(self) -> Any:
        return json.loads(self._log.wait_for(r'^(\{".*}|".*")$')[0])

    def close(self) -> None:
        self._process.stdin.close()
        self._log.close()
        assert self._process.wait(LIMIT_S) == 0
