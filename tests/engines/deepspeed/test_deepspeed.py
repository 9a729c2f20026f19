"""DeepSpeed on real ranks, over HTTP: the same answers as the model on one rank."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from model_directories import write_properties
from mpi_helpers import (
    SHARED_MEMORY,
    answered,
    assert_tokens_of_the_model_itself,
    body,
    clean,
    generated,
    generated_like,
    group_members,
    process_of_rank,
)
from pipeline_helpers import ask, started
from processes import is_running
from server_helpers import Server
from tiny_models import byte_tokenizer, random_model, saved_model, tiny_model
from tiny_tasks import make_task_model
from transformers import AutoModelForCausalLM, LlamaConfig

from handlers.deepspeed.initialization import check_before_loading, inference_config, initialize
from handlers.deepspeed.model import load
from handlers.deepspeed.options import DeepSpeedOptions
from handlers.deepspeed.shards import find_shards
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.ranks import Rank

pytestmark = pytest.mark.slow

ALONE = Rank(0, 1, "")


def write(directory: Path, **options: Any) -> Path:
    """Make a model directory for the DeepSpeed engine, and return it."""
    return write_properties(directory, engine="DeepSpeed", **options)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that two ranks cannot share evenly: 3 KV heads, 9 heads, 259 tokens."""
    directory = tmp_path_factory.mktemp("weights")
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=144,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=256,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=None,
        attention_bias=True,
        mlp_bias=True,
    )
    return saved_model(random_model(config), directory)


@pytest.fixture(scope="module")
def reference(weights: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)


@pytest.fixture(scope="module")
def split(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = write(
        tmp_path_factory.mktemp("tp") / "model",
        model_id=weights,
        tensor_parallel_degree=2,
        rolling_batch="auto",
        dtype="fp32",
        max_tokens=200,
        kv_cache_memory_gb=0.02,
    )
    with clean(directory, libraries="deepspeed") as server:
        server.log_line(r"\] loaded: max_model_len=200 .* ranks=2 .* max_running_requests=4 .*engine=deepspeed ")
        yield server
    assert not list(SHARED_MEMORY.glob("deepspeed_*"))


def test_the_tokens_are_those_of_one_rank_while_others_come_and_leave(split: Server, reference: Any) -> None:
    assert_tokens_of_the_model_itself(split, reference)


def test_both_ranks_follow_a_constraint_beside_requests_without_one(split: Server, reference: Any) -> None:
    digits = byte_tokenizer().encode("0123456789")
    constrained = body("abc", 12)
    constrained["parameters"]["guided_regex"] = "[0-9]{12}"
    with ThreadPoolExecutor(4) as pool:
        bodies = [constrained, body("abc", 40), constrained | {"inputs": "de"}, body("de", 40)]
        answers = [
            answered(answer) for answer in pool.map(lambda one: split.http.post("/invocations", json=one), bodies)
        ]
    for (only_digits, free), prompt in zip((answers[:2], answers[2:]), ("abc", "de"), strict=True):
        assert only_digits == generated(reference, prompt, 12, prefix_allowed_tokens_fn=lambda *_: digits)
        assert free == generated_like(reference, prompt, free, 40)


def test_a_rank_that_is_killed_ends_its_group_and_the_next_one_answers(split: Server, reference: Any) -> None:
    members = group_members(split.process.pid)
    with split.http.stream("POST", "/invocations", json=body("a stream", 150, stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(process_of_rank(split.process.pid, 1), signal.SIGKILL)
        list(lines)
    split.log_line(r"process \d+ was ended|process \d+ exited")
    assert answered(split.http.post("/invocations", json=body("after", 5))) == generated(reference, "after", 5)
    assert not any(map(is_running, members))


TASKS = {
    "classifier": ("text-classification", {"inputs": ["the red fox", "who jumps"]}),
    "writer": ("text2text-generation", {"inputs": "abc", "parameters": {"max_new_tokens": 6}}),
    "answers": (
        "question-answering",
        {"inputs": {"question": "who jumps?", "context": "the red fox jumps over the dog"}},
    ),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("small")
    return {name: make_task_model(task, directory / name) for name, (task, _) in TASKS.items()}


@pytest.fixture(scope="module")
def tasks(small: dict[str, Path], weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve two tasks and static batches of text generation, each on two ranks, beside a model that cannot be split."""
    directory = tmp_path_factory.mktemp("tasks")
    gpt2 = make_task_model("text-generation", directory / "gpt2")
    tiny_model("gpt2").save_pretrained(gpt2)
    origins = {"classifier": small["classifier"], "writer": small["writer"], "static": weights, "unsplit": gpt2}
    models = [
        write(directory / "models" / name, model_id=origin, dtype="fp32", tensor_parallel_degree=2)
        for name, origin in origins.items()
    ]
    with clean(*models, libraries="deepspeed") as server:
        waiting = {"unsplit", "classifier", "writer", "static"}
        while waiting:
            found = server.log_line(r"\[(\w+)-\d+\] ready: process|cannot serve GPT2LMHeadModel: AutoTP not supported")
            waiting.discard(found[1] or "unsplit")
        yield server


def alone(directory: Path, asked: Any, tmp_path: Path) -> Any:
    """Return the answer of the same model on one rank."""
    model = write(tmp_path / "alone", model_id=directory, dtype="fp32")
    return ask(started(model), asked)


@pytest.mark.parametrize("name", ["classifier", "writer"])
def test_a_task_over_two_ranks_gives_what_one_rank_gives(
    name: str, tasks: Server, small: dict[str, Path], tmp_path: Path
) -> None:
    asked = TASKS[name][1]
    answers = [tasks.http.post(f"/predictions/{name}", json=asked).json() for _ in range(2)]
    assert rounded(answers[0]) == rounded(answers[1]) == rounded(alone(small[name], asked, tmp_path))


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_through_deepspeed_gives_what_transformers_gives(
    name: str, small: dict[str, Path], tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "serving.properties").write_text(f"option.model_id={small[name]}\noption.dtype=fp32")
    asked = TASKS[name][1]
    assert rounded(alone(small[name], asked, tmp_path)) == rounded(ask(started(plain), asked))


def test_what_cannot_be_served_changes_nothing_for_the_ranks(tasks: Server) -> None:
    wrong = tasks.http.post("/predictions/classifier", json={"inputs": 5})
    assert (wrong.status_code, "send a string" in wrong.text) == (424, True)
    asked = TASKS["classifier"][1]
    assert tasks.http.post("/predictions/classifier", json=asked).status_code == 200


def rounded(value: Any) -> Any:
    """Return `value` with its numbers rounded to three digits."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


def test_a_sampled_text_is_the_same_on_all_ranks(tasks: Server, reference: Any) -> None:
    """Each rank samples the tokens of a static batch by itself; if two differed, all later tokens would be wrong."""
    asked = {"inputs": "abc", "parameters": {"max_new_tokens": 20, "do_sample": True, "return_full_text": False}}
    texts = {tasks.http.post("/predictions/static", json=asked).json()[0]["generated_text"] for _ in range(3)}
    asked["parameters"] = {"max_new_tokens": 20, "return_full_text": False}
    greedy = tasks.http.post("/predictions/static", json=asked).json()[0]["generated_text"]
    assert len(texts) == 3
    assert greedy == byte_tokenizer().decode(generated(reference, "abc", 20), skip_special_tokens=True)


def test_rotary_frequencies_stay_as_they_are(weights: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    before = model.model.rotary_emb.inv_freq.clone()
    assert initialize(model, DeepSpeedOptions(), ALONE) is None
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_all_keys_are_given_to_deepspeed() -> None:
    options = DeepSpeedOptions(max_tokens=99, triangular_masking=False, return_tuple=False, training_mp_size=2)
    assert inference_config(options, torch.float32, 2, inject=False) == {
        "tensor_parallel": {"tp_size": 2},
        "dtype": torch.float32,
        "enable_cuda_graph": False,
        "triangular_masking": False,
        "return_tuple": False,
        "training_mp_size": 2,
        "max_tokens": 99,
        "replace_with_kernel_inject": False,
    }


def test_a_configuration_of_ones_own_takes_the_place_of_all(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"max_out_tokens": 77, "dtype": "fp32"}))
    options = DeepSpeedOptions(deepspeed_config_path="ds.json", max_tokens=99).within(str(tmp_path))
    assert inference_config(options, torch.bfloat16, 1, inject=False) == {"max_out_tokens": 77, "dtype": "fp32"}
    model = tiny_model("llama", torch.bfloat16)
    initialize(model, options, ALONE)
    assert model.dtype == torch.float32
    with pytest.raises(ModelLoadError, match=r"tp_size is 1 in .*ds\.json, and option\.tensor_parallel_degree is 2"):
        inference_config(options, torch.float32, 2, inject=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "No such file"), ("{", "cannot be read"), ("[]", "does not hold a JSON object")],
)
def test_a_configuration_that_cannot_be_read_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "ds.json").write_text(text)
    options = DeepSpeedOptions(deepspeed_config_path="ds.json").within(str(tmp_path))
    with pytest.raises(ModelLoadError, match=rf"option\.deepspeed_config_path: .*ds\.json .*{message}"):
        inference_config(options, torch.float32, 1, inject=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"max_out_tokns": 77}, r"max_out_tokns is no key of DeepSpeed's configuration; remove it"),
        ({"max_out_tokens": "many"}, r"max_out_tokens = 'many' is not allowed: .*; correct it"),
        ({"tensor_parallel": {"tp_size": 1, "size": 2}}, r"tensor_parallel\.size is no key"),
    ],
)
def test_a_configuration_that_deepspeed_refuses_is_refused_before_loading(
    content: dict[str, Any], message: str, tmp_path: Path, reference: Any
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"dtype": "fp32", **content}))
    options = DeepSpeedOptions(deepspeed_config_path="ds.json").within(str(tmp_path))
    with pytest.raises(ModelLoadError, match=rf"option\.deepspeed_config_path: .*ds\.json: {message}"):
        check_before_loading(reference.config, options, 1)


def test_kernels_that_the_cpu_does_not_have_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"replace_with_kernel_inject": True, "dtype": "fp32"}))
    options = DeepSpeedOptions(deepspeed_config_path="ds.json").within(str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"DeepSpeed cannot serve LlamaForCausalLM: .*CPU"):
        initialize(tiny_model("llama"), options, ALONE)


@pytest.mark.parametrize(
    ("options", "degree", "message"),
    [
        ({}, 4, "tensor_parallel_degree=4 is more than num_key_value_heads=3 of the model"),
        ({"dtype": "fp16"}, 1, r"option\.dtype=fp16: DeepSpeed has no fp16 on the CPU"),
    ],
)
def test_what_cannot_be_is_refused_before_loading(
    options: dict[str, str], degree: int, message: str, reference: Any
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        check_before_loading(reference.config, DeepSpeedOptions(**options), degree)


def test_a_checkpoint_of_deepspeeds_kernels_is_refused(weights: Path, tmp_path: Path) -> None:
    content = {"type": "ds_model", "tp_size": 1, "parallelization": "tp", "checkpoints": {"tp": ["tp_00_00.pt"]}}
    (tmp_path / "ds_inference_config.json").write_text(json.dumps(content))
    options = DeepSpeedOptions(checkpoint="ds_inference_config.json", dtype="fp32")
    with pytest.raises(ModelLoadError, match="is for DeepSpeed's kernels"):
        find_shards(str(tmp_path), options, ALONE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp_size": 2}, r"was split for option\.tensor_parallel_degree=2, but the degree is 1; split the model again"),
        ({"dtype": "bfloat16"}, r"is in bfloat16, but option\.dtype=fp32"),
        ({"dtype": "float16", "asked": "auto"}, r"is in float16, and DeepSpeed has no fp16 on the CPU"),
    ],
)
def test_a_checkpoint_that_was_split_otherwise_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    asked = changes.get("asked", "fp32")
    content = {"type": "lmi-server ranks", "tp_size": 1, "dtype": "float32", "quantization": None, **changes}
    (tmp_path / "ds_inference_config.json").write_text(json.dumps({**content, "checkpoints": {"tp": [[]]}}))
    options = DeepSpeedOptions(checkpoint="ds_inference_config.json", dtype=asked)
    with pytest.raises(ModelLoadError, match=message):
        find_shards(str(tmp_path), options, ALONE)


def test_tokens_end_at_the_context_of_the_model(weights: Path) -> None:
    assert load(str(weights), DeepSpeedOptions(dtype="fp32")).max_len == 256
    assert load(str(weights), DeepSpeedOptions(dtype="fp32", max_tokens=50)).max_len == 50
