"""The options of the huggingface handler do what they say, to loading and to scheduling."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import fake_hub
from forked_servers import ForkedPython
from process_log import LIMIT_S
from rolling_batch_helpers import Received, generated
from server_helpers import make_model, running
from tiny_models import byte_tokenizer, llama_of_whole_blocks, saved_model, tiny_model
from transformers import AutoModelForCausalLM

from handlers.checkpoints.transformers_loading import load_model
from handlers.huggingface import model as transformers_model
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.engine_loading import LoadedEngine, load_engine
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.generation import SamplingParameters
from lmi_server.machine.memory import free_and_total

pytestmark = pytest.mark.slow

HUGGING_FACE = "handlers.huggingface.handler:HuggingFaceHandler"
KEYS = {"entryPoint": "djl_python.huggingface", "rolling_batch": "scheduler", "dtype": "fp32"}
# The code of a checkpoint that brings its own: a Llama that generates the token after the most likely one.
OWN_CODE = """
import torch
from transformers import LlamaForCausalLM

class ShiftedLlama(LlamaForCausalLM):
    def forward(self, *arguments, **named):
        output = super().forward(*arguments, **named)
        output.logits = torch.roll(output.logits, 1, dims=-1)
        return output
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tiny_model("llama"), tmp_path_factory.mktemp("weights"))


def load(weights: Path, **options: Any) -> LoadedEngine:
    chosen = HuggingFaceOptions(**{"dtype": "fp32", "kv_cache_memory_gb": 0.001, **options})
    return load_engine(lambda: transformers_model.load(str(weights), chosen), chosen)


def add(loaded: LoadedEngine, name: str, prompt: list[int], count: int) -> Received:
    answer = Received()
    parameters = SamplingParameters(max_new_tokens=count, ignore_eos=True)
    loaded.engine.add(name, prompt, parameters, "", 3, answer.take)
    return answer


def steps(loaded: LoadedEngine) -> Iterator[None]:
    """Step while there is work."""
    while loaded.engine.has_work:
        loaded.engine.step()
        yield


_START = """
import asyncio, sys
from handlers.huggingface.handler import HuggingFaceHandler
from handlers.huggingface.options import HuggingFaceOptions
options = HuggingFaceOptions(dtype="fp32", kv_cache_memory_gb=0.001, enable_lora=sys.argv[2] == "true")
async def start():
    handler = HuggingFaceHandler()
    await handler.start(sys.argv[1], options)
    print("peft" in sys.modules)
    await handler.stop()
asyncio.run(start())
"""


def run_in_new_process(directory: Path, code: str, *arguments: str) -> str:
    """Run code in a process that has imported transformers and nothing of PEFT; return what it prints."""
    script = directory / "script.py"
    script.write_text(code)
    process = ForkedPython([str(script), *arguments], os.environ, "transformers")
    with process.stdin, process.stdout:
        printed = process.stdout.read()
    assert process.wait(LIMIT_S) == 0, printed
    return printed


@pytest.mark.parametrize("adapters", ["true", "false"])
def test_what_reads_adapters_is_imported_before_the_model_is_ready(
    weights: Path, adapters: str, tmp_path: Path
) -> None:
    """The import takes seconds, for which the first registration would wait."""
    assert run_in_new_process(tmp_path, _START, str(weights), adapters).split()[-1] == adapters.capitalize()


@pytest.mark.parametrize(("size", "expected"), [(10, 5), (25, 2), (-1, 1)])
def test_a_prompt_is_computed_in_chunks_of_chunked_prefill_size(weights: Path, size: int, expected: int) -> None:
    loaded = load(weights, chunked_prefill_size=size)
    answer = add(loaded, "a", list(range(50)), 1)
    assert len(list(steps(loaded))) == expected
    assert answer.tokens == generated(tiny_model("llama"), list(range(50)), 1)


@pytest.mark.parametrize(("options", "most"), [({"max_running_requests": 2}, 2), ({"max_rolling_batch_size": 3}, 3)])
def test_no_more_run_together_than_max_running_requests(weights: Path, options: dict[str, int], most: int) -> None:
    loaded = load(weights, **options)
    answers = [add(loaded, str(index), [index, 7], 4) for index in range(5)]
    running = [loaded.engine.stats.running for _ in steps(loaded)]
    assert max(running) == most
    assert all(len(answer.tokens) == 4 for answer in answers)


def test_sampling_is_what_the_model_s_generation_config_says(weights: Path, tmp_path: Path) -> None:
    """As with vLLM; what the file does not name has the default of the request's own API."""
    copied = shutil.copytree(weights, tmp_path / "copied")
    assert load(copied).sampling_defaults == {}
    named = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "eos_token_id": 2}
    (copied / "generation_config.json").write_text(json.dumps(named))
    assert load(copied).sampling_defaults == {"temperature": 0.2, "top_p": 0.9}


def test_memory_is_what_mem_fraction_static_leaves_beside_the_weights(weights: Path) -> None:
    """The share includes the weights: twice the share makes more than twice the cache, by the size of the weights."""
    many = {"max_rolling_batch_size": 2000, "kv_cache_memory_gb": None}
    share = 64 * 2**20 / free_and_total()[1]
    small, large = (load(weights, mem_fraction_static=share * factor, **many) for factor in (1, 2))
    per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, bytes
    assert (large.kv_tokens - small.kv_tokens) * per_token == pytest.approx(64 * 2**20, rel=0.01)
    assert small.kv_tokens * per_token < 64 * 2**20
    with pytest.raises(ModelLoadError, match="no memory for a KV cache"):
        load(weights, mem_fraction_static=share / 1000, **many)


def test_schedule_conservativeness_decides_between_waiting_and_retraction(weights: Path) -> None:
    tokens = {"kv_cache_memory_gb": 300 * 512 / 2**30, "max_rolling_batch_size": 8}
    retracted, running = {}, {}
    for conservativeness in (0.1, 3.0):
        loaded = load(weights, schedule_conservativeness=conservativeness, **tokens)
        answers = [add(loaded, str(index), [index] * 10, 60) for index in range(8)]
        running[conservativeness] = next(loaded.engine.stats.running for _ in steps(loaded))
        assert sum(1 for _ in steps(loaded)) > 60
        retracted[conservativeness] = loaded.engine.stats.retracted_requests
        assert [len(answer.tokens) for answer in answers] == [60] * 8
    assert running[0.1] > running[3.0]
    assert retracted[0.1] > retracted[3.0] == 0


@pytest.mark.parametrize(("policy", "first"), [("lpm", "alike"), ("fcfs", "other")])
def test_schedule_policy_decides_who_comes_first(weights: Path, policy: str, first: str) -> None:
    loaded = load(weights, schedule_policy=policy, max_running_requests=1)
    add(loaded, "before", list(range(40)), 1)
    list(steps(loaded))
    answers = {"other": add(loaded, "other", [200] * 40, 2), "alike": add(loaded, "alike", list(range(39)), 2)}
    ended = []
    for _ in steps(loaded):
        ended += [name for name, answer in answers.items() if answer.finish_reason and name not in ended]
    assert ended[0] == first


@pytest.mark.parametrize("device_map", ["auto", "cpu", "sequential"])
def test_every_device_map_puts_the_model_on_one_device(weights: Path, device_map: str) -> None:
    loaded = load(weights, device_map=device_map)
    assert loaded.details["device"] in ("cpu", "cuda:0")
    answer = add(loaded, "a", [1, 2, 3], 5)
    list(steps(loaded))
    assert answer.tokens == generated(tiny_model("llama"), [1, 2, 3], 5)


def test_a_device_that_is_not_there_fails_the_load(weights: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"option\.device_map=cuda:63: this worker has"):
        load(weights, device_map="cuda:63")


def own_code(weights: Path, directory: Path) -> Path:
    """Copy the model to a directory whose configuration names code in the same directory."""
    directory.mkdir()
    for file in weights.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_shifted.ShiftedLlama"}
    config["model_type"] = "llama"
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "modeling_shifted.py").write_text(OWN_CODE)
    return directory


def test_trust_remote_code_runs_the_code_that_a_checkpoint_brings(weights: Path, tmp_path: Path) -> None:
    checkpoint = own_code(weights, tmp_path / "checkpoint")
    tokens = {}
    for trusted in ("true", "false"):
        directory = make_model(
            tmp_path / trusted / "model", HUGGING_FACE, model_id=checkpoint, trust_remote_code=trusted, **KEYS
        )
        # The library reads the variable when it is imported, and needs it for the code that it runs.
        variables, libraries = {"HF_MODULES_CACHE": str(tmp_path / "modules")}, "worker"
        if trusted == "false":
            variables, libraries = {}, "transformers"
        with running(directory, variables=variables, libraries=libraries, workers=1) as server:
            tokens[trusted] = first_token(server.http)
    plain = expected_token()
    assert tokens == {"true": plain + 1, "false": plain}


def expected_token() -> int:
    (token,) = generated(tiny_model("llama"), byte_tokenizer()("Hello")["input_ids"], 1)
    return token


def first_token(http: Any) -> int:
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 1, "details": True}}
    return http.post("/invocations", json=body).json()["details"]["tokens"][0]["id"]


def test_revision_chooses_what_the_hub_gives(weights: Path, tmp_path: Path) -> None:
    files = {file.name: file.read_bytes() for file in weights.iterdir()}
    with fake_hub("team/tiny", files, branch="v2") as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        directory = make_model(tmp_path / "model", HUGGING_FACE, model_id="team/tiny", revision="v2", **KEYS)
        with running(directory, variables=variables | {"HF_HUB_OFFLINE": "0"}, workers=1) as server:
            token = first_token(server.http)
    assert token == expected_token()
    assert "model.safetensors" in hub.requested


def test_threads_are_those_of_every_operation(weights: Path, tmp_path: Path) -> None:
    """numba sets torch's threads to all cores when it starts; in this process it started long ago."""
    code = (
        "import sys, numba, torch; from handlers.huggingface.options import HuggingFaceOptions;"
        "from handlers.rolling_batch.engine_loading import load_engine;"
        "from handlers.huggingface.model import load;"
        "options = HuggingFaceOptions(threads=1, dtype='fp32', kv_cache_memory_gb=0.001);"
        "load_engine(lambda: load(sys.argv[1], options), options);"
        "print('threads', torch.get_num_threads(), numba.get_num_threads())"
    )
    assert run_in_new_process(tmp_path, code, str(weights)).splitlines()[-1] == "threads 1 1"


def test_a_draft_model_drafts_and_changes_no_token(weights: Path) -> None:
    plain, drafting = load(weights), load(weights, speculative_draft_model=str(weights), speculative_length=3)
    assert drafting.details["draft_model"] == str(weights)
    answers = [add(loaded, "a", [1, 2, 3], 30) for loaded in (plain, drafting)]
    for loaded in (plain, drafting):
        assert all(step is None for step in steps(loaded))
    assert answers[0].tokens == answers[1].tokens


def test_a_draft_model_without_blocks_rounds_no_activations(tmp_path: Path) -> None:
    """The served model has blocks that option.activation_dtype is about."""
    plain, saved = saved_model(llama_of_whole_blocks(), tmp_path / "plain"), tmp_path / "saved"
    options = HuggingFaceOptions(dtype="fp32", quantize="q8_0", save_mp_checkpoint_path=str(saved))
    load_model(AutoModelForCausalLM, str(plain), options)
    byte_tokenizer().save_pretrained(saved)
    loaded = load(saved, activation_dtype="int8", speculative_draft_model=str(plain))
    assert loaded.details["draft_model"] == str(plain)


def test_a_draft_model_with_other_tokens_is_refused(weights: Path, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    other = byte_tokenizer()
    other.add_tokens(["another"])
    other.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"speculative_draft_model=.*its tokens are not those.*\[ngram\]"):
        load(weights, speculative_draft_model=str(tmp_path))
