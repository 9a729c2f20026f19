from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from dialect_helpers import DELTAS, SERVED, TEXT, answer, generations, outcome, request, serving
from hypothesis import given
from hypothesis import strategies as st

from lmi_server.contract.errors import HandlerError, ModelNotFoundError, RequestError
from lmi_server.contract.generation import Delta, SamplingParameters, Token, TopToken, Usage
from lmi_server.dialects import Exchange, ServedModel, parse
from lmi_server.dialects.openai import CHAT_FIELDS, COMPLETION_FIELDS

if TYPE_CHECKING:
    from openai import OpenAI

MESSAGES = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hello"}]


def chat(route: str = "chat/completions", served: ServedModel = SERVED, **body: Any) -> Exchange:
    return parse(request(route, {"model": "tiny", "messages": MESSAGES} | body), served)


def complete(route: str = "completions", served: ServedModel = SERVED, **body: Any) -> Exchange:
    return parse(request(route, {"model": "tiny", "prompt": "Hello"} | body), served)


def chunks(data: bytes) -> list[Any]:
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@contextmanager
def client_of(deltas: Any, served: ServedModel = SERVED, breaks: bool = False) -> Iterator[OpenAI]:
    from openai import OpenAI

    with (
        serving(served, deltas, breaks) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


# --- requests ---


@pytest.mark.parametrize("name", ["tiny", "lmi", "tgi", "dummy", "http://127.0.0.1:8080/v1"])
def test_names_that_mean_the_only_model(name: str) -> None:
    assert chat(model=name).requests[0].messages == MESSAGES


def test_a_model_that_is_not_served() -> None:
    with pytest.raises(ModelNotFoundError, match='"other" does not exist; served here: tiny'):
        chat(model="other")


def test_chat_defaults() -> None:
    generation = chat().requests[0]
    assert generation.prompt is None
    assert generation.messages == MESSAGES
    assert generation.sampling == SamplingParameters(max_new_tokens=None, do_sample=True, temperature=1.0)


def test_completion_defaults() -> None:
    generation = complete().requests[0]
    assert (generation.prompt, generation.messages) == ("Hello", None)
    assert generation.sampling == SamplingParameters(max_new_tokens=16, do_sample=True, temperature=1.0)


def test_chat_parameters() -> None:
    exchange = chat(
        max_tokens=5,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        n=1,
        stop=["a", "b", "c", "d", "e"],
        seed=3,
        logprobs=True,
        top_logprobs=2,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"50": -100, "51": 3.5},
        ignore_eos=True,
        stop_token_ids=[9],
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        truncate_prompt_tokens=128,
        user="me",
        metadata={"a": "b"},
        store=True,
        response_format={"type": "text"},
        tools=None,
        functions=[],
        tool_choice="none",
    )
    assert exchange.warnings == ()
    assert exchange.requests[0].sampling == SamplingParameters(
        max_new_tokens=7,
        do_sample=True,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        stop=("a", "b", "c", "d", "e"),
        seed=3,
        logprobs=2,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.2,
        logit_bias={50: -100.0, 51: 3.5},
        ignore_eos=True,
        stop_token_ids=(9,),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        truncate=128,
    )


def test_null_is_the_same_as_absent() -> None:
    nothing = dict.fromkeys(("max_tokens", "temperature", "stop", "seed", "logprobs", "stream", "stream_options", "n"))
    assert chat(**nothing).requests[0].sampling == chat().requests[0].sampling
    assert complete(**nothing, echo=None, suffix=None).requests[0].sampling == complete().requests[0].sampling


def test_temperature_zero_is_greedy() -> None:
    assert chat(temperature=0).requests[0].sampling.greedy
    assert not chat(temperature=0.01).requests[0].sampling.greedy


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hello", ["Hello"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
def test_prompts(prompt: Any, prompts: list[Any]) -> None:
    exchange = complete(prompt=prompt, add_special_tokens=False)
    assert [generation.prompt for generation in exchange.requests] == prompts
    assert len({generation.request_id for generation in exchange.requests}) == len(prompts)
    assert not exchange.requests[0].add_special_tokens


@pytest.mark.parametrize(
    "prompt", [None, "", [], [""], [[]], ["a", 1], [1, "a"], [[1], "a"], [1.5], [-1], [True], 3, {}]
)
def test_bad_prompts(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        complete(prompt=prompt)


def test_too_many_prompts() -> None:
    with pytest.raises(RequestError, match="2048"):
        complete(prompt=["a"] * 2049)


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "Look:"}, {"type": "text", "text": "here"}]
    assistant = {"role": "assistant", "content": None, "tool_calls": []}
    messages = chat(messages=[{"role": "user", "content": parts, "name": "me"}, assistant]).requests[0].messages
    assert messages == [
        {"role": "user", "content": "Look:\nhere", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (None, "messages is missing"),
        ([], "messages: a list of 0"),
        ("Hello", 'messages: "Hello"'),
        (["Hello"], 'messages[0]: "Hello"'),
        ([{"content": "a"}], "messages[0].role: null"),
        ([{"role": "robot", "content": "a"}], 'messages[0].role: "robot"'),
        ([{"role": ["user"], "content": "a"}], "messages[0].role: a list of 1"),
        ([{"role": "user"}], "messages[0].content: null"),
        ([{"role": "user", "content": 3}], "messages[0].content: 3"),
        ([{"role": "user", "content": ["a"]}], 'messages[0].content[0]: "a"'),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            'messages[0].content[0].type: "image_url"',
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text: null"),
    ],
)
def test_bad_messages(messages: Any, expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(messages=messages)
    assert expected in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("best_of", 0),
        ("min_tokens", 3),
        ("bad_words", ["a"]),
        ("allowed_token_ids", [1]),
        ("vllm_xargs", {"a": 1}),
        ("max_tokens", 0),
        ("temperature", -1),
        ("top_p", 0),
        ("presence_penalty", 3),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("stop", ""),
        ("stream", 2),
        ("stream_options", {"include_usage": True}),
        ("stream_options", True),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {"type": "object"}),
        ("adapters", 3),
        ("model", 3),
    ],
)
@pytest.mark.parametrize("make", [chat, complete])
def test_bad_fields_are_refused_by_name(make: Any, name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        make(**{name: value})
    assert caught.value.message.startswith(name)
    assert "; " in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("functions", [{"name": "f"}]),
        ("tool_choice", "required"),
        ("best_of", 2),
        ("chat_template_kwargs", {"tokenize": False}),
        ("function_call", {"name": "f"}),
        ("logprobs", 3),
        ("top_logprobs", 2),
        ("modalities", ["audio"]),
        ("chat_template", "{{ messages }}"),
        ("thinking_token_budget", 5),
    ],
)
def test_what_chat_does_not_serve_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**{name: value})
    assert caught.value.message.startswith(name)


@pytest.mark.parametrize(("name", "value"), [("suffix", "end"), ("logprobs", True), ("logprobs", 21), ("echo", "ja")])
def test_what_completions_do_not_serve_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        complete(**{name: value})
    assert caught.value.message.startswith(name)


def test_unknown_fields_are_warned_of() -> None:
    assert chat(max_token=3).warnings == ("max_token is not known and is ignored; did you mean max_tokens?",)


def test_the_model_must_be_served_on_openai_routes() -> None:
    for name in ("model", "tiny", None):
        assert chat(model=name).warnings == ()
    for make in (chat, complete):
        with pytest.raises(ModelNotFoundError, match=r"other.*tiny, model"):
            make(model="other")


def test_another_model_is_only_a_warning_on_invocations() -> None:
    for exchange in (chat("invocations", model="other"), complete("predictions", model="other")):
        assert '"other"' in exchange.warnings[0]
        assert json.loads(answer(exchange, DELTAS))["model"] == "tiny"


def test_invocations_choose_the_dialect_by_keys() -> None:
    body = {"messages": None, "inputs": None, "prompt": "Hello"}
    assert json.loads(answer(parse(request("invocations", body), SERVED), DELTAS))["object"] == "text_completion"
    body = {"messages": MESSAGES, "inputs": "Hello"}
    assert json.loads(answer(parse(request("invocations", body), SERVED), DELTAS))["object"] == "chat.completion"


# --- answers ---


def strict(name: str, data: Any) -> Any:
    """Return `data` as the SDK's type `openai.types.<name>`, every field known to it and of exactly its type."""
    import openai.types.chat

    value = attrgetter(name)(openai.types).model_validate_json(
        data if isinstance(data, bytes) else json.dumps(data), strict=True
    )
    assert not value.model_extra
    assert all(set(choice.model_extra) <= {"stop_reason"} for choice in value.choices), "vLLM has it too"
    return value


def test_chat_completion() -> None:
    completion = strict("chat.ChatCompletion", answer(chat(), DELTAS))
    assert completion.id.startswith("chatcmpl-")
    assert (completion.object, completion.model) == ("chat.completion", "tiny")
    choice = completion.choices[0]
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", TEXT)
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 4, 6)
    assert usage.prompt_tokens_details.cached_tokens == 1


@pytest.mark.parametrize(
    ("reason", "expected"), [("length", "length"), ("eos_token", "stop"), ("stop_sequence", "stop")]
)
def test_finish_reasons(reason: Any, expected: str) -> None:
    deltas = [Delta("a", (Token(1, "a"),), reason, Usage(1, 1))]
    assert strict("chat.ChatCompletion", answer(chat(), deltas)).choices[0].finish_reason == expected
    assert strict("Completion", answer(complete(), deltas)).choices[0].finish_reason == expected
    assert chunks(answer(chat(stream=True), deltas))[-1]["choices"][0]["finish_reason"] == expected
    assert chunks(answer(complete(stream=True), deltas))[-1]["choices"][0]["finish_reason"] == expected


def test_chat_logprobs() -> None:
    completion = strict("chat.ChatCompletion", answer(chat(logprobs=True, top_logprobs=1), DELTAS))
    content = completion.choices[0].logprobs.content
    assert [token.token for token in content] == [" Par", "\ufffd", "ís\u2028", "</s>"]
    assert [token.logprob for token in content] == [-0.5, -0.25, 0.0, -0.125]
    assert content[2].bytes == list("ís\u2028".encode())
    assert [top.token for top in content[0].top_logprobs] == [" Par"]
    assert [top.token for top in content[3].top_logprobs] == ["</s>"]


def test_the_chosen_token_of_a_completion_has_one_text_among_the_alternatives() -> None:
    """The text that it adds to the answer: of two tokens of bytes the second one has the text of both."""
    token = Token(7, "\ufffda", -0.5, top=(TopToken(8, "b", -0.25), TopToken(7, "a", -0.5)))
    deltas = [Delta("\ufffda", (token,), "length", Usage(1, 1))]
    logprobs = strict("Completion", answer(complete(logprobs=2), deltas)).choices[0].logprobs
    assert logprobs.tokens == ["\ufffda"]
    assert logprobs.top_logprobs == [{"b": -0.25, "\ufffda": -0.5}]


def test_logprobs_without_a_finite_number() -> None:
    deltas = [Delta("ab", (Token(1, "a", float("-inf")), Token(2, "b", float("nan"))), "length", Usage(1, 2))]
    content = strict("chat.ChatCompletion", answer(chat(logprobs=True), deltas)).choices[0].logprobs.content
    assert [token.logprob for token in content] == [-9999.0, -9999.0]
    logprobs = strict("Completion", answer(complete(logprobs=0), deltas)).choices[0].logprobs
    assert logprobs.token_logprobs == [-9999.0, -9999.0]


def test_chat_stream() -> None:
    sent = chunks(answer(chat(stream=True), DELTAS))
    for chunk in sent:
        strict("chat.ChatCompletionChunk", chunk)
        assert "usage" not in chunk
    assert [chunk["choices"][0]["delta"] for chunk in sent] == [
        {"role": "assistant", "content": ""},
        {"content": " Par"},
        {"content": "ís\u2028"},
        {"content": ""},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in sent] == [None, None, None, "stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in sent}) == 1


def test_chat_stream_with_usage() -> None:
    sent = chunks(answer(chat(stream=True, stream_options={"include_usage": True}), DELTAS))
    assert all(chunk["usage"] is None for chunk in sent[:-1])
    assert sent[-1]["choices"] == []
    assert sent[-1]["usage"]["total_tokens"] == 6


def test_chat_stream_with_logprobs_has_every_token_once() -> None:
    sent = chunks(answer(chat(stream=True, logprobs=True, top_logprobs=2), DELTAS))
    tokens = [token for chunk in sent for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    whole = json.loads(answer(chat(logprobs=True, top_logprobs=2), DELTAS))
    assert tokens == whole["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize("name", ['say ""', "ü\u2028", '","text":""'])
def test_names_that_look_like_json(name: str) -> None:
    served = ServedModel(name=name)
    for make in (chat, complete):
        sent = chunks(answer(make(served=served, model=name, stream=True), DELTAS))
        assert {chunk["model"] for chunk in sent} == {name}


def test_completion() -> None:
    completion = strict("Completion", answer(complete(prompt=["a", "b"]), DELTAS, DELTAS))
    assert completion.id.startswith("cmpl-")
    assert [(choice.index, choice.text, choice.finish_reason) for choice in completion.choices] == [
        (0, TEXT, "stop"),
        (1, TEXT, "stop"),
    ]
    assert completion.usage.total_tokens == 12


def test_completion_logprobs() -> None:
    logprobs = strict("Completion", answer(complete(logprobs=2), DELTAS)).choices[0].logprobs
    assert logprobs.tokens == [" Par", "\ufffd", "ís\u2028", "</s>"]
    assert logprobs.token_logprobs == [-0.5, -0.25, 0.0, -0.125]
    assert logprobs.top_logprobs[0] == {" Par": -0.5, " Lon": -1.25}
    assert logprobs.top_logprobs[3] == {"</s>": -0.125}
    assert logprobs.text_offset == [0, 4, 5, 8]


def test_echo() -> None:
    exchange = complete(echo=True, logprobs=0)
    assert exchange.requests[0].sampling.prompt_logprobs == 0
    choice = json.loads(answer(exchange, DELTAS))["choices"][0]
    assert choice["text"] == "Hello" + TEXT
    assert choice["logprobs"]["tokens"][:3] == ["Hel", "lo", " Par"]
    assert choice["logprobs"]["token_logprobs"][:3] == [None, -1.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"lo": -1.5}]
    assert choice["logprobs"]["text_offset"][:4] == [0, 3, 5, 9]
    assert json.loads(answer(complete(echo=True, prompt=[1, 2]), DELTAS))["choices"][0]["text"] == "Hello" + TEXT


@given(generations(), generations(), st.booleans(), st.sampled_from([None, 0, 2]))
def test_a_completion_stream_says_the_same_as_a_whole_answer(
    one: list[Delta], two: list[Delta], echo: bool, logprobs: int | None
) -> None:
    body = {"prompt": ["a", "b"], "echo": echo, "logprobs": logprobs}
    whole = json.loads(answer(complete(**body), one, two))
    sent = chunks(answer(complete(**body, stream=True, stream_options={"include_usage": True}), one, two))
    assert sent[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in sent[:-1] if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        assert [chunk["finish_reason"] for chunk in own if chunk["finish_reason"]] == [choice["finish_reason"]]
        for key, values in (choice["logprobs"] or {}).items():
            assert [value for chunk in own for value in chunk["logprobs"][key]] == values


@given(generations(), st.booleans())
def test_a_chat_stream_says_the_same_as_a_whole_answer(deltas: list[Delta], logprobs: bool) -> None:
    whole = strict("chat.ChatCompletion", answer(chat(logprobs=logprobs), deltas))
    sent = [
        strict("chat.ChatCompletionChunk", chunk)
        for chunk in chunks(answer(chat(stream=True, logprobs=logprobs), deltas))
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in sent) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in sent][-1] == whole.choices[0].finish_reason


@pytest.mark.parametrize(
    ("formatter", "stream", "content_type"),
    [
        (None, False, "application/json"),
        (None, True, "application/jsonlines"),
        ("json", True, "application/jsonlines"),
        ("json_chat", True, "application/json"),
        ("jsonlines_chat", False, "application/jsonlines"),
        ("sse_chat", False, "text/event-stream"),
        ("unheard", True, "application/jsonlines"),
    ],
)
def test_formatters_of_chat_on_invocations(formatter: str | None, stream: bool, content_type: str) -> None:
    served = ServedModel(name="tiny", output_formatter=formatter)
    exchange = chat("invocations", served, stream=stream)
    assert (exchange.content_type, exchange.stream) == (content_type, content_type != "application/json")
    assert bool(exchange.warnings) == (formatter == "unheard")
    on_v1 = chat("chat/completions", served, stream=stream)
    assert on_v1.content_type == ("text/event-stream" if stream else "application/json")


@pytest.mark.parametrize("body", [{"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": "Hi"}], ids=str)
def test_streams_on_invocations_are_json_lines_unless_the_request_asks_for_events(body: dict[str, Any]) -> None:
    def asked(served: ServedModel, **headers: str) -> Exchange:
        return parse(request("invocations", {**body, "stream": True}, **headers), served)

    lines = asked(ServedModel(name="tiny"))
    assert (lines.content_type, b"[DONE]" in answer(lines, DELTAS)) == ("application/jsonlines", False)
    asking = asked(ServedModel(name="tiny"), accept="text/event-stream")
    for events in (asking, asked(ServedModel(name="tiny", tgi_compat=True))):
        assert events.content_type == "text/event-stream"
        assert answer(events, DELTAS).endswith(b"data: [DONE]\n\n")


def test_jsonlines_chat_is_chunks_without_frames() -> None:
    exchange = chat("invocations", ServedModel(name="tiny", output_formatter="jsonlines_chat"))
    sent = [json.loads(line) for line in answer(exchange, DELTAS).decode().splitlines()]
    assert [chunk["object"] for chunk in sent] == ["chat.completion.chunk"] * 4
    assert sent[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stream_that_fails_does_not_look_complete() -> None:
    exchange = complete(stream=True)
    data = exchange.error_chunk(HandlerError("the engine broke"))
    assert json.loads(data.removeprefix(b"data: "))["error"]["message"] == "the engine broke"
    assert b"[DONE]" not in data


# --- the SDK ---


def test_the_sdk_reads_whole_answers() -> None:
    with client_of(DELTAS) as client:
        completion = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])
        text = client.completions.create(model="tiny", prompt=["Hello", "there"])
    assert completion.choices[0].message.content == TEXT
    assert [choice.text for choice in text.choices] == [TEXT, TEXT]


def test_the_sdk_reads_streams() -> None:
    with client_of(DELTAS) as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        sent = list(stream)
        text = list(client.completions.create(model="tiny", prompt="Hello", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in sent[:-1]) == TEXT
    assert sent[-1].usage is not None
    assert sent[-1].usage.total_tokens == 6
    assert "".join(chunk.choices[0].text for chunk in text) == TEXT


def test_the_sdk_raises_if_a_stream_breaks() -> None:
    import openai

    with client_of(DELTAS, breaks=True) as client:
        stream = client.completions.create(model="tiny", prompt="Hello", stream=True)
        with pytest.raises(openai.APIError, match="the engine broke") as caught:
            list(stream)
    assert caught.value.type == "server_error"


def test_the_sdk_raises_its_own_errors() -> None:
    import openai

    with client_of(DELTAS) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="other", prompt="Hello")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="tiny", prompt="Hello", temperature=-1)
    assert missing.value.code == "model_not_found"


# --- anything at all ---

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        | st.fixed_dictionaries({}, optional={"role": inner, "content": inner, "type": inner, "text": inner})
    ),
    max_leaves=8,
)
FIELDS = st.dictionaries(st.sampled_from(sorted({*COMPLETION_FIELDS, *CHAT_FIELDS})), JSON, max_size=3)
BODIES = st.tuples(st.sampled_from([{"prompt": "Hello"}, {"messages": MESSAGES}, {}]), FIELDS)


@given(
    st.sampled_from(["completions", "chat/completions", "invocations"]), JSON | BODIES.map(lambda two: two[0] | two[1])
)
def test_any_json_is_answered_or_refused(route: str, body: Any) -> None:
    assert outcome(request(route, body))


@pytest.mark.parametrize("body", [{"prompt": ["a", "b"]}, {"messages": [{"role": "user", "content": "a"}], "n": 2}])
def test_a_whole_answer_says_where_its_kv_cache_is(body: dict[str, Any]) -> None:
    route = "completions" if "prompt" in body else "chat/completions"
    last = msgspec.structs.replace(DELTAS[-1], transfer_params={"kv_transfer_params": {"remote_port": 1}})
    other = msgspec.structs.replace(DELTAS[-1], transfer_params={"kv_transfer_params": {"remote_port": 2}})
    exchange = parse(request(route, {"model": "tiny", **body}), SERVED)
    found = json.loads(answer(exchange, [*DELTAS[:-1], last], [*DELTAS[:-1], other]))
    assert found["kv_transfer_params"] == {"remote_port": 1}
    assert "ec_transfer_params" not in found
    without = parse(request(route, {"model": "tiny", **body}), SERVED)
    assert "kv_transfer_params" not in json.loads(answer(without, DELTAS, DELTAS))
