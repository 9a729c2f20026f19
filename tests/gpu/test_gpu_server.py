"""The demo model on a real GPU, as users serve it: `lmi-server serve`, and requests over HTTP.

Skipped on a machine without a GPU by NVIDIA. docs/hardware.md says on which ones it has run.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_helpers import PROMPTS, TOKENS, capital_of_france, generated
from product_helpers import COMMANDS, Server, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: make test-gpu", allow_module_level=True)

_GIB = 2**30


@pytest.fixture(scope="module")
def server(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the demo model in float32, in which answers do not depend on the batch, and without further options."""
    with serving(tmp_path_factory.mktemp("gpu"), demo_model_dir, dtype="fp32") as server:
        yield server


@pytest.fixture(scope="module")
def expected(demo_model_dir: Path) -> list[str]:
    """Return what transformers generates for each prompt alone."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32).to("cuda")
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").to("cuda")
        out = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        answers.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def test_devices_names_the_gpu() -> None:
    printed = subprocess.run([COMMANDS / "lmi-server", "devices"], capture_output=True, text=True, check=True).stdout
    assert torch.cuda.get_device_name(0) in printed
    assert "cuda:0" in printed


def test_the_model_is_on_the_gpu_and_its_decoding_is_recorded(server: Server) -> None:
    log = "".join(server.lines)
    assert "device=cuda:0" in log
    assert "option.enable_cuda_graph: decoding runs as" in log
    assert "Paris" in capital_of_france(server)


def test_answers_are_those_of_transformers(server: Server, expected: list[str]) -> None:
    assert generated(server, PROMPTS) == expected
    assert [generated(server, [prompt])[0] for prompt in PROMPTS[:2]] == expected[:2]


def test_a_long_prompt_and_the_prefix_of_another(server: Server) -> None:
    long = " ".join(PROMPTS) * 20
    first = generated(server, [long])
    assert generated(server, [long, *PROMPTS, long])[0::9] == first * 2


def test_a_stream_that_is_cancelled_makes_room(server: Server) -> None:
    body = {"inputs": PROMPTS[0], "parameters": {"max_new_tokens": 4096, "ignore_eos": True}, "stream": True}
    with server.http.stream("POST", "/invocations", json=body) as answer:
        next(answer.iter_raw())
    server.wait_for("lmi_handler_running_requests", 0)


def test_the_kv_cache_leaves_memory_free(server: Server) -> None:
    """By default it takes at most nine tenths of the GPU's memory."""
    line = next(line for line in server.lines if "kv_cache_gib=" in line)
    size = float(line.partition("kv_cache_gib=")[2].split()[0])
    assert 0 < size < 0.9 * torch.cuda.get_device_properties(0).total_memory / _GIB
