"""A new version of a model on a share of the requests, or on copies of them, before it takes the old one's place."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from forked_servers import run_command
from own_code_helpers import make_own
from paths import ROOT
from server_helpers import Server, running
from waiting import wait_until

from frontend.canary.comparison import Compared, answer_text
from frontend.canary.figures import Figures
from frontend.canary.rules import Rules

# Answers with the greeting that the configuration had when the worker loaded it.
CODE = """
import os, time
from djl_python import Output

greeting = None

def handle(inputs):
    global greeting
    properties = inputs.get_properties()
    if greeting is None:
        greeting = properties["greeting"]
    if inputs.is_empty():
        return None
    if greeting == "failing":
        raise ValueError("as the greeting says")
    if greeting == "deadly":
        os._exit(3)
    if greeting == "slow":
        time.sleep(0.05)
    return Output().add(greeting)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    make_own(directory / "model", CODE, greeting="one")
    return directory


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with running("--model-store", store) as server:
        server.log_line(r"\] ready: process")
        yield server


@pytest.fixture
def configured(store: Path) -> Iterator[Callable[[str], None]]:
    """Return what sets the greeting of the next version."""

    def configure(greeting: str) -> None:
        path = store / "model" / "serving.properties"
        kept = [line for line in path.read_text().splitlines() if "greeting" not in line]
        path.write_text("\n".join([*kept, f"option.greeting={greeting}"]))

    return configure


def ask(server: Server, **headers: str) -> httpx.Response:
    return server.http.post("/predictions/model", content=b"x", headers=headers)


def described(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/models/model").json()[0]["models"][0].get("canary", {})
    return found


def canary(server: Server, action: str = "", **parameters: Any) -> httpx.Response:
    return server.http.post(
        f"/models/model/canary{action}", params={key: str(value) for key, value in parameters.items()}
    )


@contextmanager
def trying(server: Server, **parameters: Any) -> Iterator[Future[httpx.Response]]:
    """Begin a trial, and return its outcome to come; it runs now."""
    before = described(server)
    with ThreadPoolExecutor() as threads:
        outcome = threads.submit(canary, server, **parameters)
        try:
            wait_until(
                lambda: outcome.done() or (described(server) != before and running_now(server)), "the trial runs"
            )
            yield outcome
        finally:
            canary(server, "/take_back")  # if it has not ended: the request for it would wait for ever


def running_now(server: Server) -> bool:
    return described(server).get("status") == "RUNNING"


@contextmanager
def load(server: Server, clients: int = 4) -> Iterator[Counter[tuple[int, str]]]:
    """Send requests all the time; count their endings."""
    endings: Counter[tuple[int, str]] = Counter()
    stopping = threading.Event()

    def send() -> None:
        while not stopping.is_set():
            answer = ask(server)
            endings[answer.status_code, answer.text if answer.status_code == 200 else ""] += 1

    with ThreadPoolExecutor(clients) as threads:
        futures = [threads.submit(send) for _ in range(clients)]
        try:
            yield endings
        finally:
            stopping.set()
    for future in futures:
        future.result()


def test_a_good_version_is_promoted_under_load_without_a_lost_request(
    server: Server, configured: Callable[[str], None]
) -> None:
    configured("two")
    with load(server) as endings:
        answer = canary(server, share="30%", requests=40)
    assert answer.status_code == 200, answer.text
    assert answer.json()["canary"]["status"] == "PROMOTED"
    assert "requests spoke for it" in answer.json()["status"]
    assert {status for status, _ in endings} == {200}
    assert ask(server).text == "two"
    figures = described(server)
    assert figures["new"]["requests"] >= 40
    assert figures["new"]["requests"] < figures["old"]["requests"], "it had 30 %"
    text = server.http.get("/metrics").text
    assert 'lmi_canary_requests_total{model="model",outcome="success",version="new"}' in text
    assert 'lmi_canary_share{model="model"} 0.0' in text


def test_a_version_that_fails_is_taken_back_early(server: Server, configured: Callable[[str], None]) -> None:
    good = ask(server).text
    configured("failing")
    with load(server) as endings:
        answer = canary(server, share="50", requests=100000)
    assert answer.status_code == 500
    assert "taken back" in answer.text
    assert described(server)["status"] == "TAKEN_BACK"
    assert {text for status, text in endings if status == 200} == {good}
    assert [ask(server).text for _ in range(10)] == [good] * 10


def test_a_version_that_is_slower_is_taken_back(server: Server, configured: Callable[[str], None]) -> None:
    configured("slow")
    with load(server, clients=2):
        answer = canary(server, share="50%", requests=12, max_slower=2)
    assert "the median latency is" in answer.text


def test_a_version_whose_worker_dies_is_taken_back(server: Server, configured: Callable[[str], None]) -> None:
    configured("three")
    before = described(server)
    with trying(server, share="1%", requests=100000) as outcome:
        assert described(server) != before
        (mine,) = described(server)["workers"]
        os.kill(mine, signal.SIGKILL)
        assert "a worker of it has died" in outcome.result().text
    assert ask(server).status_code == 200


def test_a_session_stays_with_its_version(server: Server, configured: Callable[[str], None]) -> None:
    configured("four")
    with trying(server, share="50%", requests=100000) as outcome:
        assert running_now(server)
        for number in range(12):
            answers = {ask(server, **{"x-session-id": f"session{number}"}).text for _ in range(5)}
            assert len(answers) == 1
        everyone = {ask(server, **{"x-session-id": f"session{number}"}).text for number in range(40)}
        assert len(everyone) == 2, "half of the sessions get the new version"
        again = canary(server)
        assert again.status_code == 409
        assert "is being tried already" in again.text
        assert canary(server, "/take_back").json()["status"] == "TAKEN_BACK"
        assert "a call asked for it" in outcome.result().text
    assert canary(server, "/promote").status_code == 404


def test_a_reload_waits_for_the_trial_and_a_call_promotes(server: Server, configured: Callable[[str], None]) -> None:
    configured("five")
    with load(server) as endings, trying(server, share="10%", requests=100000), ThreadPoolExecutor() as threads:
        assert running_now(server)
        reloading = threads.submit(server.http.post, "/models/model/reload")
        adapters = threads.submit(server.http.put, "/models/model", params={"min_worker": 1})
        assert canary(server, "/promote").json()["status"] == "PROMOTED"
        assert reloading.result().status_code == 200
        assert adapters.result().status_code == 200
    assert {status for status, _ in endings} == {200}
    assert ask(server).text == "five"


def test_copies_go_to_the_new_version_and_no_client_sees_it(server: Server, configured: Callable[[str], None]) -> None:
    good = ask(server).text
    configured("six")
    with load(server) as endings:
        answer = canary(server, shadow="true", requests=20, max_changed=10, max_slower=1000)
    assert "answers are others" in answer.text
    assert set(endings) == {(200, good)}
    figures = described(server)
    assert figures["copies"]["changed"] == figures["copies"]["answers"] > 0
    configured(good)
    with load(server) as endings:
        answer = canary(server, shadow="true", requests=20, max_changed=0, max_slower=1000)
    assert answer.json()["canary"]["status"] == "PROMOTED", answer.text
    assert answer.json()["canary"]["copies"]["changed"] == 0
    assert set(endings) == {(200, good)}


def test_copies_that_end_workers_harm_no_client(server: Server, configured: Callable[[str], None]) -> None:
    good = ask(server).text
    configured("deadly")
    with load(server) as endings:
        answer = canary(server, shadow="true", requests=1000)
    assert "taken back" in answer.text
    assert set(endings) == {(200, good)}
    configured(good)


def test_too_few_requests_take_a_version_back(server: Server) -> None:
    answer = canary(server, share="5%", duration=0.3)
    assert "only 0 of 200 requests came" in answer.text


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"share": "0%"}, "above 0"),
        ({"share": "101"}, "from 0 to 100"),
        ({"share": "nan"}, "from 0 to 100"),
        ({"share": "5%%\n"}, "from 0 to 100"),
        ({"requests": "0"}, "1 or more"),
        ({"requests": "9" * 5000}, "integer"),
        ({"duration": "inf"}, "duration"),
        ({"max_errors": "-1"}, "max_errors"),
        ({"shadow": "perhaps"}, "true or false"),
    ],
)
def test_what_is_wrong_is_refused_by_name(server: Server, parameters: dict[str, str], said: str) -> None:
    answer = canary(server, **parameters)
    assert answer.status_code == 400
    assert said in answer.text


def test_the_command_tries_a_version_and_says_why_it_was_taken_back(
    server: Server, configured: Callable[[str], None]
) -> None:
    def reload(*arguments: str) -> Any:
        url = f"http://127.0.0.1:{server.port}"
        return run_command("reload", "model", "--url", url, *arguments, env=os.environ, cwd=ROOT)

    configured("seven")
    with load(server, 2):
        promoted = reload("--canary", "50%", "--requests", "5", "--max-slower", "1000")
    assert promoted.returncode == 0, promoted.stderr
    assert "promoted: " in promoted.stdout
    taken_back = reload("--shadow", "--duration", "0.2")
    assert taken_back.returncode == 1
    assert "only 0 of 200 requests came" in taken_back.stderr
    assert "exclude each other" in reload("--canary", "5%", "--promote").stderr
    assert "needs --canary or --shadow" in reload("--requests", "5").stderr
    assert "--requests needs --canary or --shadow" in reload("--promote", "--requests", "5").stderr
    assert "--no-wait needs --canary or --shadow" in reload("--no-wait").stderr
    assert "loaded again" in reload().stdout


# --- the parts ---


def figures(requests: int, errors: int = 0, seconds: float = 0.1) -> Figures:
    made = Figures()
    for number in range(requests):
        made.add(500 if number < errors else 200, seconds * (1 + number % 7 / 100))
    return made


RULES = Rules(requests=50, duration_s=60, max_errors=0.01, max_slower=1.2, max_changed=0.1)


@pytest.mark.parametrize(
    ("old", "new", "objects"),
    [
        (figures(1000), figures(50), False),
        (figures(1000), figures(50, errors=1), True),
        (figures(1000, errors=100), figures(50, errors=5), False),
        (figures(1000), figures(50, seconds=0.2), True),
        (figures(1000), figures(50, seconds=0.11), False),
        (figures(0), figures(50), False),
    ],
)
def test_errors_and_latency_speak_against_a_version(old: Figures, new: Figures, objects: bool) -> None:
    assert (RULES.objection(old, new, None) is not None) == objects


def test_few_errors_may_be_an_accident_before_the_time() -> None:
    assert RULES.early_objection(figures(1000), figures(10, errors=4)) is None
    assert RULES.early_objection(figures(1000), figures(10, errors=5)) is not None


def test_figures_take_bounded_memory() -> None:
    assert len(figures(10_000).seconds) == 500


def test_equal_answers_differ_in_ids_and_times_only() -> None:
    one = b'{"id": "1", "created": 1, "choices": [{"message": {"content": "a b"}}]}'
    two = b'{"id": "2", "created": 2, "choices": [{"message": {"content": "a b"}}]}'
    event = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n'
    stream = event % b"a" + event % b" b" + b"data: [DONE]\n"
    lines = b'{"token": {"text": "a"}}\n{"token": {"text": " b"}}\n'
    assert answer_text(one) == answer_text(two) == answer_text(stream) == answer_text(lines) == "a b"
    assert answer_text(b"\xff\x00") == b"\xff\x00"
    compared = Compared()
    for data in (b"[" * 100_000, b'{"a":' * 5000, b"", b'{"text": 3}'):
        compared.add(data, data, 1.0)
    assert (compared.answers, compared.changed) == (4, 0)
