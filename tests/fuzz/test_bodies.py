"""Any body at any route is a request or a RequestError, and every request that is served has an answer."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from dialect_helpers import DELTAS, answer
from fuzzing import NUMBERS, NUMERALS, SCALARS, TEXTS, VALUES, budget, objects, words
from hypothesis import given
from hypothesis import strategies as st

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import Feature
from lmi_server.contract.protocol import Input
from lmi_server.dialects import ServedModel, anthropic, parse, routes
from lmi_server.dialects.anthropic import route_names as of_anthropic
from lmi_server.dialects.anthropic.request import MESSAGE_FIELDS
from lmi_server.dialects.errors import error_reply
from lmi_server.dialects.kserve import as_lmi_request, as_tensors
from lmi_server.dialects.kserve import route_names as of_kserve
from lmi_server.dialects.lmi.request import BODY, PARAMETERS
from lmi_server.dialects.openai import CHAT_FIELDS, COMPLETION_FIELDS, embeddings
from lmi_server.dialects.openai.responses import RESPONSE_FIELDS
from lmi_server.dialects.vllm import tokens

MODELS = [
    ServedModel(name="model"),
    ServedModel(name="model", served_names=("tiny",), adapters={"a"}, features=frozenset(Feature), max_model_len=64),
    ServedModel(name="model", output_formatter="jsonlines", tgi_compat=True),
    ServedModel(name="model", async_service=True, features=frozenset(Feature)),
]
SERVED = st.sampled_from(MODELS)
TYPES = words(
    "text image_url image tool_use tool_result thinking input_text output_text function message function_call "
    "function_call_output reasoning document json_schema json_object enabled disabled auto any tool none base64 url "
    "regex grammar"
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])
PARTS = objects(
    {
        **dict.fromkeys(("text", "thinking", "signature", "id", "tool_use_id", "name"), TEXTS),
        **dict.fromkeys(("image_url", "source", "input", "content", "data"), VALUES),
    },
    {"type": TYPES},
)
MESSAGES = objects(
    {
        **dict.fromkeys(("tool_call_id", "name", "reasoning_content", "arguments", "call_id", "output"), TEXTS),
        **dict.fromkeys(("tool_calls", "summary", "id"), VALUES),
        "type": TYPES,
    },
    {"role": ROLES, "content": TEXTS | st.lists(PARTS, max_size=2) | VALUES},
)
TOOLS = objects(
    {
        "function": objects({"parameters": VALUES, "description": TEXTS}, {"name": TEXTS}),
        **dict.fromkeys(("name", "description"), TEXTS),
        **dict.fromkeys(("parameters", "input_schema"), VALUES),
    },
    {"type": TYPES},
)
"""Of all dialects together: each of them gets those of the others, too."""
KNOWN = {
    "messages": st.lists(MESSAGES | PARTS, min_size=1, max_size=3),
    "input": st.lists(MESSAGES | PARTS, min_size=1, max_size=3) | TEXTS,
    "tools": st.lists(TOOLS, max_size=2),
    "tool_choice": objects({"name": TEXTS, "function": VALUES}, {"type": TYPES}) | TYPES,
    "response_format": objects({"json_schema": VALUES, "schema": VALUES}, {"type": TYPES}),
    "thinking": objects({"budget_tokens": NUMBERS}, {"type": TYPES}),
    "text": objects({"format": objects({"schema": VALUES}, {"type": TYPES})}),
    "system": st.lists(PARTS, max_size=2) | TEXTS,
    "parameters": objects(dict.fromkeys(PARAMETERS, SCALARS)),
    "inputs": TEXTS,
    "prompt": TEXTS | st.lists(TEXTS | NUMBERS, max_size=3),
    "max_tokens": st.integers(1, 5),
    "stream": st.booleans(),
    "model": st.just("model"),
    "n": st.integers(1, 3),
}


def of_table(table: Mapping[str, Any], *required: str) -> st.SearchStrategy[dict[str, Any]]:
    """Return bodies of the fields in a dialect's table."""
    return objects({name: KNOWN.get(name, SCALARS) for name in table}, {name: KNOWN[name] for name in required})


GENERATING = {
    routes.CHAT_COMPLETIONS: of_table(CHAT_FIELDS, "messages"),
    routes.COMPLETIONS: of_table(COMPLETION_FIELDS, "prompt"),
    routes.RESPONSES: of_table(RESPONSE_FIELDS, "input"),
    of_anthropic.MESSAGES: of_table(MESSAGE_FIELDS, "messages", "max_tokens"),
    routes.INVOCATIONS: of_table({**BODY, "messages": 0, "prompt": 0, "max_tokens": 0}, "inputs", "parameters"),
    routes.TGI: of_table(BODY, "inputs", "parameters"),
    routes.GENERATE: of_table(BODY, "inputs", "parameters"),
    routes.GENERATE_STREAM: of_table(BODY, "inputs", "parameters"),
    of_kserve.V2_GENERATE: objects({**dict.fromkeys(PARAMETERS, SCALARS), "id": VALUES}, {"text_input": TEXTS}),
    of_kserve.V2_GENERATE_STREAM: objects({"parameters": KNOWN["parameters"]}, {"text_input": TEXTS}),
}
READERS = {
    routes.TOKENIZE: tokens.parse_tokenize,
    routes.DETOKENIZE: tokens.parse_detokenize,
    of_anthropic.COUNT_TOKENS: anthropic.parse_count,
}
HEADERS = st.fixed_dictionaries(
    {"content-type": st.just("application/json")},
    optional={
        "accept": st.sampled_from(["*/*", "text/event-stream", "application/jsonlines", "x/y", ",;q="]),
        "x-amzn-sagemaker-adapter-identifier": TEXTS,
        "inference-header-content-length": st.sampled_from(["0", "-1", "²", "5", "9" * 4400]),
        "user-agent": st.just("x hf_hub/1"),
    },
)


def answered(request: Input, served: ServedModel) -> None:
    """Parse a request as a worker does, and write its answer."""
    try:
        exchange = parse(request, served)
    except RequestError as error:
        status, _, body = error_reply(request.route, error)
        assert status < 500
        msgspec.json.decode(body)
        return
    assert exchange.requests
    answer(exchange, *([DELTAS] * len(exchange.requests)))
    exchange.error_chunk(RequestError("it failed"))


@pytest.mark.parametrize("route", GENERATING)
@budget(60)
@given(st.data())
def test_bodies_of_the_fields_of_a_dialect(route: str, data: st.DataObject) -> None:
    body = json.dumps(data.draw(GENERATING[route])).encode()
    answered(Input(route, data.draw(HEADERS), [("data", body)]), data.draw(SERVED))


@pytest.mark.parametrize("route", READERS)
@budget(40)
@given(st.data())
def test_bodies_from_which_nothing_is_generated(route: str, data: st.DataObject) -> None:
    table = {
        routes.TOKENIZE: tokens.TOKENIZE_FIELDS,
        routes.DETOKENIZE: tokens.DETOKENIZE_FIELDS,
        of_anthropic.COUNT_TOKENS: MESSAGE_FIELDS,
    }[route]
    body = json.dumps(data.draw(of_table(table))).encode()
    with contextlib.suppress(RequestError):
        READERS[route](Input(route, {}, [("data", body)]), data.draw(SERVED))


@budget(60)
@given(of_table(embeddings.FIELDS) | VALUES)
def test_bodies_of_embeddings(body: Any) -> None:
    if isinstance(body, dict):
        with contextlib.suppress(RequestError):
            embeddings.parse(body)


# --- bytes that are hardly JSON ---

ALL_ROUTES = st.sampled_from([*GENERATING, of_kserve.INFER, *sorted(routes.POOLING_ROUTES), routes.PREDICTIONS])
NAMES = st.sampled_from([b"inputs", b"stream", b"parameters", b"max_tokens", b"n", b"messages", b"input", b"a"])
KINDS = st.sampled_from(
    [
        "application/json",
        "text/plain",
        "text/csv",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "a/b",
        "",
    ]
)
NEARLY = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b'"\\ud800"', b"\xff\xfe{", b"\xef\xbb\xbf{}", b"nan", b"NaN"]),
    st.builds(lambda value, at: json.dumps(value).encode()[:at], VALUES, st.integers(0, 20)),
    st.builds(lambda name, number: b'{"inputs": "a", "%b": %b}' % (name, number), NAMES, NUMERALS),
    st.builds(lambda name, value: b'{"%b": "%b", "%b": 1}' % (name, value, name), NAMES, st.binary(max_size=4)),
)


@budget(150)
@given(ALL_ROUTES, KINDS, NEARLY, SERVED)
def test_bodies_that_are_hardly_json(route: str, kind: str, body: bytes, served: ServedModel) -> None:
    answered(Input(route, {"content-type": kind}, [("data", body)]), served)


# --- the Open Inference Protocol ---

DATATYPES = st.sampled_from(["BOOL", "UINT8", "INT64", "UINT64", "FP16", "FP32", "FP64", "BYTES", "BF16", ""])
SIZES = st.sampled_from([0, 1, 1, 2, 3, -1, 2**63, 10**30])
TENSORS = objects(
    {
        "parameters": objects({"binary_data_size": NUMBERS | st.integers(0, 9), "shared_memory_region": TEXTS}),
        "data": st.lists(TEXTS | NUMBERS | st.lists(NUMBERS | TEXTS, max_size=2), max_size=3),
    },
    {
        "name": st.sampled_from(["text_input", "prompt", "max_tokens", "temperature", "stop", "a"]),
        "datatype": DATATYPES,
        "shape": st.lists(SIZES, max_size=3),
    },
)
OUTPUTS = objects({"parameters": objects({"binary_data": SCALARS})}, {"name": TEXTS | st.just("output")})
INFER = objects(
    {
        "id": TEXTS,
        "parameters": objects(dict.fromkeys(("binary_data_output", "sampling_parameters", "max_tokens"), SCALARS)),
        "outputs": st.lists(OUTPUTS, max_size=2),
    },
    {"inputs": st.lists(TENSORS, min_size=1, max_size=2)},
)
BLOBS = st.one_of(
    st.binary(max_size=12), st.builds(lambda text: struct.pack("<I", len(text)) + text, st.binary(max_size=6))
)


@st.composite
def infer_requests(draw: st.DrawFn) -> Input:
    head, blob = json.dumps(draw(INFER)).encode(), draw(BLOBS)
    length = draw(st.one_of(st.just(str(len(head))), st.sampled_from(["0", "1", "-1", "²", "9" * 4400, ""])))
    return Input(of_kserve.INFER, {"inference-header-content-length": length}, [("data", head + blob)])


@budget(200)
@given(infer_requests(), SERVED)
def test_tensors_for_a_model_that_generates_text(request: Input, served: ServedModel) -> None:
    answered(request, served)


@budget(200)
@given(infer_requests(), st.one_of(VALUES, st.lists(st.lists(NUMBERS)), st.lists(NUMBERS | st.booleans())))
def test_tensors_for_other_models(request: Input, result: Any) -> None:
    with contextlib.suppress(RequestError):
        infer, _ = as_lmi_request(request)
        as_tensors(infer, "model", json.dumps(result).encode())
