"""The product as its users meet it: `lmi-server serve` on a real model, asked by real clients over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from product_helpers import Server, serving

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def exact(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the demo model in float32, in which the rolling batch must match `generate` token for token.

    It has two threads on any machine: on one of two cores, servers of other tests have one.
    """
    options = {"dtype": "fp32", "max_rolling_batch_size": "8", "threads": "2"}
    with serving(tmp_path_factory.mktemp("exact"), demo_model_dir, **options) as server:
        yield server


def invoke(server: Server, inputs: Any, stream: bool = False, **parameters: Any) -> httpx.Response:
    return server.http.post("/invocations", json={"inputs": inputs, "parameters": parameters, "stream": stream})


def test_the_readmes_curl(exact: Server) -> None:
    reply = invoke(exact, "The capital of France is", max_new_tokens=16)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert " Paris" in reply.json()["generated_text"]
    # Importing them would take half of the worker's start, and this model needs none of them.
    mapped = Path(f"/proc/{exact.worker_pid()}/maps").read_text()
    assert [name for name in ("bitsandbytes", "pandas", "scipy/optimize", "sklearn") if f"/{name}/" in mapped] == []


def test_the_openai_sdk_chats_and_streams(exact: Server) -> None:
    import openai

    with openai.OpenAI(base_url=f"{exact.url}/v1", api_key="none") as client:
        listed = client.models.list().data[0]
        assert (listed.id, listed.model_extra["max_model_len"]) == (exact.model, 8192)
        assert client.responses.create(model=exact.model, input="Say hello.", max_output_tokens=8).output_text
        chat = {"model": exact.model, "messages": QUESTION, "temperature": 0, "max_tokens": 20}
        whole = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
        assert whole.choices[0].message.content == ANSWER
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
        assert whole.choices[0].logprobs.content[0].token == "The"
        assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
        chunks = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
        counts = [(usage.prompt_tokens, usage.completion_tokens) for usage in (chunks[-1].usage, whole.usage)]
        assert counts[0] == counts[1]  # the second chat found the first one's prompt in the KV cache
        cut = client.completions.create(
            model=exact.model, prompt="The capital of France is", max_tokens=3, temperature=0
        )
        assert (cut.choices[0].text[:6], cut.choices[0].finish_reason) == (" Paris", "length")
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**chat | {"model": "another"})
        with pytest.raises(openai.BadRequestError, match="8192"):
            client.chat.completions.create(**chat | {"max_tokens": 9000})


def test_the_anthropic_sdk_chats_and_streams(exact: Server) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=exact.url, api_key="none", max_retries=0) as client:
        greedy = {"temperature": 0}  # the SDK has no argument for it
        ask = {"model": exact.model, "messages": QUESTION, "max_tokens": 20, "extra_body": greedy}
        counted = client.messages.count_tokens(model=exact.model, messages=QUESTION).input_tokens
        raw = client.messages.with_raw_response.create(**ask)
        whole = raw.parse()
        assert (whole.content[0].text, whole.stop_reason) == (ANSWER, "end_turn")
        assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == counted
        assert raw.headers["request-id"] == raw.headers["x-request-id"] == whole._request_id
        with client.messages.stream(**ask) as stream:
            assert "".join(stream.text_stream) == ANSWER
            assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
        stopped = client.messages.create(**ask, stop_sequences=[" is"])
        assert (stopped.content[0].text, stopped.stop_sequence) == ("The capital of France", " is")
        begun = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
        assert client.messages.create(**ask | {"messages": begun}).content[0].text.startswith(" Paris")
        cut = client.messages.create(**ask | {"max_tokens": 2}, system=[{"type": "text", "text": "You help."}])
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
        for stream in (False, True):
            with pytest.raises(
                anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8192 maximum"
            ) as long:
                client.messages.create(
                    **ask | {"messages": [{"role": "user", "content": "word " * 9000}]}, stream=stream
                )
            assert long.value.type == "invalid_request_error"
            assert long.value.body["request_id"] == long.value.request_id
        with pytest.raises(anthropic.BadRequestError, match=r"exceed context limit: 37 \+ 9000 > 8192"):
            client.messages.create(**ask | {"max_tokens": 9000})
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(**ask | {"model": "another"})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.count_tokens(model="another", messages=QUESTION)
        with pytest.raises(anthropic.BadRequestError, match="the model's chat template takes no tools"):
            client.messages.create(**ask, tools=[{"name": "clock", "input_schema": {"type": "object"}}])
    refused = exact.http.get("/v1/messages")
    assert (refused.status_code, refused.json()["type"]) == (405, "error")


def test_a_client_of_anthropics_api_that_leaves_frees_its_place(exact: Server) -> None:
    body = {"messages": QUESTION, "max_tokens": 4000, "system": "Count without end.", "stream": True}
    with exact.http.stream("POST", "/v1/messages", json=body) as reply:
        assert next(reply.iter_lines()) == "event: message_start"
    exact.wait_for("lmi_requests_in_flight", 0)
    exact.wait_for("lmi_handler_running_requests", 0)


def test_tokens_and_their_text(exact: Server) -> None:
    tokenized = exact.http.post("/tokenize", json={"prompt": "The capital of France"}).json()
    assert tokenized == {"count": len(tokenized["tokens"]), "max_model_len": 8192, "tokens": tokenized["tokens"]}
    text = exact.http.post("/detokenize", json={"tokens": tokenized["tokens"]}).json()
    assert text == {"prompt": "The capital of France"}
    chat = exact.http.post("/tokenize", json={"messages": QUESTION}).json()
    asked = exact.http.post("/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 1}).json()
    assert chat["count"] == asked["usage"]["prompt_tokens"]
    refused = exact.http.post("/detokenize", json={"tokens": [10**6]})
    assert (refused.status_code, "1000000" in refused.json()["error"]["message"]) == (400, True)


def test_several_choices_and_token_ids(exact: Server) -> None:
    body = {"prompt": "Once upon a time", "n": 3, "seed": 7, "max_tokens": 8, "return_token_ids": True}
    answers = [exact.http.post("/v1/completions", json=body).json() for _ in range(2)]
    texts = [choice["text"] for choice in answers[0]["choices"]]
    assert len(set(texts)) == 3
    assert [choice["text"] for choice in answers[1]["choices"]] == texts
    assert answers[0]["usage"]["prompt_tokens"] == len(answers[0]["choices"][0]["prompt_token_ids"])
    best = exact.http.post("/v1/completions", json={**body, "n": 1, "best_of": 3}).json()
    assert best["choices"][0]["text"] in texts


def test_what_the_rolling_batch_cannot_do_is_refused_by_name(exact: Server) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for body, reason in (
        ({"repetition_detection": {"a": 1}}, "repetition_detection"),
        ({"tools": tools}, "chat template takes no tools"),
    ):
        reply = exact.http.post("/v1/chat/completions", json={"messages": QUESTION, "stream": True, **body})
        assert (reply.status_code, reason in reply.json()["error"]["message"]) == (400, True)
    unused = exact.http.post(
        "/v1/chat/completions", json={"messages": QUESTION, "tools": tools, "tool_choice": "none", "max_tokens": 1}
    )
    assert unused.status_code == 200


def test_sampling_repeats_with_a_seed(exact: Server) -> None:
    sampled = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.2, "top_p": 0.9}
    texts = [invoke(exact, "Once upon a time", **sampled, seed=seed).json()["generated_text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


async def answered(server: Server, jobs: list[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens that answer each of the jobs, which start one after the other and overlap."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

        async def one(job: dict[str, Any], pause: float) -> list[int]:
            await asyncio.sleep(pause)
            reply = await client.post("/invocations", json=job)
            return [token["id"] for token in reply.json()["details"]["tokens"]]

        return await asyncio.gather(*(one(job, index * 0.03) for index, job in enumerate(jobs)))


def test_mixed_requests_get_what_generate_gives_each_alone(exact: Server, demo_model_dir: Path) -> None:
    """More requests than places, staggered, of mixed lengths; one of them is longer than several prefill chunks."""
    import torch
    from rolling_batch_helpers import is_generated
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)
    chance = random.Random(2)
    words = ["river", "stone", "bread", "engine", "music", "winter", "letter", "garden", "number", "whale", "silver"]
    jobs = []
    for length in [1, 3, 8, 20, 60, 700, 5, 12, 150, 2, 30, 9]:
        prompt = "Tell me about " + " ".join(chance.choice(words) for _ in range(length))
        jobs.append({"inputs": prompt, "parameters": {"max_new_tokens": chance.choice([1, 5, 12]), "details": True}})
    for job, tokens in zip(jobs, asyncio.run(answered(exact, jobs)), strict=True):
        prompt, count = tokenizer(job["inputs"])["input_ids"], job["parameters"]["max_new_tokens"]
        end = model.generation_config.eos_token_id
        assert is_generated(model, prompt, tokens, count, end, logits_to_keep=len(tokens))


BAD_REQUESTS = {
    b"{": "JSON",
    b'{"inputs": ""}': "inputs",
    b'{"inputs": 5}': "inputs",
    b'{"parameters": {}}': "inputs",
    b'{"inputs": "a", "parameters": {"max_new_tokens": 0}}': "max_new_tokens",
    b'{"inputs": "%s"}' % (b"a " * 9000): "8192",
    b'{"inputs": "a", "parameters": {"temperature": "hot"}}': "temperature",
}


def test_bad_requests_are_named_and_disturb_nobody(exact: Server) -> None:
    headers = {"content-type": "application/json"}
    with exact.http.stream("POST", "/invocations", json={"inputs": "a", "stream": True}) as good:
        replies = [exact.http.post("/invocations", content=body, headers=headers) for body in BAD_REQUESTS]
        lines = [json.loads(line) for line in good.iter_lines()]
    answers = [(reply.status_code, reply.json()["code"], reply.json()["message"]) for reply in replies]
    asked = zip(BAD_REQUESTS.values(), answers, strict=True)
    assert [pair for pair in asked if pair[1][:2] != (424, 424) or pair[0] not in pair[1][2]] == []
    assert lines[-1]["generated_text"]


def test_a_prompt_longer_than_the_context_is_refused_by_its_numbers(exact: Server) -> None:
    reply = invoke(exact, "word " * 9000)
    assert reply.status_code == 424
    assert "8192" in reply.json()["message"]


def test_an_unknown_parameter_is_served_and_logged(exact: Server) -> None:
    seen = len(exact.lines)
    for unknown in ({"max_new_token": 3}, {"top_pp": 0.5}):
        assert invoke(exact, "Hello", max_new_tokens=3, **unknown).status_code == 200
    exact.log_line("WARNING.*top_pp")
    warnings = [line for line in exact.lines[seen:] if "WARNING" in line and "max_new_token" in line]
    assert len(warnings) == 1
    assert "max_new_tokens" in warnings[0], "the nearest known parameter is named"


def test_a_client_that_leaves_frees_its_place(exact: Server) -> None:
    parameters = {"max_new_tokens": 4000, "ignore_eos": True}
    with exact.http.stream(
        "POST", "/invocations", json={"inputs": "Count:", "parameters": parameters, "stream": True}
    ) as reply:
        next(reply.iter_lines())
    exact.wait_for("lmi_requests_in_flight", 0)
    exact.wait_for("lmi_handler_running_requests", 0)


def test_a_killed_worker_is_replaced_and_its_unanswered_request_retried(exact: Server) -> None:
    long = {"max_new_tokens": 150, "ignore_eos": True}
    killed = exact.worker_pid()
    with httpx.stream(
        "POST", f"{exact.url}/invocations", json={"inputs": "a", "parameters": long, "stream": True}, timeout=120
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(killed, signal.SIGKILL)
        rest = list(lines)
    assert json.loads(rest[-1])["code"] == 503
    reply = invoke(exact, "The capital of France is", max_new_tokens=8)
    assert (reply.status_code, " Paris" in reply.json()["generated_text"]) == (200, True)
    assert exact.worker_pid() != killed
