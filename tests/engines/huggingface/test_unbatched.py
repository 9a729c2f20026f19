"""Models that the rolling batch cannot run, served as LMI serves them without one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from product_helpers import COMMANDS, serving
from rolling_batch_helpers import generated
from tiny_models import CONTEXT, VOCABULARY, byte_tokenizer, random_model, saved_model
from transformers import OpenAIGPTConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from handlers.huggingface.unbatched import UNBATCHED

pytestmark = pytest.mark.slow


def test_the_listed_architectures_exist() -> None:
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) >= UNBATCHED.keys()


def test_openai_gpt_is_served_in_static_batches_unless_a_rolling_batch_is_asked_for(tmp_path: Path) -> None:
    config = OpenAIGPTConfig(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, bos_token_id=257, eos_token_id=258
    )
    model, directory = random_model(config), tmp_path / "openai-gpt"
    saved_model(model, directory)
    with serving(tmp_path, directory, libraries="transformers") as server:
        assert any("OpenAIGPTLMHeadModel cannot run under the rolling batch" in line for line in server.lines)
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 4, "details": True}}
        (answer,) = server.http.post("/invocations", json=body).json()
        tokens = [token["id"] for token in answer["details"]["tokens"]]
        assert tokens == generated(model, byte_tokenizer().encode("hello"), 4)
    (directory / "serving.properties").write_text("option.rolling_batch=scheduler")
    command = [str(COMMANDS / "lmi-server"), "serve", str(directory), "--port", "0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode == 1
    assert "option.rolling_batch=disable, for static batches, and option.rolling_batch=vllm" in refused.stderr


def test_a_model_that_only_its_load_refuses_is_loaded_again_for_static_batches(tmp_path: Path) -> None:
    config = OpenAIGPTConfig(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, bos_token_id=257, eos_token_id=258
    )
    model, directory = random_model(config), tmp_path / "newer"
    saved_model(model, directory)
    named = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**named, "architectures": ["NewerForCausalLM"]}))
    with serving(tmp_path, directory, libraries="transformers", rolling_batch="auto") as server:
        (said,) = [line for line in server.lines if "loaded again, for static batches" in line]
        assert "does not use transformers' attention interface" in said
        assert "option.rolling_batch=disable says so without this warning" in said
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 4, "details": True}}
        (answer,) = server.http.post("/invocations", json=body).json()
        tokens = [token["id"] for token in answer["details"]["tokens"]]
        assert tokens == generated(model, byte_tokenizer().encode("hello"), 4)
        assert server.http.post("/models/model/reload").status_code == 200
        assert server.http.post("/invocations", json=body).json() == [answer]
