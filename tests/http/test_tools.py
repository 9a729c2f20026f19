"""Tools and reasoning on the default handler, with a model whose answers are written down, through real clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from client_environment import ClientScripts
from product_helpers import Server, serving

pytestmark = pytest.mark.slow

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCRIPTS = {
    "ONE": CALL,
    "TWO": f'I look it up.\n{CALL}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>\n',
    "THINK": f"<think>\nHm. Where?\n</think>\n\nI know.\n{CALL} ",
    "BAD": "<tool_call>\n{weather: Paris}\n</tool_call>  ",
    "SUNNY": "It is sunny in Paris.",
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Get the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, CLOCK]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from scripted_model import save_scripted_model

    model = save_scripted_model(tmp_path_factory.mktemp("scripted"), SCRIPTS)
    options = {"dtype": "fp32", "reasoning_parser": "qwen3", "enable_reasoning": "true", "kv_cache_memory_gb": "0.1"}
    with serving(tmp_path_factory.mktemp("served"), model, libraries="transformers", **options) as server:
        yield server


def ask(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    """Return the choice of a chat's answer, of a stream as it adds up."""
    body = {"messages": [{"role": "user", "content": text}], "tools": TOOLS, "max_tokens": 100, **fields}
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return _added_up(reply.text) if fields.get("stream") else reply.json()["choices"][0]


def _added_up(text: str) -> dict[str, Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for delta in [choice["delta"] for choice in choices]:
        message["content"] += delta.get("content") or ""
        if "reasoning" in delta:
            message["reasoning"] = message.get("reasoning", "") + delta["reasoning"]
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                calls.append({"id": piece["id"], "type": piece["type"], "function": piece["function"]})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    return {"message": message, "finish_reason": choices[-1]["finish_reason"]}


def called(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls") or []
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_content_and_reasoning(server: Server, stream: bool) -> None:
    paris = ("weather", {"city": "Paris"})
    one = ask(server, "ONE", stream=stream)
    assert (called(one), one["message"]["content"] or "", one["finish_reason"]) == ([paris], "", "tool_calls")
    two = ask(server, "TWO", stream=stream)
    assert (called(two), two["message"]["content"]) == ([paris, ("clock", {})], "I look it up.")
    assert called(ask(server, "TWO", stream=stream, parallel_tool_calls=False)) == [paris]
    thought = ask(server, "THINK", stream=stream)
    assert (called(thought), thought["message"]["content"]) == ([paris], "I know.")
    assert thought["message"]["reasoning"] == "Hm. Where?"
    bad = ask(server, "BAD", stream=stream)
    assert (called(bad), bad["message"]["content"], bad["finish_reason"]) == ([], SCRIPTS["BAD"].rstrip(), "stop")
    none = ask(server, "ONE", stream=stream, tool_choice="none")
    assert (called(none), none["message"]["content"]) == ([], CALL)
    cut = ask(server, "TWO", stream=stream, max_tokens=2)
    assert (called(cut), cut["finish_reason"]) == ([], "length")


def test_openais_sdk_goes_on_with_the_result_of_a_tool(server: Server) -> None:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        asked: dict[str, Any] = {"model": server.model, "tools": TOOLS, "max_tokens": 100}
        messages: list[Any] = [{"role": "user", "content": "TWO"}]
        with client.chat.completions.stream(**asked, messages=messages) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            message = stream.get_final_completion().choices[0].message
        assert [(event.name, event.arguments) for event in done] == [("weather", '{"city": "Paris"}'), ("clock", "{}")]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "SUNNY"} for call in message.tool_calls]
        messages += [message.to_dict(), *results]
        answer = client.chat.completions.create(**asked, messages=messages).choices[0]
        assert (answer.message.content, answer.finish_reason) == (SCRIPTS["SUNNY"], "stop")
        function = {"type": "function", **WEATHER["function"]}
        response = client.responses.create(model=server.model, input="TWO", tools=[function])
        assert [item.type for item in response.output] == ["message", "function_call", "function_call"]


def test_anthropics_sdk_reads_calls(server: Server) -> None:
    import anthropic

    tool = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": server.model, "max_tokens": 100, "tools": [tool]}
        messages: list[Any] = [{"role": "user", "content": "THINK"}]
        whole = client.messages.create(**asked, messages=messages, thinking={"type": "adaptive"})
        with client.messages.stream(**asked, messages=messages, thinking={"type": "adaptive"}) as stream:
            final = stream.get_final_message()
        for message in (whole, final):
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
            assert (message.content[2].input, message.stop_reason) == ({"city": "Paris"}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "SUNNY"}
        messages += [{"role": "assistant", "content": whole.content[1:]}, {"role": "user", "content": [result]}]
        assert client.messages.create(**asked, messages=messages).content[0].text == SCRIPTS["SUNNY"]


PLACES: Any = {  # as pydantic writes nested models
    "type": "function",
    "function": {
        "name": "places",
        "parameters": {
            "type": "object",
            "$defs": {
                "Place": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "near": {"$ref": "#/$defs/Size"}},
                    "required": ["name", "near"],
                },
                "Size": {"type": "integer"},
            },
            "properties": {"all": {"type": "array", "items": {"$ref": "#/$defs/Place"}, "minItems": 2}},
            "required": ["all"],
        },
    },
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_has_arguments_of_its_schema(server: Server, stream: bool) -> None:
    import jsonschema

    for tool in (PLACES, WEATHER):
        name, schema = tool["function"]["name"], tool["function"]["parameters"]
        fields: dict[str, Any] = {"tools": [tool, CLOCK] if tool is WEATHER else [tool], "stream": stream}
        fields |= {"temperature": 0, "max_tokens": 300}
        named = ask(server, "x", **fields, tool_choice={"type": "function", "function": {"name": name}})
        ((chosen, arguments),) = called(named)
        jsonschema.validate(arguments, schema)
        assert (chosen, named["finish_reason"], named["message"]["content"] or "") == (name, "stop", "")
        required = ask(server, "x", **fields, tool_choice="required", parallel_tool_calls=False)
        ((chosen, arguments),) = called(required)
        jsonschema.validate(arguments, schema if chosen == name else {})
        assert (required["finish_reason"], required["message"]["content"] or "") == ("tool_calls", "")
    both = {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
    refused = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], **both})
    assert (refused.status_code, "exclude each other" in refused.text) == (400, True)


@pytest.mark.parametrize("limit", [4, 15, 30])
def test_a_demanded_call_that_a_limit_cuts_off_is_no_content(server: Server, limit: int) -> None:
    fields: dict[str, Any] = {"tool_choice": "required", "temperature": 0, "max_tokens": limit}
    whole, streamed = (ask(server, "x", stream=stream, **fields) for stream in (False, True))
    assert (whole["message"]["content"] or "", whole["finish_reason"]) == ("", "length")
    assert (streamed["message"]["content"], streamed["finish_reason"]) == ("", "length")
    tool = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
    body = {
        "model": server.model,
        "max_tokens": limit,
        "temperature": 0,
        "tools": [tool],
        "tool_choice": {"type": "any"},
    }
    message = server.http.post("/v1/messages", json={**body, "messages": [{"role": "user", "content": "x"}]}).json()
    assert {block["type"] for block in message["content"]} <= {"tool_use"}
    assert message["stop_reason"] == "max_tokens"


LANGCHAIN = """
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    size: int


model = ChatOpenAI(base_url="{url}/v1", api_key="none", model="{model}", max_tokens=300, temperature=0)
with_tools = model.bind_tools({tools})
answer = with_tools.invoke("TWO")
print([(call["name"], call["args"]) for call in answer.tool_calls], answer.content)
whole = None
for chunk in with_tools.stream("TWO"):
    whole = chunk if whole is None else whole + chunk
print([(call["name"], call["args"]) for call in whole.tool_calls], whole.content)
print(type(model.with_structured_output(City, method="function_calling").invoke("x")).__name__)
"""
PYDANTIC_AI = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url="{url}/v1", api_key="none")
agent = Agent(OpenAIChatModel("{model}", provider=provider), model_settings={{"max_tokens": 100}})


@agent.tool_plain
def weather(city: str) -> str:
    print("asked for", city)
    return "SUNNY"


print(agent.run_sync("ONE").output)
"""
INSTRUCTOR = """
import instructor
from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: str
    size: int


client = instructor.from_openai(OpenAI(base_url="{url}/v1", api_key="none"), mode=instructor.Mode.TOOLS)
messages = [{{"role": "user", "content": "x"}}]
asked = {{"messages": messages, "max_tokens": 300, "temperature": 0}}
print(type(client.chat.completions.create(model="{model}", response_model=City, **asked)))
"""


def test_agents_call_tools(server: Server) -> None:
    codes = {"langchain_openai": LANGCHAIN, "pydantic_ai": PYDANTIC_AI, "instructor": INSTRUCTOR}
    ran = ClientScripts(
        {name: (name, code.format(url=server.url, model=server.model, tools=TOOLS)) for name, code in codes.items()}
    )
    calls = "[('weather', {'city': 'Paris'}), ('clock', {})] I look it up."
    assert ran.output("langchain_openai").splitlines() == [calls, calls, "City"]
    assert ran.output("pydantic_ai").splitlines() == ["asked for Paris", SCRIPTS["SUNNY"]]
    assert "City" in ran.output("instructor")


def test_the_log_says_which_parser_was_chosen(server: Server) -> None:
    assert any("tool_call_parser=hermes reasoning_parser=qwen3" in line for line in server.lines)
