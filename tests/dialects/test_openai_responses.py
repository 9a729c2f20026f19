from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from dialect_helpers import DELTAS, SERVED, TEXT, answer, events_of, generations, outcome, request, serving
from hypothesis import given
from hypothesis import strategies as st

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import Delta, NamedTool, StructuredOutputs, Token, ToolCallDelta, Usage
from lmi_server.dialects import Exchange, ServedModel, parse

if TYPE_CHECKING:
    from openai import OpenAI

CAPABLE = ServedModel(name="tiny", features=frozenset({"tools", "structured_outputs", "reasoning"}))
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALLS = (
    Delta("", (Token(0, "<"),), reasoning="Let me"),
    Delta("", (Token(0, " "),), reasoning=" see."),
    Delta("I look.", (Token(1, "I"),), tool_calls=(ToolCallDelta(0, "call-1", "weather", ""),)),
    Delta("", (Token(2, "{"),), tool_calls=(ToolCallDelta(0, arguments='{"city":"Paris"}'),)),
    Delta("", (Token(3, "}"),), tool_calls=(ToolCallDelta(1, "call-2", "clock", "{}"),)),
    Delta("", (), "eos_token", Usage(3, 5, 1, reasoning_tokens=2)),
)


def respond(served: ServedModel = CAPABLE, **body: Any) -> Exchange:
    return parse(request("responses", {"input": "Hello"} | body), served)


@contextmanager
def client_of(deltas: Sequence[Delta], served: ServedModel = CAPABLE) -> Iterator[OpenAI]:
    from openai import OpenAI

    with serving(served, deltas) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


# --- requests ---


def test_a_conversation() -> None:
    generation = respond(
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "How is Paris?"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "id": "f", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "sunny"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Sunny."}]},
            {"role": "user", "content": "And now?"},
        ],
        instructions="Be brief.",
        max_output_tokens=5,
        temperature=0,
        reasoning={"effort": "low"},
    ).requests[0]
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert generation.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is Paris?"},
        {"role": "assistant", "content": "", "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "And now?"},
    ]
    assert (generation.sampling.max_new_tokens, generation.sampling.greedy) == (5, True)
    assert generation.chat.reasoning_effort == "low"


def test_tools_and_constraints() -> None:
    choice = {"type": "function", "name": "weather"}
    schema = {"type": "object"}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    generation = respond(tools=[WEATHER], tool_choice=choice, text=form).requests[0]
    assert generation.tools == [
        {"type": "function", "function": {"name": "weather", "parameters": WEATHER["parameters"]}}
    ]
    assert generation.chat.tool_choice == NamedTool("weather")
    assert generation.sampling.structured_outputs == StructuredOutputs(kind="json", value=schema)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"input": None}, "input is missing"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(body: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        respond(**body)
    assert expected in caught.value.message


def test_a_handler_without_tools_refuses_them() -> None:
    with pytest.raises(RequestError, match="tools"):
        respond(SERVED, tools=[WEATHER])


# --- answers ---


def test_the_sdk_reads_a_whole_response() -> None:
    from openai.types.responses import ResponseOutputMessage

    with client_of(DELTAS) as client:
        response = client.responses.create(model="tiny", input="Hello", top_logprobs=1, metadata={"a": "b"})
    assert (response.output_text, response.status, response.metadata) == (TEXT, "completed", {"a": "b"})
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (2, 4)
    message = response.output[0]
    assert isinstance(message, ResponseOutputMessage)
    assert [entry.token for entry in message.content[0].logprobs or []][:2] == [" Par", "\ufffd"]  # type: ignore[union-attr]


def test_the_sdk_reads_calls_and_reasoning() -> None:
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem

    with client_of(CALLS) as client:
        response = client.responses.create(model="tiny", input="Hello", tools=[WEATHER])  # type: ignore[list-item]
    reasoning, message, *calls = response.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Let me see."
    assert isinstance(message, ResponseOutputMessage)
    assert [call.name for call in calls if isinstance(call, ResponseFunctionToolCall)] == ["weather", "clock"]
    assert [call.arguments for call in calls if isinstance(call, ResponseFunctionToolCall)] == [
        '{"city":"Paris"}',
        "{}",
    ]
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 2


def test_the_sdk_streams_a_response() -> None:
    with (
        client_of(CALLS) as client,
        client.responses.stream(model="tiny", input="Hello", tools=[WEATHER]) as stream,  # type: ignore[list-item]
    ):
        sent = [event.type for event in stream]
        final = stream.get_final_response()
    assert sent[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert sent[-1] == "response.completed"
    assert final.output_text == "I look."
    assert "response.function_call_arguments.done" in sent


def test_what_ran_out_of_tokens_is_incomplete() -> None:
    deltas = [Delta("a", (Token(1, "a"),), "length", Usage(1, 1))]
    sent = events_of(answer(respond(stream=True), deltas))
    assert sent[-1]["type"] == "response.incomplete"
    assert sent[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))


@given(generations())
def test_a_stream_ends_with_the_whole_response(deltas: list[Delta]) -> None:
    from openai.types.responses import Response

    whole = Response.model_validate_json(answer(respond(), deltas))
    sent = events_of(answer(respond(stream=True), deltas))
    last = Response.model_validate(sent[-1]["response"])
    assert last.output_text == whole.output_text
    assert last.usage == whole.usage
    pieces = [event["delta"] for event in sent if event["type"] == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries(
            {},
            optional=dict.fromkeys(("role", "content", "type", "text", "name", "call_id", "output", "summary"), inner),
        )
    ),
    max_leaves=8,
)
NAMES = ("input", "tools", "tool_choice", "text", "reasoning", "metadata", "include", "instructions")


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3))
def test_any_json_is_answered_or_refused(body: dict[str, Any]) -> None:
    assert outcome(request("responses", {"input": "Hello"} | body))
