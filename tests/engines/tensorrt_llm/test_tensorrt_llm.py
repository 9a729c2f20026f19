"""The tensorrt_llm handler over HTTP, on the fake of TensorRT-LLM: requests as clients send them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from model_directories import write_properties
from product_helpers import Server
from tensorrt_llm_helpers import fake_installed, fake_server, make_adapter, make_model, records
from waiting import wait_until

from lmi_server.configuration.resolve import inspect_model
from lmi_server.explain.explanation import explain

pytestmark = pytest.mark.slow

OPTIONS = {
    "engine": "MPI",
    "rolling_batch": "trtllm",
    "max_rolling_batch_size": "16",
    "max_input_len": "200",
    "max_seq_len": "100000",
    "max_beam_width": "4",
    "guided_decoding_backend": "xgrammar",
    "enable_lora": "true",
    "max_lora_rank": "16",
}


@dataclass(frozen=True)
class Served:
    server: Server
    adapters: Path
    record: Path

    def invoke(self, prompt: str, stream: bool = False, **parameters: Any) -> httpx.Response:
        body = {"inputs": prompt, "parameters": parameters, "stream": stream}
        return self.server.http.post("/invocations", json=body)

    def text(self, prompt: str, **parameters: Any) -> str:
        answer = self.invoke(prompt, **parameters)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["generated_text"])

    def complete(self, **body: Any) -> httpx.Response:
        return self.server.http.post("/v1/completions", json={"model": "model", **body})

    def sent(self) -> dict[str, Any]:
        """Return the last request that the engine got."""
        return records(self.record, "request")[-1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("served")
    weights = make_model(directory / "weights")
    model = write_properties(directory / "model", model_id=str(weights), **OPTIONS)
    make_adapter(model / "adapters" / "beside")
    with fake_server(model, directory / "record") as server:
        yield Served(server, directory, directory / "record")


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines() if line]


def test_the_engine_of_the_server_has_the_arguments_that_explain_shows(served: Served, tmp_path: Path) -> None:
    properties = write_properties(tmp_path, model_id=str(served.adapters / "weights"), **OPTIONS)
    (loaded,) = records(served.record, "llm")
    given = loaded["arguments"]
    given["build_config"]["plugin_config"] = loaded["plugins"]
    with fake_installed():
        shown = json.loads(json.dumps(explain(inspect_model(properties, {})).engine_arguments))
    assert holds(given, shown)


def holds(given: dict[str, Any], shown: dict[str, Any]) -> bool:
    """Return whether every value of `shown` is in `given`, which has defaults beside them."""
    return all(
        holds(given[name], value) if isinstance(value, dict) else given[name] == value for name, value in shown.items()
    )


# --- answers ---


def test_an_answer_is_the_same_whole_and_in_deltas(served: Served) -> None:
    """TensorRT-LLM's results have all the text so far; each piece of a stream has only what is new."""
    whole = served.invoke("the harbour", max_new_tokens=25, details=True).json()
    assert whole["generated_text"] == "the harbourthe harbourthe"
    assert (whole["details"]["finish_reason"], whole["details"]["generated_tokens"]) == ("length", 25)
    streamed = lines(served.invoke("the harbour", stream=True, max_new_tokens=25))
    assert "".join(line["token"]["text"] for line in streamed) == whole["generated_text"]
    assert streamed[-1]["generated_text"] == whole["generated_text"]
    assert len(streamed) > 5
    assert {line["token"]["log_prob"] for line in streamed} == {-0.25}


def test_an_answer_that_ends_by_itself(served: Served) -> None:
    answer = served.invoke("word<eos>", max_new_tokens=100, details=True).json()
    assert answer["generated_text"] == "word<eos>"
    assert answer["details"]["finish_reason"] == "eos_token"


def test_a_chat(served: Served) -> None:
    messages = [{"role": "user", "content": "hi<eos>"}]
    body = {"model": "model", "messages": messages, "temperature": 0}
    answer = served.server.http.post("/v1/chat/completions", json=body)
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"] == "user: hi<eos>\n"
    assert choice["finish_reason"] == "stop"
    streamed = served.server.http.post("/v1/chat/completions", json={**body, "stream": True}).text
    pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces) == "user: hi<eos>\n"


def test_no_piece_of_a_stop_sequence_leaves_the_server(served: Served) -> None:
    streamed = lines(served.invoke("hello world", stream=True, max_new_tokens=50, stop_sequences=["lo w", "zz"]))
    assert "".join(line["token"].get("text", "") for line in streamed) == "hel"
    assert streamed[-1]["generated_text"] == "hel"
    whole = served.invoke("hello world", max_new_tokens=50, stop_sequences=["lo w"], details=True).json()
    assert (whole["generated_text"], whole["details"]["finish_reason"]) == ("hel", "stop_sequence")
    assert served.text("hello world", max_new_tokens=50, stop=["lo w"], include_stop_str_in_output=True) == "hello w"
    by_token = served.complete(prompt="abc", max_tokens=9, stop_token_ids=[served_token(served, "c")], temperature=0)
    assert by_token.json()["choices"][0]["text"] == "ab"
    # What only looked like the beginning of one is not lost.
    assert served.text("hello", max_new_tokens=5, stop=["lox"]) == "hello"


def served_token(served: Served, letter: str) -> int:
    answer = served.server.http.post("/tokenize", json={"model": "model", "prompt": letter})
    return int(answer.json()["tokens"][0])


def test_tokens_and_texts(served: Served) -> None:
    tokens = served.server.http.post("/tokenize", json={"model": "model", "prompt": "abc"}).json()["tokens"]
    answer = served.server.http.post("/detokenize", json={"model": "model", "tokens": tokens})
    assert answer.json()["prompt"] == "abc"
    by_ids = served.complete(prompt=tokens, max_tokens=6, temperature=0).json()
    assert (by_ids["choices"][0]["text"], by_ids["usage"]["prompt_tokens"]) == ("abcabc", 3)


# --- parameters ---


def test_sampling_parameters_reach_the_engine(served: Served) -> None:
    served.text("abc", max_new_tokens=4)
    greedy = served.sent()["params"]
    assert (greedy["top_k"], greedy["temperature"], greedy["max_tokens"], greedy["seed"]) == (1, None, 4, None)
    served.text(
        "abc", do_sample=True, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=11, repetition_penalty=1.2,
        presence_penalty=0.3, frequency_penalty=0.4, min_tokens=2, bad_words=["zz"], ignore_eos=True, max_new_tokens=4,
        skip_special_tokens=False, spaces_between_special_tokens=False,
    )  # fmt: skip
    expected = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 11, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.4, "min_tokens": 2, "bad": ["zz"], "ignore_eos": True,
        "skip_special_tokens": False, "spaces_between_special_tokens": False,
    }  # fmt: skip
    got = served.sent()["params"]
    assert {name: got[name] for name in expected} == expected


def test_sampling_without_a_seed_differs_and_with_one_does_not(served: Served) -> None:
    """TensorRT-LLM's own default is the seed 0, with which all answers would be the same."""
    prompt = "abcdefghijklmnopqrstuvwxyz"
    free = {served.text(prompt, do_sample=True, max_new_tokens=40) for _ in range(3)}
    seeded = {served.text(prompt, do_sample=True, max_new_tokens=40, seed=5) for _ in range(2)}
    assert (len(free), len(seeded)) == (3, 1)
    choices = served.complete(prompt=prompt, n=3, max_tokens=40, seed=5, temperature=1.0).json()["choices"]
    assert len({choice["text"] for choice in choices}) == 3
    assert choices[0]["text"] in seeded


def test_beam_search(served: Served) -> None:
    assert served.text("abc", max_new_tokens=6, num_beams=3, length_penalty=2.0, early_stopping=True) == "abcabc"
    sent = served.sent()
    params = sent["params"]
    assert (params["use_beam_search"], params["best_of"], params["n"], sent["streaming"]) == (True, 3, 1, False)
    assert (params["length_penalty"], params["early_stopping"]) == (2.0, 1)


def test_guided_decoding(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = served.complete(prompt="x", max_tokens=30, response_format=form, temperature=0)
    assert json.loads(answer.json()["choices"][0]["text"]) == {"a": 1}
    assert "json=" in str(served.sent()["params"]["guided_decoding"])
    choice = served.complete(
        prompt="x", max_tokens=30, temperature=0, structured_outputs={"choice": ['say "no"', "yes"]}
    )
    assert choice.json()["choices"][0]["text"] == 'say "no"'
    regex = served.complete(prompt="x", max_tokens=30, temperature=0, structured_outputs={"regex": "[0-9]"})
    assert regex.json()["choices"][0]["text"] == "7"


def test_a_cache_salt_reaches_the_engine(served: Served) -> None:
    assert served.complete(prompt="abc", max_tokens=3, cache_salt="mine").status_code == 200
    assert served.sent()["cache_salt"] == "mine"


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"num_beams": 8}, "num_beams=8 is more than option.max_beam_width=4"),
        ({"top_n_tokens": 2, "details": True}, "set option.gather_generation_logits=true"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params is not supported by TensorRT-LLM"),
        ({"temperature": "hot"}, "temperature"),
        ({"decoder_input_details": True, "details": True}, "gather_context_logits"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(served: Served, parameters: dict[str, Any], text: str) -> None:
    answer = served.invoke("abc", **parameters)
    assert answer.status_code in (400, 422, 424), answer.text
    assert text in answer.text


def test_tools_are_refused_by_name(served: Served) -> None:
    """The LLM API returns the text of a call, and nothing here parses it for this handler."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"model": "model", "messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    answer = served.server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "tools is not supported by the handler that serves this model" in answer.text


def test_prompts_that_cannot_be_served(served: Served) -> None:
    too_many = served.complete(prompt="abc", max_tokens=200_000)
    assert too_many.status_code == 400
    assert "maximum context length is 100000 tokens" in too_many.text
    long = served.invoke("a" * 300, max_new_tokens=2)
    assert long.status_code in (400, 413, 424)
    assert "the prompt has 300 tokens, and the engine takes 200 (option.max_input_len)" in long.text
    assert served.server.http.post("/invocations", content=b"{").status_code in (400, 424)
    assert served.text("a" * 300, max_new_tokens=2, truncate=5) == "aa"


# --- concurrency, abort, failures ---


def test_requests_run_together_and_keep_their_own_text(served: Served) -> None:
    prompts = [f"prompt number {number} " for number in range(40)]
    with ThreadPoolExecutor(20) as pool:
        texts = list(pool.map(lambda prompt: served.text(prompt, max_new_tokens=2 * len(prompt)), prompts))
    assert texts == [2 * prompt for prompt in prompts]


def test_a_client_that_leaves_frees_its_place_within_a_step(served: Served) -> None:
    """The answer would take minutes. While it runs, /metrics has the statistics of the engine's KV cache."""
    before = len(records(served.record, "abort"))
    gauge = served.server.gauge
    body = {"inputs": "abc", "parameters": {"max_new_tokens": 99_000}, "stream": True}
    with served.server.http.stream("POST", "/invocations", json=body) as answer:
        lines_of_answer = answer.iter_lines()  # the stream ends with its iterator
        next(lines_of_answer)
        served.server.wait_for("lmi_handler_kv_cache_used_tokens", 64.0)
        assert gauge("lmi_handler_kv_cache_usage") == 0.001
        assert gauge("lmi_handler_kv_cache_hit_rate") == 0.25
        assert gauge("lmi_handler_running_requests") == 1.0
    wait_until(lambda: len(records(served.record, "abort")) > before, "the engine is told to abort")
    assert records(served.record, "abort")[-1]["tokens"] < 99_000
    served.server.wait_for("lmi_handler_running_requests", 0.0)
    served.server.wait_for("lmi_handler_kv_cache_used_tokens", 0.0)


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        ("<cancelled>", "TensorRT-LLM ended the request with finish reason cancelled"),
        ("<timeout>", "TensorRT-LLM ended the request with finish reason timeout"),
        ("<request error>", "TensorRT-LLM could not generate: no free sequence slot"),
    ],
)
def test_a_request_that_the_engine_gives_up_fails_alone(served: Served, mark: str, text: str) -> None:
    pid = served.server.worker_pid()
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(served.text, "beside", max_new_tokens=60)
        failed = served.invoke(f"a {mark}", max_new_tokens=30)
        assert beside.result() == "beside" * 10
    assert failed.status_code in (424, 500)
    assert text in failed.text
    assert served.server.worker_pid() == pid


# --- adapters ---


def test_adapters_are_added_replaced_and_removed(served: Served) -> None:
    http = served.server.http

    def said(name: str) -> str:
        body = {"inputs": "abc", "parameters": {"max_new_tokens": len(name) + 5}, "adapters": name}
        return str(http.post("/invocations", json=body).json()["generated_text"])

    assert said("beside") == "beside: abc"
    source = make_adapter(served.adapters / "french")
    assert http.post("/adapters", params={"name": "french", "src": str(source)}).status_code == 200
    loaded = served.sent()["lora"]
    assert (loaded["lora_name"], loaded["lora_path"]) == ("french", str(source))
    assert said("french") == "french: abc"
    again = make_adapter(served.adapters / "french2")
    assert http.post("/adapters/french/update", params={"src": str(again)}).status_code == 200
    assert said("french") == "french: abc"
    replaced = served.sent()["lora"]
    assert replaced["lora_path"] == str(again)
    assert replaced["lora_int_id"] > loaded["lora_int_id"]
    assert http.delete("/adapters/french").status_code == 200
    gone = http.post("/invocations", json={"inputs": "abc", "adapters": "french"})
    assert gone.status_code in (400, 404, 424)
    assert served.text("abc", max_new_tokens=3) == "abc"


def test_adapters_that_the_engine_cannot_use_are_refused(served: Served) -> None:
    http = served.server.http
    high = make_adapter(served.adapters / "high", rank=64)
    empty = served.adapters / "empty"
    empty.mkdir()
    for name, source, text in (
        ("high", high, "has rank 64, and the engine takes 16; set option.max_lora_rank=64"),
        ("empty", empty, "has no adapter_config.json"),
    ):
        answer = http.post("/adapters", params={"name": name, "src": str(source)})
        assert answer.status_code >= 400
        assert text in answer.text
        assert http.get(f"/adapters/{name}").status_code == 404
    pinned = http.post(
        "/adapters", params={"name": "pinned", "src": str(make_adapter(served.adapters / "p")), "pin": True}
    )
    assert "cannot pin" in pinned.text


# --- the end of the engine; the last tests, because they start workers again ---


def test_a_dead_executor_ends_its_worker_and_another_one_serves(served: Served) -> None:
    pid = served.server.worker_pid()
    answer = served.invoke("ab <executor dies>", stream=True, max_new_tokens=50)
    assert answer.status_code >= 400 or "error" in answer.text
    served.server.log_line("TensorRT-LLM's engine died .CppExecutorError: MPI rank 0 aborted.; this worker ends")
    wait_until(lambda: served.invoke("abc", max_new_tokens=3).status_code == 200, "another worker serves")
    assert served.server.worker_pid() != pid
    assert served.invoke("abc", max_new_tokens=3).json()["generated_text"] == "abc"
    body = {"inputs": "abc", "parameters": {"max_new_tokens": 11}, "adapters": "beside"}
    assert served.server.http.post("/invocations", json=body).json()["generated_text"] == "beside: abc"
