"""What of OpenAI's and vLLM's requests only some handlers do: parsed for those that do, refused by name for others."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from dialect_helpers import SERVED, answer, request

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import ChatOptions, Delta, NamedTool, StructuredOutputs, Token, ToolCallDelta, Usage
from lmi_server.dialects import Exchange, ServedModel, parse

CAPABLE = ServedModel(
    name="model",
    served_names=("tiny",),
    features=frozenset(
        {
            "structured_outputs",
            "tools",
            "media",
            "reasoning",
            "min_tokens",
            "bad_words",
            "allowed_token_ids",
            "engine_extras",
        }
    ),
    sampling_defaults={"temperature": 0.6, "top_k": 20},
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def chat(served: ServedModel = CAPABLE, **body: Any) -> Exchange:
    messages = [{"role": "user", "content": "Hello"}]
    return parse(request("chat/completions", {"messages": messages} | body), served)


def complete(served: ServedModel = CAPABLE, **body: Any) -> Exchange:
    return parse(request("completions", {"prompt": "Hello"} | body), served)


def chunks(data: bytes) -> list[Any]:
    parts = data.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def says(*texts: str) -> list[Delta]:
    """Return the deltas of a sequence with one token per text."""
    deltas = [Delta(text, (Token(index, text, -0.5),)) for index, text in enumerate(texts)]
    last = Delta("", (), "eos_token", Usage(3, len(texts), 1))
    return [
        Delta(deltas[0].text, deltas[0].tokens, prompt_text="Hello", prompt_token_ids=(7, 8, 9)),
        *deltas[1:],
        last,
    ]


# --- constraints ---


@pytest.mark.parametrize(
    ("body", "constraint"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(kind="json_object", value=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            StructuredOutputs(kind="json", value=SCHEMA),
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text", "json_schema": None, "strict": True}}, None),
        *(
            ({"response_format": {"type": kind, name: schema}}, StructuredOutputs(kind="json", value=SCHEMA))
            for kind in ("json_object", "json_schema")
            for name, schema in (("schema", SCHEMA), ("value", SCHEMA), ("json_schema", {"schema": SCHEMA}))
        ),
        ({"response_format": {"type": "json_object", "schema": {}}}, StructuredOutputs(kind="json_object", value=True)),
        ({"response_format": {"type": "json", "value": SCHEMA}}, StructuredOutputs(kind="json", value=SCHEMA)),
        ({"response_format": {"type": "regex", "value": "a+"}}, StructuredOutputs(kind="regex", value="a+")),
        ({"guided_json": SCHEMA}, StructuredOutputs(kind="json", value=SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, StructuredOutputs(kind="json", value=json.dumps(SCHEMA))),
        ({"guided_regex": "[a-z]+"}, StructuredOutputs(kind="regex", value="[a-z]+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputs(kind="choice", value=["a", "b"])),
        ({"guided_grammar": 'root ::= "a"'}, StructuredOutputs(kind="grammar", value='root ::= "a"')),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?", "response_format": {"type": "text"}},
            StructuredOutputs(kind="json", value=SCHEMA, whitespace_pattern=" ?"),
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True, "json": None}},
            StructuredOutputs(kind="regex", value="a", disable_any_whitespace=True),
        ),
    ],
)
@pytest.mark.parametrize("make", [chat, complete])
def test_constraints_on_the_output(make: Any, body: dict[str, Any], constraint: StructuredOutputs | None) -> None:
    assert make(**body).requests[0].sampling.structured_outputs == constraint


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "json_schema.schema"),
        (
            {"response_format": {"type": "text", "schema": SCHEMA}},
            "response_format.schema has no meaning with type text",
        ),
        ({"response_format": {"type": "json_object", "pattern": "a"}}, "response_format.pattern has no meaning"),
        ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_object", "value": {}, "schema": {}}},
            "schema and value exclude each other",
        ),
        ({"guided_json": "{"}, "guided_json is not valid JSON"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format and guided_regex exclude"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "regex and choice exclude"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ],
)
def test_bad_constraints_are_refused_by_name(body: dict[str, Any], expected: str) -> None:
    for make in (chat, complete):
        with pytest.raises(RequestError) as caught:
            make(**body)
        assert expected in caught.value.message


# --- sampling ---


def test_parameters_of_capable_engines() -> None:
    sampling = (
        complete(min_tokens=2, bad_words=["x"], allowed_token_ids=[1, 2], vllm_xargs={"a": 1}, prompt_logprobs=3)
        .requests[0]
        .sampling
    )
    assert (sampling.min_tokens, sampling.bad_words, sampling.allowed_token_ids) == (2, ("x",), (1, 2))
    assert (sampling.extra, sampling.prompt_logprobs) == ({"vllm_xargs": {"a": 1}}, 3)


@pytest.mark.parametrize(
    ("asked", "expected", "fits"),
    [({}, 64, True), ({"max_tokens": 10}, 10, False), ({"max_tokens": 1000}, 64, False)],
)
def test_the_models_own_files_limit_the_length_of_an_answer(asked: dict[str, int], expected: int, fits: bool) -> None:
    limited = msgspec.structs.replace(CAPABLE, sampling_defaults={"temperature": 0.6, "max_new_tokens": 64})
    sampling = chat(limited, **asked).requests[0].sampling
    assert (sampling.max_new_tokens, sampling.fit_context, sampling.temperature) == (expected, fits, 0.6)


def test_the_models_own_defaults_stand_below_the_request() -> None:
    assert (chat().requests[0].sampling.temperature, chat().requests[0].sampling.top_k) == (0.6, 20)
    assert chat(temperature=0, top_k=3).requests[0].sampling.greedy
    assert chat(top_k=3).requests[0].sampling.top_k == 3


def test_choices_of_a_prompt_differ_by_their_seeds() -> None:
    exchange = complete(prompt=["a", "b"], n=3, seed=5)
    assert [one.prompt for one in exchange.requests] == ["a", "a", "a", "b", "b", "b"]
    assert [one.sampling.seed for one in exchange.requests] == [5, 6, 7, 5, 6, 7]
    assert [one.sampling.seed for one in complete(n=2).requests] == [None, None]
    assert len({one.request_id for one in chat(n=4, seed=1).requests}) == 4


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 100, "n": 100}, "10000 sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_what_excludes_each_other(body: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        complete(**body)
    assert expected in caught.value.message


# --- chats ---


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({}, ChatOptions()),
        ({"tools": [WEATHER]}, ChatOptions(tool_choice="auto")),
        ({"tools": [WEATHER], "tool_choice": "required"}, ChatOptions(tool_choice="required")),
        ({"tools": [WEATHER], "tool_choice": "none"}, ChatOptions(tool_choice="none")),
        (
            {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
            ChatOptions(tool_choice=NamedTool("clock")),
        ),
        (
            {"tools": [WEATHER], "parallel_tool_calls": False},
            ChatOptions(tool_choice="auto", parallel_tool_calls=False),
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "include_reasoning": False},
            ChatOptions(
                chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low", include_reasoning=False
            ),
        ),
        ({"continue_final_message": True}, ChatOptions(continue_final_message=True, add_generation_prompt=False)),
    ],
)
def test_how_a_chat_is_rendered_and_read(body: dict[str, Any], options: ChatOptions) -> None:
    exchange = chat(**body)
    assert exchange.requests[0].chat == options
    assert exchange.requests[0].tools == body.get("tools")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "parameters"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, '"f" is not allowed'),
        ({"tool_choice": "required"}, "tool_choice is only allowed with tools"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
    ],
)
def test_bad_chats_are_refused_by_name(body: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**body)
    assert expected in caught.value.message


def test_parts_are_passed_on_to_a_handler_that_takes_them() -> None:
    parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
    messages = [{"role": "user", "content": parts}]
    assert chat(messages=messages).requests[0].messages == messages
    with pytest.raises(RequestError, match=r"messages\[0\].content\[1\].type"):
        chat(SERVED, messages=messages)


# --- answers ---


def test_several_choices_of_several_prompts() -> None:
    exchange = complete(prompt=["a", "b"], n=2)
    sent = json.loads(answer(exchange, says("1"), says("2"), says("3"), says("4")))
    assert [(choice["index"], choice["text"]) for choice in sent["choices"]] == [(0, "1"), (1, "2"), (2, "3"), (3, "4")]
    assert sent["usage"]["prompt_tokens"] == 6, "a prompt counts once"
    assert sent["usage"]["completion_tokens"] == 4


def test_the_answer_has_the_likeliest_of_several() -> None:
    likely = [Delta("yes", (Token(1, "yes", -0.1),), "eos_token", Usage(3, 1))]
    unlikely = [Delta("no no", (Token(2, "no", -3.0), Token(2, " no", -0.1)), "eos_token", Usage(3, 2))]
    exchange = complete(n=1, best_of=2)
    assert [one.sampling.logprobs for one in exchange.requests] == [0, 0]
    sent = json.loads(answer(exchange, unlikely, likely))
    assert [choice["text"] for choice in sent["choices"]] == ["yes"]
    assert sent["choices"][0]["logprobs"] is None
    assert sent["usage"]["completion_tokens"] == 3, "what was generated counts, sent or not"


def test_an_echo_alone() -> None:
    exchange = complete(echo=True, max_tokens=0, logprobs=1)
    assert exchange.requests[0].sampling.max_new_tokens == 1
    prompt = (Token(1, "Hel"), Token(2, "lo", -1.5))
    delta = Delta("!", (Token(3, "!", -1.0),), "length", Usage(2, 1), "Hello", prompt)
    choice = json.loads(answer(exchange, [delta]))["choices"][0]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("Hello", ["Hel", "lo"])


def test_a_chat_of_several_choices_streams() -> None:
    sent = chunks(answer(chat(n=2, stream=True), says("a"), says("b")))
    roles = [chunk["choices"][0] for chunk in sent[:2]]
    assert [(choice["index"], choice["delta"]) for choice in roles] == [
        (0, {"role": "assistant", "content": ""}),
        (1, {"role": "assistant", "content": ""}),
    ]
    texts = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"]["content"]) for chunk in sent[2:]]
    assert texts == [(0, "a"), (0, ""), (1, "b"), (1, "")]


def test_prompt_log_probabilities_and_token_ids() -> None:
    prompt = (Token(7, "Hel"), Token(8, "lo", -1.5, rank=4))
    delta = Delta("!", (Token(3, "!", -1.0),), "length", Usage(2, 1), "Hello", prompt, (7, 8))
    sent = json.loads(answer(chat(prompt_logprobs=0, return_token_ids=True), [delta]))
    assert sent["prompt_logprobs"] == [None, {"8": {"logprob": -1.5, "rank": 4, "decoded_token": "lo"}}]
    assert (sent["prompt_token_ids"], sent["choices"][0]["token_ids"]) == ([7, 8], [3])
    choice = json.loads(answer(complete(prompt_logprobs=0, return_token_ids=True), [delta]))["choices"][0]
    assert choice["prompt_logprobs"][1]["8"]["rank"] == 4
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([7, 8], [3])


def test_token_ids_in_streams() -> None:
    sent = chunks(answer(chat(return_token_ids=True, stream=True), says("a", "b")))
    assert sent[0]["prompt_token_ids"] == [7, 8, 9]
    assert [chunk["choices"][0].get("token_ids") for chunk in sent] == [None, [0], [1], []]
    sent = chunks(answer(complete(return_token_ids=True, stream=True), says("a", "b")))
    assert sent[0]["choices"][0]["prompt_token_ids"] == [7, 8, 9]
    assert [chunk["choices"][0]["token_ids"] for chunk in sent] == [[0], [1], []]


@pytest.mark.parametrize("make", [chat, complete])
def test_usage_in_every_chunk(make: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    sent = chunks(answer(make(stream=True, stream_options=options), says("a", "b")))
    counts = [chunk["usage"]["completion_tokens"] for chunk in sent]
    assert counts == ([0] if make is chat else []) + [1, 2, 2, 2]
    assert {chunk["usage"]["prompt_tokens"] for chunk in sent} == {3}


def test_tokens_by_their_ids() -> None:
    logprobs = json.loads(answer(complete(logprobs=0, return_tokens_as_token_ids=True), says("a")))["choices"][0]
    assert logprobs["logprobs"]["tokens"] == ["token_id:0"]


CALLS = [
    Delta("", (Token(0, "<"),), reasoning="Let me see."),
    Delta("I look.", (Token(1, "I"),), tool_calls=(ToolCallDelta(0, "call-1", "weather", ""),)),
    Delta("", (Token(2, "{"),), tool_calls=(ToolCallDelta(0, arguments='{"city":'),)),
    Delta(
        "", (Token(3, "}"),), tool_calls=(ToolCallDelta(0, arguments='"Paris"}'), ToolCallDelta(1, "call-2", "f", "{}"))
    ),
    Delta("", (), "eos_token", Usage(3, 4, reasoning_tokens=1)),
]


def test_tool_calls_and_reasoning() -> None:
    sent = json.loads(answer(chat(tools=[WEATHER]), CALLS))
    choice = sent["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look.",
        "reasoning": "Let me see.",
        "reasoning_content": "Let me see.",
        "tool_calls": [
            {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}},
            {"id": "call-2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        ],
    }
    assert sent["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


def test_tool_calls_in_a_stream() -> None:
    sent = chunks(answer(chat(tools=[WEATHER], stream=True), CALLS))
    assert [chunk["choices"][0]["delta"] for chunk in sent] == [
        {"role": "assistant", "content": ""},
        {"reasoning": "Let me see.", "reasoning_content": "Let me see."},
        {
            "tool_calls": [
                {"index": 0, "id": "call-1", "type": "function", "function": {"name": "weather", "arguments": ""}}
            ],
            "content": "I look.",
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": '"Paris"}'}},
                {"index": 1, "id": "call-2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            ]
        },
        {"content": ""},
    ]
    assert sent[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_each_call_has_one_piece_in_a_chunk() -> None:
    """Tokens that come together bring the name of a call and its arguments in one delta."""
    name, *arguments = ToolCallDelta(0, "call-1", "weather"), *(ToolCallDelta(0, arguments=text) for text in '{"}')
    other = ToolCallDelta(1, "call-2", "clock", "{}")
    deltas = [Delta("", tool_calls=(name, *arguments, other)), Delta("", (), "eos_token", Usage(3, 4))]
    sent = chunks(answer(chat(tools=[WEATHER], stream=True), deltas))
    assert sent[1]["choices"][0]["delta"]["tool_calls"] == [
        {"index": 0, "id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"}'}},
        {"index": 1, "id": "call-2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ]


def test_one_tool_call_if_only_one_is_allowed() -> None:
    whole = json.loads(answer(chat(tools=[WEATHER], parallel_tool_calls=False), CALLS))
    assert [call["id"] for call in whole["choices"][0]["message"]["tool_calls"]] == ["call-1"]
    sent = chunks(answer(chat(tools=[WEATHER], parallel_tool_calls=False, stream=True), CALLS))
    calls = [call for chunk in sent for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert {call["index"] for call in calls} == {0}


def test_a_named_function_ends_as_a_text_does() -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    sent = json.loads(answer(chat(tools=[WEATHER], tool_choice=choice), CALLS))
    assert sent["choices"][0]["finish_reason"] == "stop"


def test_a_call_alone_has_no_content() -> None:
    message = json.loads(answer(chat(tools=[WEATHER]), CALLS[2:]))["choices"][0]["message"]
    assert message["content"] is None


def test_the_answer_names_the_stop_that_ended_a_sequence() -> None:
    deltas = [Delta("a", (Token(0, "a"),), "stop_sequence", Usage(1, 1), stop_reason="END")]
    for make in (chat, complete):
        assert json.loads(answer(make(), deltas))["choices"][0]["stop_reason"] == "END"
        assert chunks(answer(make(stream=True), deltas))[-1]["choices"][0]["stop_reason"] == "END"
