from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from dialect_helpers import DELTAS, SERVED, TEXT, answer, generations, outcome, request, serving
from hypothesis import given
from hypothesis import strategies as st

from lmi_server.contract.errors import HandlerError, RequestError, RouteNotFoundError
from lmi_server.contract.generation import BeamSearch, Delta, SamplingParameters, Token, Usage
from lmi_server.contract.protocol import Input
from lmi_server.dialects import Exchange, ServedModel, parse
from lmi_server.dialects.lmi import PARAMETERS

if TYPE_CHECKING:
    from huggingface_hub import InferenceClient

TGI = ServedModel(name="model", tgi_compat=True)


def lmi(stream: bool = False, served: ServedModel = SERVED, **parameters: Any) -> Exchange:
    return parse(request("invocations", {"inputs": "Hello", "parameters": parameters, "stream": stream}), served)


def sampling(**parameters: Any) -> SamplingParameters:
    return lmi(**parameters).requests[0].sampling


def formatted(name: str | None, tgi_compat: bool = False) -> ServedModel:
    return ServedModel(name="model", output_formatter=name, tgi_compat=tgi_compat)


def lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.decode().splitlines()]


def events(data: bytes) -> list[Any]:
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


# --- requests ---


def test_defaults() -> None:
    exchange = parse(request("invocations", {"inputs": "Hello"}), SERVED)
    assert exchange.requests[0].prompt == "Hello"
    assert exchange.requests[0].sampling == SamplingParameters(max_new_tokens=30, fit_context=True)
    assert exchange.requests[0].priority == 3
    assert (exchange.stream, exchange.content_type, exchange.warnings) == (False, "application/json", ())


def test_every_parameter() -> None:
    exchange = lmi(
        max_new_tokens=7,
        do_sample=True,
        temperature=0.7,
        top_k=-1,
        top_p=0.9,
        typical_p=0.95,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed="42",
        stop="END",
        stop_sequences=["END", "\n\n"],
        stop_token_ids=[5, 6],
        include_stop_str_in_output=True,
        ignore_eos_token=True,
        skip_special_tokens=False,
        truncate=100,
        details=True,
        decoder_input_details=True,
        top_n_tokens=2,
        logprobs=1,
    )
    assert exchange.warnings == ()
    assert exchange.requests[0].sampling == SamplingParameters(
        max_new_tokens=7,
        fit_context=True,
        do_sample=True,
        temperature=0.7,
        top_k=0,
        top_p=0.9,
        typical_p=0.95,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=42,
        stop=("END", "\n\n"),
        stop_token_ids=(5, 6),
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        truncate=100,
        logprobs=2,
        prompt_logprobs=0,
    )


@pytest.mark.parametrize(
    ("parameters", "greedy"),
    [
        ({}, True),
        ({"top_p": 0.9}, True),
        ({"temperature": 0.5}, False),
        ({"temperature": 0}, True),
        ({"temperature": 0.5, "do_sample": False}, True),
        ({"do_sample": True}, False),
        ({"do_sample": None, "temperature": None}, True),
    ],
)
def test_sampling_follows_from_do_sample_or_temperature(parameters: dict[str, Any], greedy: bool) -> None:
    assert sampling(**parameters).greedy is greedy


@pytest.mark.parametrize(
    ("parameters", "samples"),
    [
        ({}, True),
        ({"top_k": 5, "n": 2}, True),
        ({"do_sample": False}, False),
        ({"temperature": 0.5}, True),
        ({"temperature": 0}, False),
        ({"num_beams": 2}, False),
    ],
)
def test_a_model_may_sample_unless_the_request_says_how_to_choose(parameters: dict[str, Any], samples: bool) -> None:
    request = Input("invocations", {}, [("data", json.dumps({"inputs": "a", "parameters": parameters}).encode())])
    exchange = parse(request, ServedModel(name="m", samples=True, features=frozenset({"beam_search"})))
    assert all(one.sampling.greedy != samples for one in exchange.requests)


def test_log_probabilities_are_requested_only_if_the_answer_shows_them() -> None:
    assert lmi().requests[0].sampling.logprobs is None
    assert lmi(details=True).requests[0].sampling.logprobs == 0
    assert lmi(stream=True).requests[0].sampling.logprobs == 0
    assert lmi(stream=True, top_n_tokens=3).requests[0].sampling.logprobs == 3
    ineffective = lmi(decoder_input_details=True)
    assert ineffective.requests[0].sampling.prompt_logprobs is None
    assert "decoder_input_details" in ineffective.warnings[0]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b'{"inputs": "\xff"}', "UTF-8"),
        (b"[" * 100_000, "nested"),
        (["Hello"], "a list of 1"),
        ("Hello", "Hello"),
        ({}, "inputs is missing"),
        ({"inputs": None}, "inputs is missing"),
        ({"inputs": ""}, 'inputs: "" is not allowed'),
        ({"inputs": 3}, "inputs: 3 is not allowed"),
        ({"inputs": [{"role": "user", "content": "a"}]}, "or a chat as messages in place of inputs"),
        ({"inputs": {"prompt": "a"}}, "or a chat as messages in place of inputs"),
        ({"inputs": ["a", "b"]}, "send one request for each prompt"),
        ({"inputs": "a", "parameters": []}, "parameters: a list of 0"),
        ({"inputs": "a", "stream": "ja"}, 'stream: "ja" is not allowed; send true or false'),
        ({"inputs": "a", "adapters": ["french", "german"]}, "adapters: a list of 2 is not allowed"),
    ],
)
def test_bad_bodies(body: Any, expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(request("predictions", body), SERVED)
    assert expected in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("max_new_tokens", "12 tokens"),
        ("max_new_tokens", 10**400),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.01),
        ("typical_p", 0),
        ("min_p", 2),
        ("top_k", -2),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.5),
        ("seed", "4x"),
        ("seed", 1.5),
        ("seed", 2**64),
        ("stop", 3),
        ("stop", [""]),
        ("stop_sequences", ["a", 1]),
        ("stop_token_ids", 3),
        ("stop_token_ids", [-1]),
        ("ignore_eos", 2),
        ("details", "maybe"),
        ("top_n_tokens", 21),
        ("truncate", 0),
        ("n", 2),
        ("best_of", 2),
        ("num_beams", 4),
        ("grammar", {"type": "json"}),
        ("adapter_id", 3),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_bad_parameters_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        lmi(**{name: value})
    assert caught.value.message.startswith(f"parameters.{name}")
    assert "; " in caught.value.message


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("max_new_tokens", "8", "max_new_tokens", 8),
        ("temperature", "0.5", "temperature", 0.5),
        ("temperature", "0", "temperature", 0.0),
        ("top_k", "5", "top_k", 5),
        ("ignore_eos", "yes", "ignore_eos", True),
        ("ignore_eos", "OFF", "ignore_eos", False),
        ("skip_special_tokens", "no", "skip_special_tokens", False),
        ("skip_special_tokens", "0", "skip_special_tokens", False),
        ("do_sample", 1, "do_sample", True),
    ],
)
def test_numbers_and_switches_are_read_from_texts_as_by_lmi(name: str, value: Any, field: str, expected: Any) -> None:
    assert getattr(sampling(**{name: value}), field) == expected
    assert parse(request("invocations", {"inputs": "a", "stream": "true"}), SERVED).stream
    assert not parse(request("invocations", {"inputs": "a", "stream": "no"}), SERVED).stream


def test_one_sequence_may_be_asked_for() -> None:
    assert lmi(n=1, best_of=1, num_beams=1, grammar=None, use_beam_search=False).warnings == ()
    assert sampling(max_new_tokens=8.0).max_new_tokens == 8


SEARCHES = ServedModel(name="model", features=frozenset({"beam_search"}))


def searched(**parameters: Any) -> Exchange:
    return lmi(served=SEARCHES, **parameters)


def test_beam_search() -> None:
    exchange = searched(num_beams=4, length_penalty=0.5, early_stopping="never", do_sample=False, max_new_tokens=3)
    (found,) = exchange.requests
    assert found.sampling.beams == BeamSearch(width=4, length_penalty=0.5, early_stopping="never")
    assert "details" in json.loads(answer(exchange, DELTAS))
    assert exchange.warnings == ()
    by_vllms_names = searched(use_beam_search=True, best_of=3).requests[0].sampling
    assert (by_vllms_names.beams, len(searched(use_beam_search=True, best_of=3).requests)) == (BeamSearch(width=3), 1)
    without = searched(num_beams=1, length_penalty=2)
    assert without.requests[0].sampling.beams is None
    assert without.warnings == ("parameters.length_penalty has no effect without num_beams and is ignored",)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"num_beams": 2, "temperature": 0.5}, "parameters.temperature does not go with beam search"),
        ({"num_beams": 2, "do_sample": True}, "parameters.do_sample does not go with beam search"),
        ({"num_beams": 2, "stop": ["a"]}, "parameters.stop does not go with beam search"),
        ({"num_beams": 2, "n": 2}, "parameters.n does not go with beam search"),
        ({"num_beams": 11}, "parameters.num_beams: 11 is not allowed; send an integer from 1 to 10"),
        ({"use_beam_search": True}, "parameters.use_beam_search needs num_beams"),
    ],
)
def test_what_does_not_go_with_beam_search(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        searched(**parameters)


def test_unknown_parameters_are_warned_of_with_the_nearest_known_one() -> None:
    body = {"inputs": "Hello", "input": 1, "parameters": {"max_new_token": 5, "use_cache": True, "stream": True}}
    warnings = parse(request("invocations", body), SERVED).warnings
    assert warnings[0] == "input is not known and is ignored; did you mean inputs?"
    assert "parameters.max_new_token is not known and is ignored; did you mean max_new_tokens?" in warnings
    assert "parameters.use_cache has no effect on the text and is ignored" in warnings
    assert any("parameters.stream" in warning for warning in warnings)


def test_a_thousand_unknown_parameters_are_counted() -> None:
    warnings = lmi(**{f"x{i}": i for i in range(1000)}).warnings
    assert len(warnings) == 9
    assert warnings[-1] == "992 more unknown fields are ignored"


def test_plain_text_is_the_prompt() -> None:
    exchange = parse(request("invocations", "Grüße".encode(), content_type="text/plain; charset=utf-8"), SERVED)
    assert exchange.requests[0].prompt == "Grüße"
    for bad in (b"", b"\xff"):
        with pytest.raises(RequestError):
            parse(request("invocations", bad, content_type="text/plain"), SERVED)


def test_content_types() -> None:
    for kind in ("", "application/json; charset=utf-8", "APPLICATION/JSON"):
        assert parse(request("invocations", {"inputs": "a"}, content_type=kind), SERVED).requests
    with pytest.raises(RequestError, match="image/png"):
        parse(request("invocations", {"inputs": "a"}, content_type="image/png"), SERVED)


def test_csv_has_the_prompt_in_a_column() -> None:
    def prompt(body: str) -> Any:
        return parse(request("invocations", body.encode(), content_type="text/csv"), SERVED).requests[0].prompt

    assert prompt("inputs\nHello there\n") == "Hello there"
    assert prompt('id,inputs\n1,"one, two"\n') == "one, two"
    for body, message in {
        "inputs\na\nb\n": "send one request for each prompt",
        "inputs\n": "inputs",
        "text\na\n": "begin with a line `inputs`",
        'inputs\n"a\n': "not valid CSV",
        "question,context\na,b\n": "inputs",
    }.items():
        with pytest.raises(RequestError, match=message):
            prompt(body)


@pytest.mark.parametrize("kind", ["application/octet-stream", "application/x-www-form-urlencoded"])
def test_content_types_that_clients_send_by_default(kind: str) -> None:
    for body in (b'{"inputs": "a"}', b' \n{"inputs": "a"}', b'\xef\xbb\xbf{"inputs": "a"}'):
        assert parse(request("invocations", body, content_type=kind), SERVED).requests
    with pytest.raises(RequestError, match=f'Content-Type: "{kind}" is not supported; send application/json'):
        parse(request("invocations", b"inputs=a", content_type=kind), SERVED)


def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    assert parse(request("invocations", b'\xef\xbb\xbf{"inputs": "a"}'), SERVED).requests


def test_the_priority_is_that_of_the_message() -> None:
    received = msgspec.structs.replace(request("invocations", {"inputs": "a"}), priority=1)
    assert parse(received, SERVED).requests[0].priority == 1


def test_an_unknown_route() -> None:
    with pytest.raises(RouteNotFoundError):
        parse(request("audio/speech", {"inputs": "a"}), SERVED)


@pytest.mark.parametrize("route", ["embeddings", "score", "rerank"])
def test_a_route_of_models_that_do_not_generate(route: str) -> None:
    with pytest.raises(RequestError, match=f"this model generates text and does not serve /{route}"):
        parse(request(route, {"input": "a"}), SERVED)


# --- answers ---


def test_json() -> None:
    assert answer(lmi(), DELTAS) == b'{"generated_text":" Par\xc3\xads\xe2\x80\xa8"}'
    assert json.loads(answer(lmi(return_full_text=True), DELTAS)) == {"generated_text": "Hello" + TEXT}


def test_json_details() -> None:
    body = json.loads(answer(lmi(details=True, decoder_input_details=True, top_n_tokens=1), DELTAS))
    tokens = [
        {"id": 10, "text": " Par", "log_prob": -0.5},
        {"id": 12, "text": "", "log_prob": -0.25},
        {"id": 13, "text": "ís\u2028", "log_prob": 0.0},
        {"id": 2, "text": "", "log_prob": -0.125, "special_token": True},
    ]
    assert body == {
        "generated_text": TEXT,
        "details": {
            "finish_reason": "eos_token",
            "generated_tokens": 4,
            "inputs": "Hello",
            "tokens": tokens,
            "prefill": [{"id": 1, "text": "Hel", "log_prob": None}, {"id": 2, "text": "lo", "log_prob": -1.5}],
            "top_tokens": [
                [tokens[0]],
                [{"id": 12, "text": "\ufffd", "log_prob": -0.25}],
                [tokens[2]],
                [],
            ],
        },
    }


def test_one_token_appears_once() -> None:
    only = Delta("He", (Token(5, "He", -1.0),), "length", Usage(1, 1))
    assert json.loads(answer(lmi(), [only])) == {"generated_text": "He"}
    assert lines(answer(lmi(stream=True), [only])) == [
        {"token": {"id": 5, "text": "He", "log_prob": -1.0}, "generated_text": "He"}
    ]


def test_jsonlines() -> None:
    exchange = lmi(stream=True)
    assert exchange.content_type == "application/jsonlines"
    assert lines(answer(exchange, DELTAS)) == [
        {"token": {"id": 10, "text": " Par", "log_prob": -0.5}},
        {"token": {"id": 12, "text": "", "log_prob": -0.25}},
        {"token": {"id": 13, "text": "ís\u2028", "log_prob": 0.0}},
        {"token": {"id": 2, "text": "", "log_prob": -0.125, "special_token": True}, "generated_text": TEXT},
    ]


def test_jsonlines_details_are_on_the_last_line() -> None:
    sent = lines(answer(lmi(stream=True, details=True, return_full_text=True), DELTAS))
    assert [sorted(line) for line in sent[:-1]] == [["token"]] * 3
    assert sent[-1]["generated_text"] == "Hello" + TEXT
    assert sent[-1]["details"] == {"finish_reason": "eos_token", "generated_tokens": 4, "inputs": "Hello"}


def test_several_tokens_in_a_step_and_text_without_a_token() -> None:
    deltas = [
        Delta("ab", (Token(1, "a", -1.0), Token(2, "b", -2.0))),
        Delta("", ()),
        Delta("c", (Token(3, "cST", -3.0), Token(4, "OP", -4.0))),  # a stop sequence was cut
        Delta("!", (), "stop_sequence", Usage(1, 4)),
    ]
    sent = lines(answer(lmi(stream=True), deltas))
    assert [(line["token"]["id"], line["token"]["text"]) for line in sent] == [
        (1, "a"),
        (2, "b"),
        (3, ""),
        (4, "c"),
        (-1, "!"),
    ]
    assert sent[-1]["generated_text"] == "abc!"
    assert answer(lmi(stream=True, served=formatted("sse")), deltas).count(b"data: ") == 5


@pytest.mark.parametrize(
    ("formatter", "tgi_compat", "stream", "accept", "streams", "content_type"),
    [
        (None, False, False, "*/*", False, "application/json"),
        (None, False, True, "*/*", True, "application/jsonlines"),
        (None, False, True, "text/event-stream", True, "text/event-stream"),
        (None, False, False, "text/event-stream", False, "application/json"),
        (None, True, True, "*/*", True, "text/event-stream"),
        (None, True, False, "*/*", False, "application/json"),
        ("json", False, True, "*/*", False, "application/json"),
        ("jsonlines", False, False, "text/event-stream", True, "application/jsonlines"),
        ("sse", False, False, "*/*", True, "text/event-stream"),
        ("sse_chat", False, False, "*/*", False, "application/json"),
        ("unheard", False, True, "*/*", True, "application/jsonlines"),
    ],
)
def test_which_form_the_answer_has(
    formatter: str | None, tgi_compat: bool, stream: bool, accept: str, streams: bool, content_type: str
) -> None:
    received = request("invocations", {"inputs": "Hello", "stream": stream}, accept=accept)
    exchange = parse(received, formatted(formatter, tgi_compat))
    assert (exchange.stream, exchange.content_type) == (streams, content_type)
    assert bool(exchange.warnings) == (formatter == "unheard")


def test_sse() -> None:
    sent = events(answer(lmi(served=formatted("sse")), DELTAS))
    assert sent == lines(answer(lmi(stream=True), DELTAS))


def test_no_line_is_split_by_readers_of_unicode_lines() -> None:
    ends = "a\u2028b\u2029c\x85d\r\ne\x0bf\x1cg"
    delta = Delta(ends, (Token(1, ends, -1.0),), "length", Usage(1, 1))
    sent = lines(answer(lmi(stream=True), [delta]))
    assert sent[0]["generated_text"] == ends


@given(generations(), st.booleans(), st.sampled_from(["json", "jsonlines", "sse"]))
def test_a_stream_says_the_same_as_a_whole_answer(deltas: list[Delta], tgi: bool, formatter: str) -> None:
    whole = json.loads(answer(lmi(details=True, served=formatted("json", tgi)), deltas))
    whole = whole[0] if tgi else whole
    data = answer(lmi(details=True, served=formatted(formatter, tgi)), deltas)
    if formatter == "json":
        assert whole["generated_text"] == "".join(delta.text for delta in deltas)
        return
    sent = lines(data) if formatter == "jsonlines" else events(data)
    assert "".join(line["token"]["text"] for line in sent) == whole["generated_text"] == sent[-1]["generated_text"]
    assert [line["token"] for line in sent if line["token"]["id"] >= 0] == whole["details"]["tokens"]
    assert sent[-1]["details"]["finish_reason"] == whole["details"]["finish_reason"] == deltas[-1].finish_reason
    assert not any(line.get("generated_text") for line in sent[:-1])


def test_a_stream_that_fails_ends_in_an_error() -> None:
    exchange = lmi(stream=True)
    data = exchange.add(0, DELTAS[0]) + exchange.error_chunk(HandlerError("the engine broke"))
    error = lines(data)[-1]
    assert (error["error"], error["code"]) == ("the engine broke", 424)


# --- text-generation-inference's paths ---


def tgi(route: str, served: ServedModel = SERVED, stream: bool | None = None, **parameters: Any) -> Exchange:
    body = {"inputs": "Hello", "parameters": parameters} | ({} if stream is None else {"stream": stream})
    return parse(request(route, body), served)


@pytest.mark.parametrize("served", [SERVED, TGI, formatted("jsonlines"), formatted("none")])
def test_whole_answers_of_tgi(served: ServedModel) -> None:
    assert json.loads(answer(tgi("generate", served), DELTAS)) == {"generated_text": TEXT}
    assert json.loads(answer(tgi("generate", served, stream=True), DELTAS)) == {"generated_text": TEXT}
    assert json.loads(answer(tgi("tgi", served), DELTAS)) == [{"generated_text": TEXT}]
    details = json.loads(answer(tgi("generate", served, details=True, seed=7), DELTAS))["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", 4, 7)
    assert details["tokens"][0] == {"id": 10, "text": " Par", "logprob": -0.5, "special": False}


@pytest.mark.parametrize("served", [SERVED, TGI, formatted("json")])
@pytest.mark.parametrize(("route", "stream"), [("generate_stream", None), ("generate_stream", False), ("tgi", True)])
def test_streams_of_tgi(route: str, stream: bool | None, served: ServedModel) -> None:
    exchange = tgi(route, served, stream)
    assert exchange.content_type.startswith("text/event-stream")
    *lines, last = events(answer(exchange, DELTAS))
    assert lines[0]["token"] == {"id": 10, "text": " Par", "logprob": -0.5, "special": False}
    assert [line["generated_text"] for line in lines] == [None] * 3
    assert (last["index"], last["generated_text"], last["details"]) == (4, TEXT, None)
    with_details = events(answer(tgi("generate_stream", served, details=True), DELTAS))
    assert with_details[-1]["details"]["finish_reason"] == "eos_token"


def test_an_adapter_on_the_paths_of_tgi() -> None:
    served = ServedModel(name="model", adapters={"french"})
    assert tgi("generate", served, adapter_id="french").requests[0].adapter == "french"


# --- huggingface_hub ---


@contextmanager
def client_of(served: ServedModel, breaks: bool = False) -> Iterator[InferenceClient]:
    from huggingface_hub import InferenceClient

    with serving(served, DELTAS, breaks) as url, InferenceClient(base_url=f"{url}/invocations") as client:
        yield client


@pytest.mark.parametrize("served", [TGI, SERVED, formatted("jsonlines")])
def test_inference_client_streams_from_invocations(served: ServedModel) -> None:
    with client_of(served) as client:
        sent = list(client.text_generation("Hello", stream=True, details=True, top_n_tokens=2, seed=7))
        texts = list(client.text_generation("Hello", stream=True, max_new_tokens=4))
    assert "".join(texts) == "".join(output.token.text for output in sent) == TEXT
    assert [output.index for output in sent] == [1, 2, 3, 4]
    assert [output.token.special for output in sent] == [False, False, False, True]
    assert [output.token.logprob for output in sent] == [-0.5, -0.25, 0.0, -0.125]
    assert [top.text for top in sent[0].top_tokens] == [" Par", " Lon"]
    assert all(output.generated_text is None and output.details is None for output in sent[:-1])
    assert sent[-1].generated_text == TEXT
    details = sent[-1].details
    assert (details.finish_reason, details.generated_tokens, details.input_length, details.seed) == (
        "eos_token",
        4,
        2,
        7,
    )


@pytest.mark.parametrize("served", [TGI, SERVED, formatted("jsonlines")])
def test_inference_client_reads_a_whole_answer_from_invocations(served: ServedModel) -> None:
    with client_of(served) as client:
        assert client.text_generation("Hello") == TEXT
        output = client.text_generation("Hello", details=True, decoder_input_details=True, seed=7)
    assert output.generated_text == TEXT
    assert (output.details.finish_reason, output.details.generated_tokens, output.details.seed) == ("eos_token", 4, 7)
    first = output.details.tokens[0]
    assert (first.id, first.text, first.logprob) == (10, " Par", -0.5)
    assert [token.text for token in output.details.prefill] == ["Hel", "lo"]


def test_inference_client_reads_plain_lmi() -> None:
    with client_of(SERVED) as client:
        assert client.text_generation("Hello", stop=["END"], do_sample=True, temperature=0.7) == TEXT


@pytest.mark.parametrize("served", [TGI, SERVED])
def test_inference_client_raises_if_a_stream_breaks(served: ServedModel) -> None:
    from huggingface_hub.errors import UnknownError

    with client_of(served, breaks=True) as client:
        stream = client.text_generation("Hello", stream=True)
        with pytest.raises(UnknownError, match="the engine broke"):
            list(stream)


# --- anything at all ---

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ANY_PARAMETERS = st.dictionaries(st.sampled_from(sorted(PARAMETERS)) | st.text(max_size=4), JSON, max_size=4)


@given(
    JSON
    | st.fixed_dictionaries({"inputs": JSON}, optional={"parameters": JSON, "stream": JSON})
    | st.fixed_dictionaries({"inputs": st.just("Hello"), "parameters": ANY_PARAMETERS})
)
def test_any_json_is_answered_or_refused(body: Any) -> None:
    assert outcome(request("invocations", body))


@given(st.binary(max_size=40), st.sampled_from(["invocations", "predictions", "completions", "chat/completions"]))
def test_any_bytes_are_answered_or_refused(body: bytes, route: str) -> None:
    for kind in ("", "application/json", "text/plain", "text/csv"):
        assert outcome(Input(route, {"content-type": kind}, [("data", body)]))


# --- text alone ---


def test_text_alone() -> None:
    assert answer(lmi(served=formatted("none")), DELTAS).decode() == TEXT
    assert answer(lmi(served=formatted("none"), return_full_text=True), DELTAS).decode() == "Hello" + TEXT


def test_text_alone_as_a_stream() -> None:
    exchange = lmi(stream=True, served=formatted("none"), return_full_text=True)
    assert (exchange.stream, exchange.content_type) == (True, "text/plain; charset=utf-8")
    assert answer(exchange, DELTAS).decode() == "Hello" + TEXT


def test_an_error_in_a_stream_of_text_stands_on_a_line_of_its_own() -> None:
    text, _, error = lmi(stream=True, served=formatted("none")).error_chunk(HandlerError("broken")).partition(b"\n")
    assert text == b""
    assert json.loads(error)["message"] == "broken"
