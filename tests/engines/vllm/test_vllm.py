"""The vllm handler with the real engine over HTTP, compared with vLLM's own server on the same model."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import re
import shutil
import signal
import string
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from adapter_helpers import save_adapter, with_adapter
from model_directories import write_properties
from paths import SAMPLES
from product_helpers import Server, serving
from relay_helpers import on_loop
from rolling_batch_helpers import generated_like
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, byte_tokenizer, random_model, saved_model
from transformers import MambaConfig, MixtralConfig
from vllm_helpers import SETTINGS, Loader, make_tiny_model, tiny_llama
from waiting import wait_until

from lmi_server.configuration.properties import edited_properties
from lmi_server.configuration.resolve import inspect_model
from lmi_server.explain.explanation import explain
from lmi_server.machine.environment import process_environment

pytestmark = pytest.mark.slow

# Compiling takes half a minute. Compiled code with LoRA and on several ranks runs in test_lmi_dist.py.
UNCOMPILED = {**SETTINGS, "enforce_eager": "true"}


@pytest.fixture(scope="module")
def ours(ours: Server) -> Server:
    """Wait until compiled code runs; vLLM's own server runs uncompiled code.

    The compiler has the lowest priority: it takes half a minute alone, and many while other tests keep the cores busy.
    So it gets that of the tests, which not every user may give.
    """
    worker = psutil.Process(ours.worker_pid())
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(ours.log_line, "the compiled code runs from now on|goes on uncompiled", limit_s=1100)

        def is_found() -> bool:
            for compiler in compilers_of(worker):
                with suppress(psutil.Error):
                    compiler.nice(0)
            return wait([found], timeout=0.3).done != set()

        wait_until(is_found, "the compiled code runs", limit_s=1200)
        found.result()
    assert "goes on" not in ours.lines[-1], ours.lines[-1]
    return ours


# --- the same requests to both ---


def text(chance: random.Random, longest: int) -> str:
    letters = string.ascii_lowercase + "   äß日"
    return "".join(chance.choice(letters) for _ in range(chance.randint(1, longest)))


def varied_request(index: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a greedy request; each index gives another combination of fields."""
    chance = random.Random(index)
    body: dict[str, Any] = {"model": "model", "temperature": 0, "max_tokens": chance.randint(1, 12)}
    optional: dict[str, Any] = {
        "stop": [chance.choice("aeiou"), "xy"],
        "ignore_eos": True,
        "frequency_penalty": 0.7,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"101": 5, "116": -3},
        "min_tokens": 1,
        "stop_token_ids": [101, 202],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "seed": 4,
    }
    body |= {name: optional[name] for name in chance.sample(sorted(optional), chance.randint(0, 4))}
    if chance.random() < 0.4:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if chance.random() < 0.4:
        roles = ("system", "user", "assistant", "user")
        body["messages"] = [{"role": role, "content": text(chance, 20)} for role in roles[: chance.randint(1, 4)]]
        if chance.random() < 0.5:
            body |= {"logprobs": True, "top_logprobs": chance.randint(0, 5)}
        return "/v1/chat/completions", body
    body["prompt"] = text(chance, 60) if chance.random() < 0.8 else [chance.randrange(257) for _ in range(9)]
    if chance.random() < 0.5:
        body["logprobs"] = chance.randint(1, 5)
    if chance.random() < 0.2:
        body["echo"] = True
    return "/v1/completions", body


def answered(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return text, finish reason, usage and log probabilities of an answer, whether it streams or not."""
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        whole = reply.json()
        choice = whole["choices"][0]
        said = choice["text"] if "text" in choice else choice["message"]["content"]
        return {
            "text": said or "",
            "reason": choice["finish_reason"],
            "usage": counts(whole["usage"]),
            "scores": scores(choice["logprobs"]),
        }
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    said = "".join((choice["text"] if "text" in choice else choice["delta"].get("content")) or "" for choice in choices)
    return {
        "text": said,
        "reason": next(choice["finish_reason"] for choice in choices if choice["finish_reason"]),
        "usage": counts(chunks[-1]["usage"]),
        "scores": [score for choice in choices for score in scores(choice.get("logprobs"))],
    }


def counts(usage: dict[str, Any]) -> dict[str, int]:
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def scores(logprobs: dict[str, Any] | None) -> list[tuple[str, float | None, list[tuple[str, float]]]]:
    """Return for each token its text, its log probability and its alternatives, of chats and completions."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [
            (stated(entry["token"]), entry["logprob"], alternatives(entry["top_logprobs"]))
            for entry in logprobs["content"]
        ]
    tops = logprobs["top_logprobs"] or [None] * len(logprobs["tokens"])
    return [
        (stated(token), logprob, by_text(top or {}))
        for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
    ]


def stated(token: str) -> str:
    """Return what a token says beside bytes that are no character on their own.

    Such bytes have no text of their own in either server. Once it is clear that they never become a character, the next
    token here has the characters that stand for them, so that the texts of the tokens join to the answer. vLLM leaves
    them out.
    """
    return token.replace("\ufffd", "")


def alternatives(entries: list[dict[str, Any]]) -> list[tuple[str, float]]:
    return [(stated(entry["token"]), entry["logprob"]) for entry in entries]


def by_text(top: dict[str, float]) -> list[tuple[str, float]]:
    """Return the alternatives that have a text: all that have none are one entry, with the value of any of them."""
    return sorted((stated(token), logprob) for token, logprob in top.items() if stated(token))


def assert_same(mine: dict[str, Any], other: dict[str, Any], request: Any) -> None:
    for name in ("text", "reason", "usage"):
        assert mine[name] == other[name], (name, request)
    for place, (score, expected) in enumerate(zip(mine["scores"], other["scores"], strict=True)):
        (token, logprob, top), (their_token, their_logprob, their_top) = score, expected
        if begins_prompt(mine["scores"][: place + 1]):
            assert their_token == ""
            their_token, their_top = token, sorted([(token, logprob), *their_top])
        assert token == their_token, (place, request)
        assert logprob == (None if their_logprob is None else pytest.approx(their_logprob, abs=2e-4)), request
        assert [text for text, _ in top] == [text for text, _ in their_top], (place, request)
        assert [value for _, value in top] == pytest.approx([value for _, value in their_top], abs=2e-4), request


def begins_prompt(read: list[tuple[str, float | None, Any]]) -> bool:
    """Whether the last of these tokens completes a character that begins with the first token of a prompt.

    vLLM knows no text for it: the first token of a prompt has no log probability, and vLLM looks at scored tokens only.
    """
    *before, (text, _, _) = read
    return bool(before) and before[0][1] is None and text != "" and not any(score[0] for score in before)


@pytest.mark.parametrize("block", range(6))
def test_the_same_requests_get_the_same_answers_from_both(ours: Server, theirs: httpx.Client, block: int) -> None:
    compare(ours.http, theirs, range(20 * block, 20 * block + 20))


def compare(client: httpx.Client, other: httpx.Client, indices: range) -> None:
    """Send the same requests to two servers, all at the same time: each server has a batch of its own making."""
    asked = [varied_request(index) for index in indices]
    with ThreadPoolExecutor(2 * len(asked)) as pool:
        found = [[pool.submit(answered, server, *one) for server in (client, other)] for one in asked]
        for request, (mine, expected) in zip(asked, found, strict=True):
            assert_same(mine.result(), expected.result(), request)


# --- compiled code ---


def assert_greedy(answers: list[list[int]], prompts: Sequence[str] = ("Once",), tokens: int = 4) -> None:
    """Check that the loader has answered with the tokens of the model itself."""
    model = tiny_llama()
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer == generated_like(model, byte_tokenizer().encode(prompt), answer, tokens)


def test_compiled_code_is_found_again_wherever_the_model_is(
    ours: Server, loader: Loader, tiny_model: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(tiny_model, tmp_path / "model")
    loaded = loader.load(options={**SETTINGS, "model_id": str(copied)})
    assert_greedy(loaded["answers"])
    assert not any("uncompiled" in message for message in loaded["log"])


def test_a_model_that_cannot_be_compiled_goes_on_uncompiled(loader: Loader, tiny_model: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.symlink_to("/bin/false")
    failing = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VLLM_CACHE_ROOT": str(tmp_path / "compiled")}
    warning = "the model goes on uncompiled, vLLM could not compile it"
    options = {**SETTINGS, "model_id": str(tiny_model)}
    loaded = loader.load(options=options, variables=failing, until=warning)
    assert_greedy(loaded["answers"])
    said = next(message for message in loaded["log"] if warning in message)
    assert "No working C++ compiler" in said


def test_nothing_is_compiled_that_cannot_be_stored(loader: Loader, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = {"VLLM_CACHE_ROOT": str(tmp_path / "file" / "compiled")}
    loaded = loader.load(options={**SETTINGS, "model_id": str(tiny_model)}, variables=nowhere)
    assert_greedy(loaded["answers"])
    assert any("VLLM_CACHE_ROOT cannot be written" in message for message in loaded["log"])


@dataclass(frozen=True)
class Compiling:
    """A server that has begun to compile its model. The compilers are stopped, since nobody waits for their code."""

    server: Server
    compilers: list[psutil.Process]


@contextmanager
def compiling(directory: Path, model: Path, code: str | None = None, **settings: str) -> Iterator[Compiling]:
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_CACHE_ROOT", str(directory / "compiled"))
            server = stack.enter_context(serving(directory, model, code, "vllm", **settings))
        worker = psutil.Process(server.worker_pid())
        wait_until(lambda: compilers_of(worker), "the compiler runs")
        compilers = compilers_of(worker)
        for compiler in compilers:
            compiler.suspend()
        yield Compiling(server, compilers)


def compilers_of(worker: psutil.Process) -> list[psutil.Process]:
    return [child for child in worker.children() if "handlers.vllm.compilation.background" in command_of(child)]


def command_of(process: psutil.Process) -> list[str]:
    """Return the arguments of a process, none if it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(scope="module")
def with_formatters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiling]:
    with compiling(tmp_path_factory.mktemp("formatters"), tiny_model, _COUNTING, **SETTINGS) as started:
        yield started


# --- what only one of them is asked ---


def complete(server: Server, **body: Any) -> httpx.Response:
    asked = {"model": "model", "prompt": "Once", "temperature": 0, **body}
    return server.http.post("/v1/completions", json=asked)


def test_the_worker_runs_as_explain_says(ours: Server, tiny_model: Path, tmp_path: Path) -> None:
    write_properties(tmp_path, model_id=tiny_model, **SETTINGS)
    explained = explain(inspect_model(tmp_path, process_environment()))
    worker = psutil.Process(ours.worker_pid())
    assert explained.worker_environment.items() <= worker.environ().items()
    assert Path(worker.environ()["VLLM_RPC_BASE_PATH"]).is_dir()
    # The engine is in the worker.
    others = (child.cmdline() for child in worker.children())
    assert not [line for line in others if "handlers.structured_output.check_process" not in line]
    ready = next(line for line in ours.lines if "] loaded: " in line)
    values = {option.key: option.value for option in explained.options}
    assert f"threads={values['option.threads']} " in ready
    assert f"kv_cache_gib={explained.memory['kv_reserved_bytes'] / 2**30} " in ready


def test_constraints_hold(ours: Server) -> None:
    digits = complete(ours, max_tokens=12, structured_outputs={"regex": "[0-9]{4}"}).json()
    assert re.fullmatch("[0-9]{4}", digits["choices"][0]["text"])
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["x", "y"]}}}
    chat = {"model": "model", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 10}
    response = ours.http.post("/v1/chat/completions", json={**chat, "response_format": wanted}).json()
    assert response["choices"][0]["message"]["content"] in ('"x"', '"y"')
    chosen = complete(ours, max_tokens=12, structured_outputs={"choice": ["yes", "no"]}).json()
    assert chosen["choices"][0]["text"] in ("yes", "no")


def test_a_malformed_schema_fails_its_request_alone(ours: Server) -> None:
    with ours.http.stream("POST", "/v1/completions", json=streaming(60)) as good:
        wrong = complete(ours, structured_outputs={"json": {"type": "no such type"}})
        lines = [line for line in good.iter_lines() if line.startswith("data: {")]
    assert wrong.status_code == 400
    assert wrong.json()["error"]["message"]
    assert json.loads(lines[-1][6:])["choices"][0]["finish_reason"] == "length"


def streaming(tokens: int) -> dict[str, Any]:
    return {"model": "model", "prompt": "Count", "max_tokens": tokens, "ignore_eos": True, "stream": True}


def test_a_refusal_has_vllms_own_message(ours: Server) -> None:
    too_long = complete(ours, max_tokens=300)
    assert (too_long.status_code, "256" in too_long.json()["error"]["message"]) == (400, True)
    outside = complete(ours, prompt=[5000])
    assert (outside.status_code, "vocabulary" in outside.json()["error"]["message"]) == (400, True)


def test_text_and_tokens_become_each_other(ours: Server) -> None:
    tokens = ours.http.post("/tokenize", json={"model": "model", "prompt": "Once"}).json()["tokens"]
    assert tokens == byte_tokenizer().encode("Once")
    response = ours.http.post("/detokenize", json={"model": "model", "tokens": tokens}).json()
    assert response["prompt"] == "Once"
    assert ours.http.post("/detokenize", json={"model": "model", "tokens": [5000]}).status_code == 400


def test_a_client_that_leaves_frees_its_place(ours: Server) -> None:
    with ours.http.stream("POST", "/v1/completions", json=streaming(250)) as reply:
        next(reply.iter_lines())
    ours.wait_for("lmi_requests_in_flight", 0)
    ours.wait_for("lmi_handler_running_requests", 0)


def test_vllms_own_metrics_stand_beside_ours_once(ours: Server) -> None:
    complete(ours, max_tokens=2)
    text = ours.http.get("/metrics").text
    assert re.search(r'^vllm:generation_tokens_total{.*model="model",.*worker="model-0"} [1-9]', text, re.MULTILINE)
    heads = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(heads) == len(set(heads))


@on_loop
async def decode_now_and_then(server: Server, until: str) -> None:
    """Send short requests until the log has a line that matches `until`; the engine is never idle for a second."""
    found = asyncio.get_running_loop().run_in_executor(None, server.log_line, until)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        while not found.done():
            await client.post("/v1/completions", json=streaming(8))
            await asyncio.sleep(0.1)
    await found


def test_the_log_reports_throughput(ours: Server) -> None:
    decode_now_and_then(
        server=ours,
        until=r"Decode batch\. #running-req: 1, #token: \d+, token usage: \d\.\d\d,"
        r" gen throughput \(token/s\): \d+\.\d\d, #queue-req: 0",
    )


# --- LoRA ---


Q = "model.layers.0.self_attn.q_proj"
BROKEN_ADAPTERS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = {
    "only A": (lambda w: {k: v for k, v in w.items() if Q not in k or "lora_A" in k}, f"{Q}.lora_A.weight without its"),
    "only B": (lambda w: {k: v for k, v in w.items() if Q not in k or "lora_B" in k}, f"{Q}.lora_B.weight without its"),
    "narrow": (
        lambda w: {k: v[:, :5].contiguous() if Q in k and "lora_A" in k else v for k, v in w.items()},
        f"the adapter's {Q} has 5 inputs and",
    ),
    "two ranks": (
        lambda w: {k: v[:3].contiguous() if Q in k and "lora_A" in k else v for k, v in w.items()},
        "which do not fit together",
    ),
    "a layer too many": (
        lambda w: {k.replace("layers.0.", "layers.9."): v for k, v in w.items()},
        "the adapter changes model.layers.9.",
    ),
    "another module": (
        lambda w: {k.replace("q_proj", "z_proj"): v for k, v in w.items()},
        "z_proj, which is no",
    ),
    "not finite": (
        lambda w: {k: v * torch.inf if Q in k and "lora_B" in k else v for k, v in w.items()},
        f"{Q}.lora_B.weight holds NaN or infinity",
    ),
}


def change_adapter(directory: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = directory / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


@pytest.fixture
def with_adapters(tmp_path: Path) -> Iterator[Server]:
    """Serve a model without a chat template, with room for two adapters."""
    model = make_tiny_model(tmp_path / "bare", chat_template=None)
    settings = {**UNCOMPILED, "enable_lora": "true", "max_lora_rank": "8", "max_loras": "2", "max_cpu_loras": "4"}
    with serving(tmp_path, model, libraries="vllm", **settings) as server:
        yield server


def test_adapters_share_a_batch_and_are_replaced(with_adapters: Server, tmp_path: Path) -> None:
    server, model = with_adapters, tiny_llama()
    for name, seed in (("one", 1), ("two", 2), ("other", 3)):
        save_adapter(model, tmp_path / name, seed, r=8)

    def register(name: str, source: str) -> int:
        source = str(tmp_path / source)
        return server.http.post("/models/model/adapters", params={"name": name, "src": source}).status_code

    def answer(name: str) -> list[int]:
        response = complete(server, model=name or "model", max_tokens=12, return_token_ids=True).json()
        return list(response["choices"][0]["token_ids"])

    def assert_of(name: str, tokens: list[int]) -> None:
        adapted = with_adapter(model, tmp_path / name) if name else model
        assert tokens == generated_like(adapted, byte_tokenizer().encode("Once"), tokens, 12)

    assert [register("one", "one"), register("two", "two")] == [200, 200]
    names = ["", "one", "two", ""]
    with ThreadPoolExecutor(len(names)) as pool:
        for name, tokens in zip(names, pool.map(answer, names), strict=True):
            assert_of(name, tokens)
    updated = server.http.post("/adapters/one/update", params={"src": str(tmp_path / "other")})
    assert updated.status_code == 200
    assert_of("other", answer("one"))
    save_adapter(model, tmp_path / "wide", 4, r=16)
    assert register("wide", "wide") == 424
    for change, message in BROKEN_ADAPTERS.values():
        change_adapter(save_adapter(model, tmp_path / "broken", 5, r=8), change)
        refused = server.http.post("/models/model/adapters", params={"name": "b", "src": str(tmp_path / "broken")})
        assert (refused.status_code, message in refused.text) == (424, True), refused.text
    unknown = server.http.post("/invocations", json={"inputs": "a", "adapters": "wide"})
    assert (unknown.status_code, "wide" in unknown.text) == (424, True)
    chat = {"model": "model", "messages": [{"role": "user", "content": "Hi"}]}
    untold = server.http.post("/v1/chat/completions", json=chat)
    assert (untold.status_code, "chat template" in untold.json()["error"]["message"]) == (400, True)
    assert_of("two", answer("two"))


# --- formatters ---

_COUNTING = """
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import TextGenerationOutput, output_formatter


@input_formatter
def read(body: dict, tokenizer, **kwargs) -> dict:
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": body["ask"]}], tokenize=False)
    return {"inputs": prompt, "parameters": {"max_new_tokens": 4, "ignore_eos_token": True}}


@output_formatter
def write(output: TextGenerationOutput) -> str:
    if not output.finished:
        return ""
    counted = len(output.input.tokenizer.encode(output.input.input_text))
    return f"{output.input.input_text!r} {counted} {output.input.prompt_tokens_length()}"
"""


def test_formatters_get_vllms_tokenizer(with_formatters: Compiling) -> None:
    response = with_formatters.server.http.post("/invocations", json={"ask": "Hi"})
    prompt = "user: Hi\n"
    assert (response.status_code, response.text) == (200, f"{prompt!r} {len(prompt)} {len(prompt)}")


# --- life ---


@pytest.fixture
def without_formatters(tiny_model: Path, tmp_path: Path) -> Iterator[Compiling]:
    with compiling(tmp_path, tiny_model, **SETTINGS) as started:
        yield started


@pytest.mark.parametrize(
    ("server", "number"), [("without_formatters", signal.SIGTERM), ("with_formatters", signal.SIGKILL)]
)
def test_the_compiler_ends_with_its_server(server: str, number: signal.Signals, request: pytest.FixtureRequest) -> None:
    """It ends the server with formatters, which the test above has asked."""
    ended: Compiling = request.getfixturevalue(server)
    assert all(compiler.is_running() for compiler in ended.compilers)
    ended.server.process.send_signal(number)
    ended.server.process.wait(60)
    ended.server.stop()  # closes what it has open
    for compiler in ended.compilers:
        with suppress(psutil.NoSuchProcess):
            compiler.resume()  # it may see for itself that its worker is gone
    psutil.wait_procs(ended.compilers, timeout=60)
    left = [process for process in ended.compilers if process.is_running()]
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []


# --- loads without a server ---


def test_a_model_split_over_two_processes_gives_the_tokens_of_one(loader: Loader, tiny_model: Path) -> None:
    prompts = [f"{index} once " * (index + 1) for index in range(6)]
    options = {**UNCOMPILED, "model_id": str(tiny_model), "tensor_parallel_degree": "2"}
    loaded = loader.load(options=options, start="fork", prompts=prompts, tokens=24, kill="Worker")
    assert_greedy(loaded["answers"], prompts, 24)
    assert "ended with status" in loader.next_line()  # a worker does not outlive a part of its engine


def test_an_engine_in_its_own_process_answers_and_takes_the_worker_with_it(loader: Loader, tiny_model: Path) -> None:
    options = {**UNCOMPILED, "model_id": str(tiny_model), "engine_process": "own"}
    assert_greedy(loader.load(options=options, kill="EngineCore")["answers"])
    assert "ended with status" in loader.next_line()  # so that the pool starts another one


def test_drafts_by_prompt_lookup_change_no_token(loader: Loader, tiny_model: Path) -> None:
    prompt = "once and once and once and"
    drafts = {"speculative_draft_model": "[ngram]", "speculative_length": "3"}
    options = {**UNCOMPILED, **drafts, "model_id": str(tiny_model)}
    assert_greedy(loader.load(options=options, prompts=[prompt], tokens=40)["answers"], [prompt], 40)


@pytest.mark.parametrize("name", ["vllm", "vllm-lora", "vllm-tools"])
def test_a_sample_runs(name: str, loader: Loader, tiny_model: Path, tmp_path: Path) -> None:
    sample = (SAMPLES / f"{name}.properties").read_text()
    keys = {"model_id": tiny_model, "max_model_len": 128, "kv_cache_memory_gb": 1, "enforce_eager": "true"}
    if "tool_call_parser" in sample:  # that of Llama 3 wants a token which the tiny model has not
        keys["tool_call_parser"] = "hermes"
    instead = edited_properties(sample, {f"option.{key}": str(value) for key, value in keys.items()})
    (tmp_path / "serving.properties").write_text(instead)
    assert [len(tokens) for tokens in loader.load(directory=str(tmp_path))["answers"]] == [4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": "many"}, "--seed"),
        ({"kv_cache_dtype": "int2"}, "kv-cache-dtype"),
        ({"max_model_len": "300"}, "max_model_len"),
        ({"quantize": "awq"}, "awq"),
        ({"quantize": "fp8"}, "fp8"),
        ({"quantize": "nonsense"}, "nonsense"),
        (
            {"quantize": "int8_per_channel_weight_only", "dtype": "bf16"},
            "option.rolling_batch=scheduler with option.dtype=int8",
        ),
        ({"chat_template": "missing.jinja"}, "missing.jinja"),
        ({"kv_cache_memory_gb": "0.0001"}, "No available memory for the cache blocks"),
        ({"kv_cache_memory_gb": "0.0002"}, "max seq len"),
        ({"max_rolling_batch_prefill_tokens": "8"}, "max_num_batched_tokens"),
        ({"enable_lora": "true", "engine_process": "own"}, "use worker"),
    ],
)
def test_a_failed_load_says_why(options: dict[str, str], message: str, loader: Loader, tiny_model: Path) -> None:
    outcome = str(loader.load(options={**SETTINGS, "model_id": str(tiny_model), **options}))
    assert outcome.startswith("ModelLoadError: ")
    assert message in outcome


def test_the_experts_of_a_mixture_have_8_bits(loader: Loader, tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, bos_token_id=257, eos_token_id=258,
        pad_token_id=0,
    )  # fmt: skip
    saved_model(random_model(config), tmp_path)
    settings = {**UNCOMPILED, "model_id": str(tmp_path), "max_model_len": "64", "dtype": "bf16"}
    loaded = loader.load(options={**settings, "quantize": "int8_per_channel_weight_only"})
    if platform.machine() == "x86_64" and not torch.cpu._is_amx_tile_supported():  # vLLM's kernels need tile registers
        assert "ModelLoadError: vLLM cannot load the model: No Int8 MoE backend supports" in loaded
    else:
        assert [len(tokens) for tokens in loaded["answers"]] == [4]


def test_a_model_without_a_kernel_for_the_device_fails_to_load(loader: Loader, tmp_path: Path) -> None:
    """It would load, and end a worker with each first request."""
    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=1, state_size=8, bos_token_id=257, eos_token_id=258,
        pad_token_id=0,
    )  # fmt: skip
    saved_model(random_model(config), tmp_path)
    outcome = str(loader.load(options={**UNCOMPILED, "model_id": str(tmp_path), "max_model_len": "64"}))
    assert outcome.startswith("ModelLoadError: vLLM cannot load the model: ")
    # The load of vLLM 0.31 computes a step, which shows another missing kernel.
    assert "its first request failed: " in outcome or "causal_conv1d_fwd_kernel_impl" in outcome
    assert "option.rolling_batch=disable serves" in outcome
