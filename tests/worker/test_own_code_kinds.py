"""A model.py that serves requests concurrently, step by step, or in the contracts of lmi_server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from own_code_helpers import make_own, serving_own
from server_helpers import Server, running
from waiting import wait_until


def ask(server: Server, case: str = "", body: str = "", **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.http.post("/invocations", content=body, headers={"x-case": case, **names})


class TestAsynchronous:
    @pytest.fixture(scope="class")
    @staticmethod
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        directory = tmp_path_factory.mktemp("asynchronous")
        with serving_own(directory, Path("asynchronous"), async_mode="true") as server:
            yield server

    def test_requests_run_concurrently(self, server: Server) -> None:
        with ThreadPoolExecutor(20) as pool:
            waiting = [pool.submit(ask, server, "wait") for _ in range(16)]
            server.until("lmi_requests_in_flight", 16)
            assert ask(server, "open").text == "opened"
            assert {found.result().text for found in waiting} == {"waited"}

    def test_a_whole_answer(self, server: Server) -> None:
        answer = ask(server, "whole")
        assert (answer.status_code, answer.text) == (200, '{"text": "é"}\n')
        assert (answer.headers["content-type"], answer.headers["x-mine"]) == ("application/json", "1")

    @pytest.mark.parametrize(
        ("case", "status", "error"),
        [("failed", 422, "no good"), ("raise", 424, "not today"), ("type", 424, "Invalid output type: <class 'int'>")],
    )
    def test_a_failure_gives_its_reason(self, server: Server, case: str, status: int, error: str) -> None:
        answer = ask(server, case)
        assert (answer.status_code, answer.json()["error"], answer.json()["code"]) == (status, error, status)

    def test_nothing_is_no_content(self, server: Server) -> None:
        assert ask(server, "none").status_code == 204

    def test_finalize_runs(self, server: Server, tmp_path: Path) -> None:
        assert ask(server, "finalize", x_file=str(tmp_path / "done")).text == "a"
        wait_until((tmp_path / "done").exists, "finalize has run")

    def test_a_stream(self, server: Server) -> None:
        answer = ask(server, "stream", "a b plain c")
        assert answer.headers["content-type"] == "application/jsonlines"
        assert answer.text == '{"token": "a"}\n{"token": "b"}\nplain {"token": "c"}\n'
        assert ask(server, "formatted", "a last b").text == "<a>\n<last>\n"

    @pytest.mark.parametrize(
        ("case", "body", "error"),
        [
            ("stream", "raise", "ValueError: in the stream"),
            ("stream", "failed", "failed in the stream"),
            ("formatted", "raise", "in the formatter"),
        ],
    )
    def test_an_exception_ends_the_stream_with_an_error(self, server: Server, case: str, body: str, error: str) -> None:
        answer = ask(server, case, body)
        assert answer.status_code == 424
        assert answer.json()["error"].endswith(error.rpartition(": ")[2])
        lines = ask(server, case, f"a {body}").text.splitlines()
        assert json.loads(lines[-1])["error"] == error


class TestRolling:
    @pytest.fixture(scope="class")
    @staticmethod
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        directory = tmp_path_factory.mktemp("rolling")
        with serving_own(directory, Path("rolling"), rolling_batch="auto", max_rolling_batch_size=4) as server:
            yield server

    def test_each_request_gets_its_own_words(self, server: Server) -> None:
        bodies = [" ".join(f"{number}-{word}" for word in range(1, 2 + number % 7)) for number in range(32)]
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(lambda body: ask(server, body=body), bodies))
        assert [answer.text for answer in answers] == [f"{body} " for body in bodies]
        assert {answer.headers["content-type"] for answer in answers} == {"text/plain"}
        assert 1 < int(ask(server, body="most").text) <= 4

    def test_an_answer_of_one_step_is_whole(self, server: Server) -> None:
        assert ask(server, body="a").headers["content-length"] == "2"
        assert ask(server, body="a b").headers["transfer-encoding"] == "chunked"

    def test_an_error_ends_its_request_alone(self, server: Server) -> None:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda body: ask(server, body=body), ["a b c", "error", "d e f"]))
        assert [answer.status_code for answer in answers] == [200, 424, 200]
        assert answers[1].json() == {"error": "this one is refused", "code": 424}
        assert "this one is refused" in ask(server, body="a error").text

    def test_after_a_step_that_raised_it_goes_on(self, server: Server) -> None:
        answer = ask(server, body="raise")
        assert (answer.status_code, answer.json()["code"]) == (424, 424)
        assert ask(server, body="a b").text == "a b "


class TestGenerating:
    @pytest.fixture(scope="class")
    @staticmethod
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        with serving_own(tmp_path_factory.mktemp("generating"), Path("generating")) as server:
            yield server

    def test_lmis_protocol(self, server: Server) -> None:
        answer = server.http.post("/invocations", json={"inputs": "a b"})
        assert answer.json() == {"generated_text": " a b"}
        lines = server.http.post("/invocations", json={"inputs": "a b", "stream": True}).text.splitlines()
        assert [json.loads(line)["token"]["text"] for line in lines if "token" in json.loads(line)][:2] == [" a", " b"]

    def test_openais_protocol(self, server: Server) -> None:
        import openai

        client = openai.OpenAI(base_url=f"{server.http.base_url}/v1", api_key="none", http_client=httpx.Client())
        messages = [{"role": "user", "content": "a b c"}]
        chat = client.chat.completions.create(model="model", messages=messages)  # type: ignore[arg-type]
        assert chat.choices[0].message.content == " a b c"
        stream = client.chat.completions.create(model="model", messages=messages, stream=True)  # type: ignore[arg-type]
        assert [chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content] == [
            *(" a", " b", " c")
        ]
        client.close()

    def test_it_has_no_tokens_to_report(self, server: Server) -> None:
        answer = server.http.post("/tokenize", json={"model": "model", "prompt": "a b"})
        assert (answer.status_code, answer.json()["error"]["message"][:24]) == (400, "the model's own code gen")

    def test_it_may_refuse(self, server: Server) -> None:
        answer = server.http.post("/invocations", json={"inputs": "refuse"})
        assert (answer.status_code, answer.json()["message"]) == (424, "refused")


def test_a_function_may_yield_its_answers(tmp_path: Path) -> None:
    code = """
from djl_python import Output

loaded = False

async def handle(inputs):
    global loaded
    if inputs.is_empty():
        loaded = True
        return
    for word in inputs.get_as_string().split():
        yield Output().add(f"{word} {loaded} ")
"""
    with serving_own(tmp_path, code) as server:
        assert ask(server, body="a b").text == "a True b True "


def test_a_typed_handler(tmp_path: Path) -> None:
    # The delay is as long as a slow machine may take to send four requests.
    with serving_own(tmp_path, Path("typed"), batch_size=4, max_batch_delay=60_000, greeting="hello") as server:
        for bodies in (["a", "b", "refuse", "c"], ["d", "e", "f", "g"]):
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda body: ask(server, body=body), bodies))
            assert [answer.status_code for answer in answers] == [424 if body == "refuse" else 200 for body in bodies]
            texts = {answer.text for answer in answers if answer.status_code == 200}
            assert texts == {f"hello 4 {body}" for body in bodies if body != "refuse"}


@pytest.mark.slow
def test_workers_end_in_order(tmp_path: Path) -> None:
    codes = ("asynchronous", "rolling", "generating", "typed")
    for code in codes:
        options = {"rolling_batch": "auto"} if code == "rolling" else {}
        make_own(tmp_path / code, Path(code), greeting="hello", **options)
    with running("--model-store", tmp_path, workers=len(codes)) as server:
        assert server.stop() == 0
        assert not [line for line in server.lines if "Traceback" in line]


def test_another_function_takes_the_requests(tmp_path: Path) -> None:
    with serving_own(tmp_path, Path("contract"), handler="predict") as server:
        assert ask(server, "echo", "a").text == "predicted"


FAILING = {
    "syntax": ("def handle(:", r"model\.py:1: SyntaxError: invalid syntax"),
    "no_module": ("import nowhere\ndef handle(inputs): ...", r"model\.py:1: ModuleNotFoundError: .* 'nowhere'"),
    "no_star": ("from nowhere_else import *", r"model\.py:1: ModuleNotFoundError"),
    "raises": ("def handle(inputs):\n    raise ValueError('no weights')", "ValueError: no weights"),
    "refuses": (
        "from djl_python import Output\ndef handle(inputs):\n    return Output(500, 'no weights')",
        "Failed to initialize model: no weights",
    ),
    "yields": (
        "from djl_python import Output\nasync def handle(inputs):\n    yield Output(500, 'no weights')",
        "Failed to initialize model: no weights",
    ),
    "exits": ("import sys\nhandle = 1\nsys.exit('bye')", r"model\.py:3: SystemExit: bye"),
    "no_function": ("handle = 1", "defines no function handle"),
}


@pytest.mark.slow
def test_a_load_that_fails_names_file_and_line(tmp_path: Path) -> None:
    for name, (code, _) in FAILING.items():
        make_own(tmp_path / name, code)
    with running("--model-store", tmp_path) as server:
        failures = [server.log_line(r"model (\w+) could not be loaded: (.*)") for _ in FAILING]
    reasons = {failure[1]: failure[2] for failure in failures}
    assert reasons.keys() == FAILING.keys()
    assert {name: reasons[name] for name, (_, reason) in FAILING.items() if not re.search(reason, reasons[name])} == {}
