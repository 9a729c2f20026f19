"""Formatters in a model.py beside a built-in handler, over HTTP."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from growth import assert_linear
from paths import MODEL_CODE
from server_helpers import Server, make_model, running

from handlers.own_code.answer_objects import StreamEvent, events

CODE = MODEL_CODE


def make(directory: Path, code: str, **options: str) -> Path:
    make_model(directory, **options)
    shutil.copy(CODE / f"{code}.py", directory / "model.py")
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model for each form of formatters."""
    store = tmp_path_factory.mktemp("formatters")
    make(store / "newer", "formatters")
    make(store / "with_id", "old_formatters", output_formatter="with_id")
    make(store / "without_id", "old_formatters", output_formatter="without_id")
    make(store / "whole", "old_formatters", output_formatter="whole")
    make(store / "body", "body_formatter")
    make(store / "option", "formatters", output_formatter="json", input_formatter="parse")
    make_model(store / "text", output_formatter="none")
    make(store / "adapted", "body_formatter", enable_lora="true")
    make_adapter(store / "adapted" / "adapters" / "plain")
    half = make_adapter(store / "adapted" / "adapters" / "half") / "model.py"
    half.write_text((CODE / "old_formatters.py").read_text() + "\nwhole.is_output_formatter = True\n")
    shutil.copy(CODE / "formatters.py", make_adapter(store / "adapted" / "adapters" / "own") / "model.py")
    make(store / "completion", "completion_formatter")
    (store / "completion" / "wording.py").write_text("def shout(text): return text.upper()\n")
    make(store / "events", "event_formatters", async_mode="true")
    make(store / "lines", "event_formatters", output_formatter="replace")
    make(store / "replaced", "event_formatters", async_mode="true", output_formatter="replace")
    make(store / "wrapped", "custom_handler")
    make(store / "instead", "custom_handler", own_engine="true")
    with running("--model-store", store, workers=14) as server:
        yield server


def make_adapter(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def test_an_input_formatter_makes_the_request_and_an_output_formatter_the_answer(server: Server) -> None:
    answer = server.http.post("/predictions/newer", json={"question": "a b"}, headers={"X-Greeting": "hi"})
    assert (answer.status_code, answer.text) == (200, "hi a b a (length)")
    assert server.http.post("/predictions/newer", json={"question": "a b"}).text == "hello a b a (length)"


def test_an_output_formatter_is_called_until_it_has_read_each_token_of_a_stream(server: Server) -> None:
    answer = server.http.post("/predictions/newer", json={"question": "a b", "lines": True})
    assert answer.headers["content-type"] == "application/jsonlines"
    assert answer.text == "0 a first\n1 b\n2 a last\n"


def test_a_formatter_that_raises_fails_its_request_alone(server: Server) -> None:
    before = server.http.post("/predictions/newer", json={"question": "raise"})
    assert before.status_code == 424
    assert "KeyError: 'no such question'" in before.json()["message"]
    assert "model.py:17" in before.json()["message"]
    late = server.http.post("/predictions/newer", json={"question": "break late"})
    assert (late.status_code, late.json()["message"]) == (424, "RuntimeError: no answer to that")
    stream = server.http.post("/predictions/newer", json={"question": "a late", "lines": True})
    *lines, error = stream.text.splitlines()
    assert (stream.status_code, lines) == (200, ["0 a first"])
    assert (json.loads(error)["code"], json.loads(error)["error"]) == (424, "RuntimeError: no answer to that")
    assert server.http.post("/predictions/newer", json={"question": "a"}).status_code == 200


def test_a_formatter_gets_a_number_of_the_servers_own(server: Server) -> None:
    headers = {"x-request-id": "7"}
    first, second = (
        int(server.http.post("/predictions/newer", json={"question": "number"}, headers=headers).text) for _ in range(2)
    )
    assert second == first + 1


def test_openais_paths_keep_openais_form(server: Server) -> None:
    body = {"model": "newer", "prompt": "a b", "max_tokens": 2}
    assert server.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == " a b"


def test_the_form_with_six_arguments(server: Server) -> None:
    body = {"inputs": "a b", "parameters": {"max_new_tokens": 3, "return_full_text": True, "details": True}}
    assert server.http.post("/predictions/with_id", json=body).text == "< a b a|a b a b a|length|3>"
    del body["parameters"]["details"], body["parameters"]["return_full_text"]  # type: ignore[attr-defined]
    assert server.http.post("/predictions/with_id", json={**body, "stream": True}).text == "< a b a| a b a>"


def test_the_form_with_five_arguments(server: Server) -> None:
    body = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}
    assert server.http.post("/predictions/without_id", json=body).text == " A B A"


def test_a_prompt_as_plain_text_is_formatted_too(server: Server) -> None:
    text = server.http.post("/predictions/without_id", content="a b", headers={"Content-Type": "text/plain"}).text
    assert text.startswith(" A B")


def test_the_form_with_the_finished_answer(server: Server) -> None:
    body = {"inputs": "a b", "parameters": {"max_new_tokens": 2}}
    assert server.http.post("/predictions/whole", json=body).json() == {"answer": " a b", "also": " a b"}
    lines = server.http.post("/predictions/whole", json={**body, "stream": True}).text.splitlines()
    assert json.loads(lines[-1])["text"] == " a b"


def test_an_input_formatter_of_bodies_is_for_every_path(server: Server) -> None:
    assert server.http.post("/predictions/body", json={"ask": "a b"}).json() == {"generated_text": " a b"}
    assert server.http.post("/predictions/body", json={"inputs": "c", "parameters": {"max_new_tokens": 1}}).json() == {
        "generated_text": " c"
    }
    answer = server.http.post("/v1/completions", json={"model": "body", "ask": "a b"}).json()
    assert answer["choices"][0]["text"] == " a b"
    wrong = server.http.post("/predictions/body", json={"ask": "wrong"})
    assert wrong.status_code == 424
    assert "returned a list; it has to return a dict" in wrong.json()["message"]


def test_a_body_may_be_asked_for_by_lmis_name(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model")
    head = "from djl_python.input_parser import input_formatter\n@input_formatter\n"
    code = "def mine(decoded_payload, tokenizer=None, **kwargs):\n    return {'inputs': decoded_payload.pop('ask')}\n"
    (directory / "model.py").write_text(head + code)
    with running(directory, workers=1) as server:
        answer = server.http.post("/invocations", json={"ask": "a b"}).json()
        assert answer["generated_text"].startswith(" a b")


def test_the_option_goes_before_the_decorator(server: Server) -> None:
    assert server.http.post("/predictions/option", json={"question": "a b"}).json() == {"generated_text": " a b a"}


def test_of_several_marked_functions_the_first_counts(tmp_path: Path) -> None:
    directory = make(tmp_path / "model", "formatters")
    more = "\n\n@output_formatter\ndef another(output: TextGenerationOutput) -> str:\n    return 'another'\n"
    (directory / "model.py").write_text((directory / "model.py").read_text() + more)
    with running(directory, workers=1) as server:
        assert server.http.post("/invocations", json={"question": "a"}).text == "hello a a a (length)"


def test_none_is_the_text_alone(server: Server) -> None:
    body = {"inputs": "a b", "parameters": {"max_new_tokens": 2, "return_full_text": True}}
    for stream in (False, True):
        answer = server.http.post("/predictions/text", json={**body, "stream": stream})
        assert (answer.headers["content-type"], answer.text) == ("text/plain; charset=utf-8", "a b a b")


def test_an_adapters_own_formatters_are_for_its_requests(server: Server) -> None:
    own = server.http.post("/predictions/adapted?adapter=own", json={"question": "a"})
    assert own.text == "hello own: a own: (length)"
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "own"}
    assert server.http.post("/predictions/adapted", json={"question": "a"}, headers=header).text == own.text
    for body in ({"adapters": "own"}, {"adapters": ["own"]}, {"adapter": "own"}, {"parameters": {"adapter_id": "own"}}):
        named = server.http.post("/predictions/adapted", json={"question": "a", **body})
        assert (body, named.text) == (body, own.text)
    for body in ({"adapters": "own"}, {"adapters": ["own"]}, {"adapter": "own"}, {"parameters": {"adapter_id": "own"}}):
        named = server.http.post("/predictions/adapted", json={"question": "a", **body})
        assert (body, named.text) == (body, own.text)
    plain = server.http.post("/predictions/adapted?adapter=plain", json={"ask": "a"})
    assert plain.json() == {"generated_text": " plain: a"}
    half = server.http.post("/predictions/adapted?adapter=half", json={"ask": "a b"})  # the model's reads for it
    assert half.json() == {"answer": " half: a", "also": " half: a"}
    assert server.http.delete("/models/adapted/adapters/own").status_code == 200
    assert server.http.post("/predictions/adapted?adapter=own", json={"ask": "a"}).status_code == 424


UNUSABLE: dict[str, tuple[str | None, dict[str, str], str]] = {
    "misspelt_output": (
        "old",
        {"output_formatter": "misspelt"},
        "misspelt.*model.py does not define it; allowed: json,",
    ),
    "asynchronous": ("old", {"output_formatter": "asynchronous"}, "a formatter is an ordinary function"),
    "misspelt_input": ("old", {"input_formatter": "misspelt"}, 'option.input_formatter = "misspelt"'),
    "broken": ("def :", {}, "model.py:1.*SyntaxError"),
    "no_file": (None, {"output_formatter": "mine"}, "mine.*there is no .*model.py that defines it"),
}


@pytest.mark.slow
def test_code_that_cannot_be_used_fails_the_model(tmp_path: Path) -> None:
    for name, (code, options, _) in UNUSABLE.items():
        directory = make_model(tmp_path / name, **options)
        if code is not None:
            source = (CODE / "old_formatters.py").read_text() if code == "old" else code
            (directory / "model.py").write_text(source)
    with running("--model-store", tmp_path) as server:
        failures = [server.log_line(r"model (\w+) could not be loaded: (.*)") for _ in UNUSABLE]
    reasons = {failure[1]: failure[2] for failure in failures}
    assert reasons.keys() == UNUSABLE.keys()
    assert {name: reasons[name] for name, (*_, said) in UNUSABLE.items() if not re.search(said, reasons[name])} == {}


def test_an_adapter_whose_code_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    broken = make_adapter(tmp_path / "broken")
    (broken / "model.py").write_text("import no_such_package")
    with running(make_model(tmp_path / "model", enable_lora="true"), workers=1) as server:
        reply = server.http.post("/adapters", params={"name": "broken", "src": str(broken)})
        assert reply.status_code == 424
        assert "no_such_package" in reply.json()["message"]
        assert server.http.get("/adapters").json() == {"adapters": []}


def test_a_formatter_reads_and_changes_the_object_that_lmis_example_reads(server: Server) -> None:
    """It also imports a module from the directory of the model."""
    answer = server.http.post("/predictions/completion", json={"inputs": "a b", "parameters": {"max_new_tokens": 2}})
    answered = answer.json()
    assert answered["choices"][0]["text"] == " A B"
    assert answered["generated_text"] == " A B"
    assert (answered["model"], answered["object"], answered["usage"]["completion_tokens"]) == (
        "completion",
        "text_completion",
        2,
    )
    untouched = server.http.post(
        "/predictions/completion", json={"inputs": "quiet", "parameters": {"max_new_tokens": 1}}
    )
    assert untouched.json() == {"generated_text": " quiet"}
    body = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}
    assert server.http.post("/predictions/completion", json=body).json()["choices"][0]["message"]["content"].isupper()


def test_a_formatter_reads_and_changes_the_same_object_in_a_stream(server: Server) -> None:
    """Each event is a text, as LMI hands it over, with the fields of vLLM's chunk and of ours as attributes."""
    body = {"inputs": "a b", "parameters": {"max_new_tokens": 2}, "stream": True}
    lines = [json.loads(line) for line in server.http.post("/predictions/completion", json=body).text.splitlines()]
    assert "".join(line["choices"][0]["text"] for line in lines) == " A B"
    assert "".join(line["token"]["text"] for line in lines) == " A B"
    assert lines[-1]["generated_text"] == " A B"
    assert [line["choices"][0]["finish_reason"] for line in lines] == [None, "length"]
    assert {line["object"] for line in lines} == {"text_completion"}
    assert [line["usage"] is None for line in lines] == [True, False]


PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"inputs": "a b", "parameters": {"max_new_tokens": 2}}, "text_completion"),
    ({"prompt": "a b", "max_tokens": 2}, "text_completion"),
    ({"messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}, "chat.completion.chunk"),
]


@pytest.mark.parametrize(("body", "kind"), PROMPTS, ids=["inputs", "prompt", "messages"])
def test_a_formatter_of_the_asynchronous_service_gets_vllms_events(
    server: Server, body: dict[str, Any], kind: str
) -> None:
    answer = server.http.post("/predictions/events", json={**body, "stream": True})
    assert answer.headers["content-type"] == "application/jsonlines"
    *lines, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert {(chunk["object"], chunk["model"], chunk["processed_by"]) for chunk in chunks} == {(kind, "lmi", "mine")}


def test_a_text_in_lmis_form_has_log_probabilities_and_usage_in_vllms_events(server: Server) -> None:
    answer = server.http.post("/predictions/events", json={**PROMPTS[0][0], "stream": True})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    *tokens, usage = chunks
    assert [token["choices"][0]["text"] for token in tokens] == [" a", " b"]
    assert [token["choices"][0]["logprobs"]["tokens"] for token in tokens] == [["token_id:0"], ["token_id:1"]]
    assert [token["choices"][0]["finish_reason"] for token in tokens] == [None, "length"]
    assert [token["usage"]["completion_tokens"] for token in tokens] == [1, 2]
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 4)


def test_each_result_of_a_formatter_of_events_is_a_line(server: Server) -> None:
    answer = server.http.post("/predictions/replaced", json={**PROMPTS[0][0], "stream": True})
    *lines, end = answer.text.split("\n")[:-1]
    assert ([json.loads(line) for line in lines], end) == ([{"is_text": True, "has_choices": False}] * 4, "")
    whole = server.http.post("/predictions/replaced", json=PROMPTS[0][0]).json()
    assert whole == {"is_text": False, "has_choices": True}


def test_a_value_in_place_of_the_text_of_an_event_is_framed_as_the_stream_is(server: Server) -> None:
    answer = server.http.post("/predictions/lines", json={**PROMPTS[0][0], "stream": True})
    assert [json.loads(line)["is_text"] for line in answer.text.splitlines()] == [True, True]
    events = {"Accept": "text/event-stream"}
    answer = server.http.post("/predictions/lines", json={**PROMPTS[0][0], "stream": True}, headers=events)
    assert [json.loads(event.removeprefix("data: "))["is_text"] for event in answer.text.split("\n\n")[:-1]] == [
        True
    ] * 2


def test_a_formatter_of_events_that_raises_ends_its_stream_with_an_error(server: Server) -> None:
    body = {"inputs": "a broken", "parameters": {"max_new_tokens": 2}, "stream": True}
    *_, error = server.http.post("/predictions/events", json=body).text.splitlines()
    assert (json.loads(error)["code"], json.loads(error)["error"]) == (424, "RuntimeError: no such event")


def ask(server: Server, model: str, prompt: str, path: str = "/predictions/{}") -> httpx.Response:
    return server.http.post(path.format(model), json={"inputs": prompt, "parameters": {"max_new_tokens": 2}})


def test_a_handle_beside_a_built_in_handler_gets_every_request_first(server: Server) -> None:
    custom = ask(server, "wrapped", "custom")
    assert (custom.status_code, custom.json()) == (200, {"custom_handler_used": True})
    assert ask(server, "wrapped", "stream").text == "one two"
    assert ask(server, "wrapped", "a b").json() == {"generated_text": " a b"}
    failed = ask(server, "wrapped", "raise")
    assert (failed.status_code, failed.json()["error"]) == (424, "Custom handler failed: not today")


def test_a_handle_that_loads_an_engine_of_its_own_keeps_the_built_in_one_from_loading(server: Server) -> None:
    """The first request that it leaves to the built-in handler loads that one."""
    assert ask(server, "instead", "custom").json() == {"custom_handler_used": True}
    assert server.metric("fault_steps", "instead") is None
    assert ask(server, "instead", "a b").json() == {"generated_text": " a b"}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["data:", "data:\n", "id:\n", "{", "}", "a\n", "\n"])
def test_events_are_found_in_linear_time(part: str) -> None:
    assert_linear(
        lambda text: [getattr(StreamEvent(event, lambda _: {}), "token", None) for event in events(text)], part
    )


@pytest.mark.slow
def test_events_end_with_a_blank_line_and_other_lines_with_their_own() -> None:
    assert list(events("data: a\nid: 1\n\nb\n\n\nc\ndata: d")) == ["data: a\nid: 1\n\n", "b\n\n\n", "c\n", "data: d"]
