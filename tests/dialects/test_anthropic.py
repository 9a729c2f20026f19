from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from dialect_helpers import DELTAS, TEXT, answer, events_of, generations, request, serving
from hypothesis import given
from hypothesis import strategies as st

from lmi_server.contract.errors import ContextLengthError, LmiServerError, QueueFullError, RequestError
from lmi_server.contract.generation import Delta, GenerationRequest, NamedTool, StructuredOutputs, ToolCallDelta, Usage
from lmi_server.dialects import Exchange, ServedModel, parse
from lmi_server.dialects.anthropic import parse_count
from lmi_server.dialects.errors import error_event, error_reply

if TYPE_CHECKING:
    from anthropic import Anthropic

PLAIN = ServedModel(name="tiny")
CAPABLE = ServedModel(name="tiny", features=frozenset({"tools", "structured_outputs", "reasoning", "media"}))
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Looks up.", "input_schema": SCHEMA, "strict": True}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
CALLS = (
    Delta("", reasoning="Let me", prompt_token_ids=(1, 2, 3)),
    Delta("", reasoning=" see."),
    Delta("I look.", tool_calls=(ToolCallDelta(0, "call-1", "weather", ""),)),
    Delta("", tool_calls=(ToolCallDelta(0, arguments='{"city":'),)),
    Delta("\n", tool_calls=(ToolCallDelta(0, arguments='"Paris"}'),)),
    Delta("", tool_calls=(ToolCallDelta(1, "call-2", "clock", "{}"),)),
    Delta("", (), "eos_token", Usage(3, 5, 1, reasoning_tokens=2)),
)


def ask(served: ServedModel = CAPABLE, **body: Any) -> Exchange:
    return parse(request("messages", {"max_tokens": 8, "messages": HELLO} | body), served)


def generation_of(served: ServedModel = CAPABLE, **body: Any) -> GenerationRequest:
    return ask(served, **body).requests[0]


@contextmanager
def client_of(deltas: Sequence[Delta], served: ServedModel = CAPABLE, breaks: bool = False) -> Iterator[Anthropic]:
    from anthropic import Anthropic

    with serving(served, deltas, breaks) as url, Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


# --- requests ---


def test_a_conversation() -> None:
    generation = generation_of(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"},
            {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "user", "content": [{"type": "text", "text": "In Paris?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "call-1", "name": "weather", "input": {"city": "Paris"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "Sun."}]},
                    {"type": "text", "text": "So?"},
                    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A page."}},
                ],
            },
        ],
    )
    function = {"name": "weather", "arguments": '{"city":"Paris"}'}
    assert generation.messages == [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "Weather?\nIn Paris?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "Hm.",
            "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": "Sun."},
        {"role": "user", "content": "So?\nA page."},
    ]
    assert generation.chat.add_generation_prompt


def test_images_for_a_model_that_takes_them() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [PICTURE, {"type": "text", "text": "Seen."}]}
    other = {"type": "image", "source": {"type": "url", "url": "https://host/a.png"}}
    messages = generation_of(messages=[{"role": "user", "content": [result, other]}]).messages
    urls = [
        {"type": "image_url", "image_url": {"url": url}} for url in ("data:image/png;base64,AAAA", "https://host/a.png")
    ]
    assert messages == [{"role": "tool", "tool_call_id": "a", "content": "Seen."}, {"role": "user", "content": urls}]


def test_the_beginning_of_an_answer_is_continued() -> None:
    chat = generation_of(messages=[*HELLO, {"role": "assistant", "content": "The best answer is ("}]).chat
    assert chat.continue_final_message
    assert not chat.add_generation_prompt


def test_sampling() -> None:
    sampling = generation_of(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["x"], max_tokens=3).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0.5, 0.9, 7, ("x",))
    assert (sampling.max_new_tokens, sampling.do_sample, sampling.fit_context) == (3, True, False)
    assert not generation_of(temperature=0).sampling.do_sample


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, NamedTool("weather")),
    ],
)
def test_tools(choice: dict[str, Any], expected: Any) -> None:
    generation = generation_of(tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True})
    function = {"name": "weather", "description": "Looks up.", "parameters": SCHEMA, "strict": True}
    assert generation.tools == [{"type": "function", "function": function}]
    assert generation.chat.tool_choice == expected
    assert not generation.chat.parallel_tool_calls
    assert generation_of(tools=[WEATHER]).chat.tool_choice == "auto"


def test_thinking_and_the_form_of_the_output() -> None:
    chat = generation_of(thinking={"type": "enabled", "budget_tokens": 4, "display": "omitted"}).chat
    assert (chat.thinking_token_budget, chat.include_reasoning) == (4, False)
    assert generation_of(thinking={"type": "disabled"}).chat.reasoning_effort == "none"
    exchange = ask(PLAIN, thinking={"type": "enabled", "budget_tokens": 4})
    assert exchange.requests[0].chat.thinking_token_budget is None
    assert "budget_tokens is ignored" in exchange.warnings[0]
    form = {"type": "json_schema", "schema": SCHEMA}
    generation = generation_of(output_config={"effort": "low", "format": form})
    assert generation.chat.reasoning_effort == "low"
    assert generation.sampling.structured_outputs == StructuredOutputs(kind="json", value=SCHEMA)


def test_what_changes_nothing_is_taken() -> None:
    body = {"metadata": {"user_id": "me"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    assert ask(**body, container=None, mcp_servers=[]).warnings == ()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens: 0 is not allowed"),
        ({"messages": None}, "messages is missing"),
        ({"messages": []}, "messages: a list of 0 is not allowed"),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            r'messages\[0\].role: "tool" is not allowed; send one of user',
        ),
        ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\].content: a list of 0 is not allowed"),
        ({"messages": [{"role": "system", "content": "a"}]} | {"system": ""}, None),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, r"content\[0\].type: \"image\" .* takes text only"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}, '"search_result" is not allowed'),
        ({"messages": [{"role": "assistant", "content": [PICTURE]}]}, '"image" is not allowed; send text, tool_use'),
        ({"system": [PICTURE]}, r'system\[0\].type: "image" is not allowed; send text'),
        ({"tools": [WEATHER]}, "tools is not supported by the handler .*option.rolling_batch=vllm"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format is not supported"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is only allowed with tools"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, 'tool_choice.name: "x" is not allowed'),
        ({"tool_choice": {"type": "required"}}, 'tool_choice.type: "required" is not allowed; send one of auto, any'),
        ({"thinking": {"type": "on"}}, 'thinking.type: "on" is not allowed'),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"model": "other"}, '"other" does not exist; served here: tiny'),
    ],
)
def test_what_is_refused(body: dict[str, Any], message: str | None) -> None:
    if message is None:
        ask(PLAIN, **body)
        return
    with pytest.raises(RequestError, match=message):
        ask(PLAIN, **body)


def test_tools_of_the_provider_are_refused() -> None:
    with pytest.raises(RequestError, match=r'tools\[0\].type: "web_search_20250305" is not allowed; send custom'):
        ask(tools=[{"type": "web_search_20250305", "name": "web_search"}])


@pytest.mark.parametrize("name", ["tiny", "lmi", "tgi", "dummy"])
def test_names_that_mean_the_only_model(name: str) -> None:
    assert json.loads(answer(ask(model=name), DELTAS))["model"] == name


def test_a_request_for_the_number_of_tokens_needs_no_limit() -> None:
    body = {"model": "tiny", "messages": HELLO, "system": "Hi", "tools": [WEATHER]}
    generation, warnings = parse_count(request("messages/count_tokens", body), CAPABLE)
    assert [message["role"] for message in generation.messages or ()] == ["system", "user"]
    assert generation.tools
    assert warnings == ()


@given(
    st.dictionaries(
        st.sampled_from(["messages", "system", "tools", "tool_choice", "thinking", "output_config"]),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.text(max_size=3)
            | st.sampled_from(["user", "text", "tool_use", "json_schema"]),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(
                    st.sampled_from(["role", "content", "type", "text", "source", "input", "name", "format"]),
                    inner,
                    max_size=3,
                )
            ),
            max_leaves=8,
        ),
    )
)
def test_any_body_is_parsed_or_refused(body: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):
        ask(**body)


# --- answers ---


@pytest.mark.slow
def test_the_sdk_reads_a_message() -> None:
    with client_of(CALLS) as client:
        message = client.messages.create(model="tiny", max_tokens=8, messages=HELLO)  # type: ignore[arg-type]
    thinking, text, weather, clock = message.content
    assert (thinking.type == "thinking" and thinking.thinking) == "Let me see."
    assert (text.type == "text" and text.text) == "I look."
    assert weather.to_dict() == {"type": "tool_use", "id": "call-1", "name": "weather", "input": {"city": "Paris"}}
    assert clock.to_dict() == {"type": "tool_use", "id": "call-2", "name": "clock", "input": {}}
    assert (message.role, message.type, message.stop_reason, message.stop_sequence) == (
        "assistant",
        "message",
        "tool_use",
        None,
    )
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (2, 1, 5)


@pytest.mark.slow
def test_the_sdk_reads_a_stream_of_blocks() -> None:
    with (
        client_of(CALLS) as client,
        client.messages.stream(model="tiny", max_tokens=8, messages=HELLO) as stream,  # type: ignore[arg-type]
    ):
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    whole = json.loads(answer(ask(), CALLS))
    assert [block.to_dict() for block in streamed.content] == [
        {**block, "signature": streamed.content[0].to_dict()["signature"]} if block["type"] == "thinking" else block
        for block in whole["content"]
    ]
    assert (streamed.stop_reason, streamed.usage.input_tokens, streamed.usage.output_tokens) == ("tool_use", 2, 5)
    assert {"thinking", "text", "input_json", "content_block_stop", "message_stop"} <= set(kinds)


def test_the_events_of_a_stream() -> None:
    deltas = (
        Delta("", prompt_token_ids=(1, 2)),
        Delta("Pa"),
        Delta(""),
        Delta("ris\u2028"),
        Delta("!", (), "length", Usage(2, 4)),
    )
    sent = events_of(answer(ask(stream=True), deltas))
    assert [event["type"] for event in sent] == [
        *("message_start", "ping", "content_block_start"),
        *("content_block_delta",) * 3,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert sent[0]["message"]["usage"]["input_tokens"] == 2
    assert sent[2] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert "".join(event["delta"]["text"] for event in sent[3:6]) == "Paris\u2028!"
    assert sent[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert sent[-2]["usage"]["output_tokens"] == 4


@pytest.mark.slow
def test_the_sdk_reads_a_text_stream() -> None:
    with (
        client_of(DELTAS) as client,
        client.messages.stream(model="tiny", max_tokens=8, messages=HELLO) as stream,  # type: ignore[arg-type]
    ):
        assert "".join(stream.text_stream) == TEXT
        assert stream.get_final_message().stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ([Delta("a", (), "stop_sequence", Usage(1, 1), stop_reason="###")], ("stop_sequence", "###")),
        ([Delta("a", (), "stop_sequence", Usage(1, 1), stop_reason=7)], ("end_turn", None)),
        ([*CALLS[:3], Delta("", (), "length", Usage(1, 1))], ("max_tokens", None)),
        (
            [*CALLS[:4], Delta("", (), "stop_sequence", Usage(1, 1), stop_reason="###")],  # the call is cut off
            ("stop_sequence", "###"),
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_why_a_message_ended(deltas: list[Delta], expected: tuple[str, str | None], stream: bool) -> None:
    data = answer(ask(stream=stream), deltas)
    end = events_of(data)[-2]["delta"] if stream else json.loads(data)
    assert (end["stop_reason"], end["stop_sequence"]) == expected


def test_text_inside_a_call_follows_it_and_a_second_call_may_be_forbidden() -> None:
    deltas = (*CALLS[2:4], Delta("Well"), *CALLS[4:])
    blocks = json.loads(answer(ask(tools=[WEATHER]), deltas))["content"]
    assert [block.get("text", block.get("name")) for block in blocks] == ["I look.", "weather", "Well\n", "clock"]
    assert blocks[1]["input"] == {"city": "Paris"}
    one = ask(tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    names = [block.get("name") for block in json.loads(answer(one, CALLS))["content"]]
    assert names == [None, None, "weather"]


def test_arguments_that_are_cut_off() -> None:
    deltas = [*CALLS[:4], Delta("", (), "length", Usage(1, 1))]
    assert json.loads(answer(ask(), deltas))["content"][-1]["input"] == {"INVALID_JSON": '{"city":'}


@given(generations())
def test_a_stream_carries_the_text_of_the_whole_answer(deltas: list[Delta]) -> None:
    whole = json.loads(answer(ask(), deltas))
    sent = events_of(answer(ask(stream=True), deltas))
    text = "".join(event["delta"]["text"] for event in sent if event["type"] == "content_block_delta")
    assert text == "".join(block["text"] for block in whole["content"])
    assert sent[-2]["usage"] == whole["usage"]


# --- errors ---


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("no"), 400, "invalid_request_error"),
        (QueueFullError("full"), 529, "overloaded_error"),
        (LmiServerError("broken"), 500, "api_error"),
    ],
)
def test_errors_have_the_form_of_the_api(error: LmiServerError, status: int, kind: str) -> None:
    for route in ("messages", "messages/count_tokens", "/v1/messages"):
        got, _, body = error_reply(route, error, request_id="request-1")
        assert got == status
        assert json.loads(body) == {
            "type": "error",
            "error": {"type": kind, "message": error.message},
            "request_id": "request-1",
        }
    event = error_event("messages", "text/event-stream", error, "request-1")
    assert events_of(event)[0]["error"]["type"] == kind


def test_a_status_that_settings_choose_has_its_own_type() -> None:
    status, _, body = error_reply("messages", QueueFullError("full"), {QueueFullError: 429})
    assert (status, json.loads(body)["error"]["type"]) == (429, "rate_limit_error")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ContextLengthError.from_counts(300, 1, 256), "prompt is too long: 300 tokens > 256 maximum"),
        (
            ContextLengthError.from_counts(200, 100, 256),
            "input length and `max_tokens` exceed context limit: 200 + 100 > 256, ",
        ),
        (ContextLengthError("9000 characters"), "prompt is too long: 9000 characters"),
    ],
)
def test_a_prompt_that_is_too_long_reads_as_the_api_says(error: ContextLengthError, message: str) -> None:
    status, _, body = error_reply("messages", error)
    assert status == 400
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert json.loads(body)["error"]["message"].startswith(message)


def test_other_apis_say_it_in_openais_words() -> None:
    none, too_many = ContextLengthError.from_counts(300, 1, 256), ContextLengthError.from_counts(200, 100, 256)
    assert "context length is 256 tokens. However, the prompt has 300 tokens, which leaves no room" in none.message
    assert "However, you requested 300 tokens (200 in the prompt, 100 in the completion)." in too_many.message
    assert "ask for 56 new tokens at most" in too_many.message


@pytest.mark.slow
def test_the_sdk_raises_its_own_errors() -> None:
    import anthropic

    arguments: Any = {"model": "tiny", "max_tokens": 8, "messages": HELLO}
    with client_of(DELTAS, PLAIN) as client:
        with pytest.raises(anthropic.NotFoundError, match="served here: tiny") as missing:
            client.messages.create(**{**arguments, "model": "other"})
        assert missing.value.body["request_id"] == "request-1"  # type: ignore[index]
        with pytest.raises(anthropic.BadRequestError, match=r"option\.rolling_batch=vllm"):
            client.messages.create(**arguments, tools=[WEATHER])
    with (
        client_of(DELTAS, PLAIN, breaks=True) as client,
        pytest.raises(anthropic.APIStatusError, match="the engine broke"),
        client.messages.stream(**arguments) as stream,
    ):
        stream.get_final_message()
