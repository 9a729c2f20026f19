"""OpenAI's API with vLLM's engine: tools and constraints, with the same answers as vLLM's own server."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import lmi_cases
import pydantic
import pytest
import torch
import transformers
from client_environment import ClientScripts
from lmi_cases import generated
from product_helpers import Server
from tiny_models import byte_tokenizer

from handlers.structured_output.grammar_text import grammar_text
from handlers.structured_output.token_grammars import TokenGrammars
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import StructuredOutputs

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "London"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
# A random model calls no tool by itself, so a constraint forces a call in the form that Hermes models write.
CALL = '<tool_call>\n\\{"name": "weather", "arguments": \\{"city": "[A-Z][a-z]{3,8}"\\}\\}\n</tool_call>'


@pytest.fixture
def sdk(ours: Server) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{ours.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# --- the same shapes as vLLM's own server ---

CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2, "seed": 1, "temperature": 0.8},
    {"logprobs": True, "top_logprobs": 2},
    {"stop": ["."]},
    {"return_token_ids": True},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["sunny", "rainy"]}},
    {"tools": [WEATHER], "tool_choice": "none"},
    {"tools": [WEATHER], "tool_choice": "auto"},
    {"tools": [WEATHER], "tool_choice": "auto", "structured_outputs": {"regex": CALL}},
    {"tools": [WEATHER], "tool_choice": "required"},
    {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [WEATHER], "tool_choice": NAMED},
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"prompt": ["The capital of France is", "Two and two is"], "n": 2, "seed": 3, "temperature": 0.8},
    {"logprobs": 2},
    {"echo": True, "logprobs": 1},
    {"echo": True, "max_tokens": 0, "logprobs": 1},
    {"return_token_ids": True},
    {"stop_token_ids": [30]},
]
WHOLE_ONLY: list[dict[str, Any]] = [{"prompt_logprobs": 1}]
PLAIN = 4  # the number of fields of a request without optional ones
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


def shape(value: Any, path: str = "") -> set[str]:
    """Return the paths of all values that are not null.

    All items of a list have one path, and so do keys that are tokens.
    """
    if isinstance(value, dict):
        opened = path.endswith(("top_logprobs", "prompt_logprobs"))
        found = [shape(inner, f"{path}.{'*' if opened else key}") for key, inner in value.items()]
    elif isinstance(value, list):
        found = [shape(inner, path) for inner in value]
    else:
        return set() if value is None or value == "" else {path}
    return set().union(*found)


# Fields of only one server: the tokens from the prefix cache; a hash of vLLM's build and settings.
OURS = {".usage.prompt_tokens_details.cached_tokens"}
THEIRS = {".system_fingerprint"}


def whole_of(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chunks_of(client: httpx.Client, path: str, body: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    reply = client.post(path, json=body | {"stream": True, "stream_options": options})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def choices_of_stream(chunks: list[Any]) -> list[dict[str, Any]]:
    """Return the choices of a stream, each with all its deltas added up."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "calls": {}, "reason": None, "stop": None})
            delta = piece.get("delta") or {"content": piece.get("text")}
            choice["text"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                function = choice["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                for name, value in (call.get("function") or {}).items():
                    function[name] += value or ""
            choice["reason"] = choice["reason"] or piece["finish_reason"]
            choice["stop"] = choice["stop"] or piece.get("stop_reason")
    return [choices[index] for index in sorted(choices)]


def choices_of_answer(answer: Any) -> list[dict[str, Any]]:
    """Return the choices of a whole answer in the same form."""
    found = []
    for choice in answer["choices"]:
        message = choice.get("message") or {"content": choice.get("text")}
        calls = {index: call["function"] for index, call in enumerate(message.get("tool_calls") or [])}
        text = message["content"] or ""
        found.append(
            {"text": text, "calls": calls, "reason": choice["finish_reason"], "stop": choice.get("stop_reason")}
        )
    return found


def asked_for(path: str, body: dict[str, Any]) -> bool:
    """Return whether a request asked for the value at `path`: with an echo vLLM adds the prompt in every form."""
    return not (body.get("echo") and path.startswith((".choices.prompt_logprobs", ".choices.prompt_token_ids")))


def from_both(ours: Server, theirs: httpx.Client, *calls: Callable[[httpx.Client], Any]) -> list[tuple[Any, Any]]:
    """Make all calls to both servers at the same time; return both results of each call."""
    with ThreadPoolExecutor(2 * len(calls)) as pool:
        results = list(pool.map(lambda call: call[0](call[1]), itertools.product(calls, (ours.http, theirs))))
    return list(zip(results[::2], results[1::2], strict=True))


def compare(ours: Server, theirs: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Send a request to both servers, whole and streamed; a short one is streamed in two ways."""
    streams: list[dict[str, Any]] = [CONTINUOUS] if len(body) > PLAIN else [{"include_usage": True}, CONTINUOUS]
    if "prompt_logprobs" in body:
        streams = []
    whole, *chunked = from_both(
        ours,
        theirs,
        partial(whole_of, path=path, body=body),
        *(partial(chunks_of, path=path, body=body, options=options) for options in streams),
    )
    assert choices_of_answer(whole[0]) == choices_of_answer(whole[1]), body
    for mine, other in chunked:
        assert choices_of_stream(mine) == choices_of_stream(other), body
        assert mine[-1]["usage"]["total_tokens"] == other[-1]["usage"]["total_tokens"]
    for mine, other in (whole, *chunked):
        assert shape(mine) - OURS == {path for path in shape(other) - THEIRS if asked_for(path, body)}, body


@pytest.mark.parametrize("body", CHATS + WHOLE_ONLY, ids=lambda body: ",".join(map(str, body)) or "plain")
def test_chats_have_the_shapes_of_vllms_server(ours: Server, theirs: httpx.Client, body: dict[str, Any]) -> None:
    tokens = 90 if "tools" in body else 20  # a call of a tool is long
    asked = {"model": "model", "messages": QUESTION, "temperature": 0, "max_tokens": tokens} | body
    compare(ours, theirs, "/v1/chat/completions", asked)


@pytest.mark.parametrize("body", COMPLETIONS + WHOLE_ONLY, ids=lambda body: ",".join(map(str, body)) or "plain")
def test_completions_have_the_shapes_of_vllms_server(ours: Server, theirs: httpx.Client, body: dict[str, Any]) -> None:
    asked = {"model": "model", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 12} | body
    compare(ours, theirs, "/v1/completions", asked)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"model": "model", "prompt": "Hello there"}),
        ("/tokenize", {"model": "model", "messages": QUESTION}),
        ("/detokenize", {"model": "model", "tokens": [72, 105]}),
    ],
)
def test_tokenize_answers_as_vllms_server_does(
    ours: Server, theirs: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    mine, other = whole_of(ours.http, path, body), whole_of(theirs, path, body)
    assert mine == {name: value for name, value in other.items() if value is not None}


def test_both_refuse_the_same_requests(ours: Server, theirs: httpx.Client) -> None:
    chat = {"model": "model", "messages": QUESTION}
    for body in (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
        {"tool_choice": "required"},
        {"max_tokens": 5000},
        {"structured_outputs": {"regex": "["}},
        {"response_format": {"type": "json_schema"}},
        {"top_logprobs": 3},
        {"stream_options": {"include_usage": True}},
        {"temperature": -1},
    ):
        refused = [client.post("/v1/chat/completions", json=chat | body) for client in (ours.http, theirs)]
        assert [reply.status_code for reply in refused] == [400, 400], [body, *(reply.text for reply in refused)]
        assert refused[0].json()["error"]["message"]


# --- calls of tools ---

TOOLS = [WEATHER, {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_demanded_call_fits_the_schema_of_its_tool(ours: Server, choice: Any) -> None:
    """Although no tool says `strict`."""
    sampled = {"temperature": 2.0, "n": 8, "seed": 3, "logit_bias": COMPACT, "max_tokens": 150}
    body = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, **sampled}
    for found in (
        choices_of_answer(whole_of(ours.http, "/v1/chat/completions", body)),
        choices_of_stream(chunks_of(ours.http, "/v1/chat/completions", body, {})),
    ):
        assert len(found) == 8
        for one in found:
            assert (one["text"], one["reason"]) == ("", "stop" if choice is NAMED else "tool_calls")
            assert one["calls"][0]["name"] == "weather"
            assert json.loads(one["calls"][0]["arguments"])["city"] in ("Paris", "London")
    any_tool = {"messages": QUESTION, "max_tokens": 90, "tools": [{**LOOK_UP, "strict": False}]}
    any_tool |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "logit_bias": COMPACT}
    (block,) = ours.http.post("/v1/messages", json=any_tool).json()["content"]
    assert block["input"]["city"] in ("Paris", "London")


@pytest.mark.parametrize(
    "asked", [{"tool_choice": "required"}, {"tool_choice": NAMED}, {"structured_outputs": {"regex": CALL}}]
)
def test_a_call_that_a_limit_cuts_off_is_no_content(ours: Server, asked: dict[str, Any]) -> None:
    body = {"messages": QUESTION, "tools": [WEATHER], "temperature": 0, "logit_bias": COMPACT, **asked}
    began = 0
    for limit in (1, 5, 20, 40, 55):
        (whole,) = choices_of_answer(whole_of(ours.http, "/v1/chat/completions", body | {"max_tokens": limit}))
        chunks = chunks_of(ours.http, "/v1/chat/completions", body | {"max_tokens": limit}, {})
        assert choices_of_stream(chunks) == [whole]
        if whole["reason"] == "length":
            assert whole["text"] in ("", "<tool_cal"[:limit])
            began += len(whole["calls"])
    assert began


def test_the_calls_of_strict_tools_fit_their_schemas_if_the_model_chooses() -> None:
    """vLLM describes the calls, and this project's library compiles that."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag

    tool = ChatCompletionToolsParam.model_validate({**WEATHER, "function": {**WEATHER["function"], "strict": True}})
    tag = get_model_structural_tag("hermes", [tool], "auto", reasoning=False)
    assert tag is not None
    text = grammar_text(StructuredOutputs(kind="structural_tag", value=json.dumps(tag.model_dump())))

    def takes(answer: str) -> bool:
        matcher = TokenGrammars(byte_tokenizer(), 259, [258]).compile(text).matcher.deep_copy()
        return bool(matcher.consume_tokens(byte_tokenizer().encode(answer)))

    call = 'Hm.<tool_call>\n{{"name": "weather", "arguments": {{"city": {}}}}}\n</tool_call>'
    assert takes("No call.")
    assert takes(call.format('"Paris"'))
    assert not takes(call.format("5"))
    xml = tag.model_dump()
    xml["format"]["tags"][0]["content"]["style"] = "qwen_xml"
    with pytest.raises(RequestError, match="not JSON"):
        grammar_text(StructuredOutputs(kind="structural_tag", value=json.dumps(xml)))


def test_a_demanded_call_and_another_constraint_exclude_each_other(ours: Server) -> None:
    body = {
        "messages": QUESTION,
        "tools": [WEATHER],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
    }
    refused = ours.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, "exclude each other" in refused.text) == (400, True)


# --- LMI's requests ---


def test_sampling_parameters_change_the_text(ours: Server) -> None:
    lmi_cases.check_sampling_parameters(ours.http)


def test_lmis_parameters_constrain_the_output(ours: Server) -> None:
    assert re.fullmatch("[xy]{3}", generated(ours.http, guided_regex="[xy]{3}"))
    assert generated(ours.http, guided_choice=["sunny", "rainy"]) in ("sunny", "rainy")
    assert generated(ours.http, guided_grammar='root ::= "yes" | "no"') in ("yes", "no")
    schema = WEATHER["function"]["parameters"]
    described = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    for constraint in ({"guided_json": schema}, {"guided_json": json.dumps(schema)}, {"response_format": described}):
        text = generated(ours.http, **constraint, max_new_tokens=60, logit_bias=COMPACT)
        assert json.loads(text)["city"] in ("Paris", "London")
    text = generated(ours.http, response_format={"type": "json_object"}, max_new_tokens=2, logit_bias=COMPACT)
    assert text.startswith("{")


def test_several_sequences_with_a_constraint_and_the_best_of_them(ours: Server) -> None:
    sampled = {"do_sample": True, "temperature": 2.0, "seed": 3, "guided_regex": "[a-z]{4}"}
    body = {"inputs": "hello", "parameters": {**sampled, "n": 2, "best_of": 4}}
    details = lmi_cases.answer(ours.http, body)["details"]
    others = details["best_of_sequences"]
    assert len(others) == 1
    assert re.fullmatch("[a-z]{4}", others[0]["generated_text"])
    means = [sum(token["log_prob"] for token in one["tokens"]) / len(one["tokens"]) for one in (details, *others)]
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_beams": 4, "length_penalty": 0.2, "early_stopping": True},
        {"num_beams": 2, "length_penalty": 2.0, "early_stopping": "never"},
    ],
)
def test_beam_search_finds_what_transformers_finds(ours: Server, tiny_model: Path, settings: dict[str, Any]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompt = torch.tensor([byte_tokenizer().encode("hello")])
    found = model.generate(prompt, max_new_tokens=12, do_sample=False, **settings)[0, prompt.shape[1] :].tolist()
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 12, **settings}}
    whole = lmi_cases.answer(ours.http, body)
    assert [token["id"] for token in whole["details"]["tokens"]] == found
    assert lmi_cases.lines(ours.http, body)[-1]["generated_text"] == whole["generated_text"]
    cut = lmi_cases.answer(ours.http, {"inputs": "hello" * 50, "parameters": {**settings, "max_new_tokens": 40}})
    assert cut["details"]["generated_tokens"] <= 6
    assert (
        "num_beams to /invocations"
        in ours.http.post("/v1/completions", json={"prompt": "a", "use_beam_search": True}).text
    )


def test_a_prompt_that_is_too_long_reads_as_openais_error(ours: Server) -> None:
    long, limit = "a" * 300, f"This model's maximum context length is {lmi_cases.CONTEXT} tokens. However, "
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [{"role": "user", "content": long}]},
        "completions": {"prompt": long},
        "responses": {"input": long},
    }
    for path, body in bodies.items():
        for more in ({}, {"stream": True}, {"max_output_tokens" if path == "responses" else "max_tokens": 5}):
            reply = ours.http.post(f"/v1/{path}", json=body | more)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["message"].startswith(limit)
    too_many = ours.http.post("/v1/completions", json={"prompt": "a" * 250, "max_tokens": 7}).json()["error"]
    assert (too_many["code"], "requested 257 tokens" in too_many["message"]) == ("context_length_exceeded", True)


def test_what_vllm_does_not_apply_is_refused(ours: Server) -> None:
    lmi_cases.check_refused_parameters(ours.http)


def test_typical_p_is_ignored_with_a_warning(ours: Server) -> None:
    """LangChain's HuggingFaceEndpoint sends it with every request."""
    assert generated(ours.http, typical_p=0.5) == generated(ours.http)
    ours.log_line("typical_p is ignored, because vLLM has no such parameter")


@pytest.mark.parametrize(
    "check",
    [
        lmi_cases.check_several_sequences,
        lmi_cases.check_prompts,
        lmi_cases.check_length,
        lmi_cases.check_prompt_logprobs,
        lmi_cases.check_token_texts,
    ],
)
def test_requests_of_lmi_get_what_the_rolling_batch_gives_them(ours: Server, check: Callable[..., None]) -> None:
    check(ours.http)


# --- Anthropic's API ---

SCHEMA = WEATHER["function"]["parameters"]
LOOK_UP = {"name": "weather", "description": "Tells it", "input_schema": SCHEMA, "strict": True}
LOOKED_UP = [
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "id": "call-1", "name": "weather", "input": {"city": "Paris"}},
]
MESSAGES: list[dict[str, Any]] = [
    {},
    {"system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["."], "top_k": 5},
    {"messages": [*QUESTION, {"role": "assistant", "content": LOOKED_UP}, *QUESTION]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say."}]}], "max_tokens": 3},
    {"tools": [LOOK_UP], "tool_choice": {"type": "none"}},
    {"tools": [{**LOOK_UP, "strict": False}]},
    {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 60},
]


def message_of(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """Return what the answers of both servers must have in common."""
    whole = whole_of(client, "/v1/messages", body)
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in whole["content"]]
    usage = {"input_tokens": 0, "cache_read_input_tokens": 0, **whole["usage"]}
    return {
        "content": blocks,
        "end": (whole.get("stop_reason"), whole.get("stop_sequence")),
        "prompt": usage["input_tokens"] + usage["cache_read_input_tokens"],
        "output": usage["output_tokens"],
    }


def events_of(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = client.post("/v1/messages", json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    return [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: {")]


def streamed(events: list[dict[str, Any]]) -> list[Any]:
    """Return the blocks of a stream: their types and joined pieces; then why it ended."""
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append([event["content_block"]["type"], ""])
        elif event["type"] == "content_block_delta":
            pieces = [value for name, value in event["delta"].items() if name != "type"]
            blocks[event["index"]][1] += pieces[0]
        elif event["type"] == "message_delta":
            blocks.append(event["delta"]["stop_reason"])
    return blocks


@pytest.mark.parametrize("body", MESSAGES)
def test_messages_have_the_answers_of_vllms_server(ours: Server, theirs: httpx.Client, body: dict[str, Any]) -> None:
    body = {"model": "model", "max_tokens": 20, "temperature": 0, "messages": QUESTION, **body}
    messages, streams = from_both(ours, theirs, partial(message_of, body=body), partial(events_of, body=body))
    assert messages[0] == messages[1]
    assert streamed(streams[0]) == streamed(streams[1])
    count = {name: value for name, value in body.items() if name in ("model", "messages", "system", "tools")}
    counts = [client.post("/v1/messages/count_tokens", json=count).json() for client in (ours.http, theirs)]
    assert counts[0]["input_tokens"] == counts[1]["input_tokens"]


def test_anthropics_sdk_reads_calls_of_tools(ours: Server) -> None:
    tool = {**LOOK_UP, "strict": False}  # a strict one brings a constraint of its own
    ask: dict[str, Any] = {"model": "model", "max_tokens": 90, "messages": QUESTION, "tools": [tool]}
    ask["extra_body"] = {"structured_outputs": {"regex": CALL}}
    import anthropic

    with anthropic.Anthropic(base_url=ours.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**ask)
        assert (whole.content[-1].name, set(whole.content[-1].input)) == ("weather", {"city"})
        assert whole.stop_reason == "tool_use"
        with client.messages.stream(**ask) as stream:
            assert set(stream.get_final_message().content[-1].input) == {"city"}
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* > 256 maximum"):
            client.messages.create(model="model", max_tokens=1, messages=[{"role": "user", "content": "a" * 300}])


def test_a_budget_of_thinking_needs_a_parser_and_an_agents_is_ignored_without(ours: Server) -> None:
    agent = {"model": "model", "max_tokens": 5, "messages": QUESTION}
    agent["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    assert ours.http.post("/v1/messages", json=agent).status_code == 200
    ours.log_line("thinking.budget_tokens is ignored")
    refused = ours.http.post("/v1/chat/completions", json={"messages": QUESTION, "thinking_token_budget": 9})
    assert (refused.status_code, "option.reasoning_parser" in refused.text) == (400, True)


# --- OpenAI's SDK ---


# A bias against white space: JSON allows any amount of it, and a random model would fill its answer with it.
COMPACT = {str(token): -100 for token in byte_tokenizer().encode(" \n\t\r")}


class Weather(pydantic.BaseModel):
    city: Literal["Paris", "London"]
    sunny: bool


def test_the_sdk_parses_an_answer(sdk: openai.OpenAI) -> None:
    parsed = sdk.chat.completions.parse(
        model="model",
        messages=QUESTION,  # type: ignore[arg-type]
        response_format=Weather,
        max_tokens=90,
        logit_bias=COMPACT,
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)


def test_the_sdk_streams_a_tool_call(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(
        model="model",
        messages=QUESTION,  # type: ignore[arg-type]
        tools=[WEATHER],  # type: ignore[list-item]
        max_tokens=90,
        extra_body={"structured_outputs": {"regex": CALL}},
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert done[0].name == "weather"
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert set(json.loads(calls[0].function.arguments)) == {"city"}


INSTRUCTOR = """
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel, extra="forbid"):
    city: Literal["Paris", "London"]
    sunny: bool


client = instructor.from_openai(OpenAI(base_url="{url}/v1", api_key="none"), mode=instructor.Mode.TOOLS)
asked = {{"messages": {messages}, "max_tokens": 150, "logit_bias": {bias}, "max_retries": 1}}
print(type(client.chat.completions.create(model="model", response_model=Weather, **asked)).__name__)
"""


def test_instructor_gets_a_value_of_its_class(ours: Server) -> None:
    """It names the function of its class, which does not say `strict`."""
    code = INSTRUCTOR.format(url=ours.url, messages=QUESTION, bias=COMPACT)
    assert ClientScripts({"instructor": ("instructor", code)}).output("instructor").strip() == "Weather"


def test_a_tools_result_goes_back_to_the_model(sdk: openai.OpenAI) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "sunny"},
    ]
    answer = sdk.chat.completions.create(model="model", messages=messages, tools=[WEATHER], max_tokens=5)  # type: ignore[arg-type,call-overload]
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_the_template_chose_the_parser(ours: Server) -> None:
    assert any("tool_call_parser=hermes" in line for line in ours.lines)


def test_the_parsers_that_templates_mean_are_vllms() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    from handlers.chats.templates import REASONING_PARSERS, TOOL_PARSERS, TRACES

    named = {*TOOL_PARSERS, *(name for name, _ in TRACES)}
    assert named <= {*ToolParserManager.list_registered()}
    assert {*REASONING_PARSERS} <= {*ReasoningParserManager.list_registered()}
