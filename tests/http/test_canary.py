"""A new version of a model on a share of the requests, or on copies of them, before it takes the old one's place."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from forked_servers import run_command
from own_code_helpers import make_own
from paths import ROOT
from server_helpers import Server, running
from waiting import wait_until

from frontend.canary.comparison import Compared, compare_answers, read_answer
from frontend.canary.figures import AnswerOutcome, Figures, outcome_of
from frontend.canary.rules import Rules, chance_of_more
from frontend.canary.trial import CanaryTrial, Draw
from lmi_server.contract.errors import HandlerError, RequestError
from lmi_server.contract.protocol import End, Error, Input, Reply
from lmi_server.dialects.errors import error_reply

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
    if inputs.get_as_bytes() == b"bad" or greeting == "choosy":
        return Output(code=400, message="the client got it wrong")
    if greeting == "slow":
        time.sleep(0.15)
    return Output().add(greeting)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    make_own(directory / "model", CODE, greeting="one")
    return directory


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with running("--model-store", store, workers=1) as server:
        yield server


@pytest.fixture
def configured(store: Path) -> Iterator[Callable[[str], None]]:
    """Return what sets the greeting of the next version."""

    def configure(greeting: str) -> None:
        path = store / "model" / "serving.properties"
        kept = [line for line in path.read_text().splitlines() if "greeting" not in line]
        path.write_text("\n".join([*kept, f"option.greeting={greeting}"]))

    return configure


def ask(server: Server, content: bytes = b"x", **headers: str) -> httpx.Response:
    return server.http.post("/predictions/model", content=content, headers=headers)


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
        # The speed of a new process within its first 0.2 s is that of the machine's other work.
        answer = canary(server, share="30%", requests=40, max_slower=1000)
    assert answer.status_code == 200, answer.text
    assert answer.json()["canary"]["status"] == "PROMOTED"
    assert "requests spoke for it" in answer.json()["status"]
    assert {status for status, _ in endings} == {200}
    assert ask(server).text == "two"
    figures = described(server)
    assert figures["new"]["requests"] >= figures["judgedAfter"] == 40
    assert figures["new"]["requests"] < figures["old"]["requests"], "it had 30 %"
    assert figures["new"]["refused"] == figures["old"]["refused"] == 0, "also of requests that outlive the trial"
    text = server.http.get("/metrics").text
    assert 'lmi_canary_requests_total{model="model",outcome="success",version="new"}' in text
    assert 'lmi_canary_share{model="model"} 0.0' in text


@pytest.mark.slow
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


def test_what_clients_get_wrong_promotes_no_version(server: Server) -> None:
    with trying(server, share="100%", requests=3) as outcome:
        assert [ask(server, b"bad").status_code for _ in range(8)] == [400] * 8
        figures = described(server)
        assert (figures["status"], figures["new"]["refused"], figures["new"]["requests"]) == ("RUNNING", 8, 8)
        assert [ask(server).status_code for _ in range(3)] == [200] * 3
        assert outcome.result().json()["status"] == "promoted: 3 requests spoke for it"
    assert (
        'lmi_canary_requests_total{model="model",outcome="refused",version="new"} 8' in server.http.get("/metrics").text
    )


def test_a_version_that_refuses_what_the_old_one_answers_is_taken_back(
    server: Server, configured: Callable[[str], None]
) -> None:
    good = ask(server).text
    configured("choosy")
    with load(server):
        assert "it refuses more requests" in canary(server, share="30%", requests=100000).text
    with load(server) as endings:
        answer = canary(server, shadow="true", requests=100000, max_changed=100)
    assert "it refuses more requests" in answer.text
    assert set(endings) == {(200, good)}
    assert described(server)["copies"]["refusedByOne"] > 0
    configured(good)


def test_a_version_whose_worker_dies_is_taken_back(server: Server, configured: Callable[[str], None]) -> None:
    configured("three")
    before = described(server)
    with trying(server, share="1%", requests=100000) as outcome:
        assert described(server) != before
        (mine,) = described(server)["workers"]
        assert 3500 < described(server)["secondsLeft"] <= 3600
        os.kill(mine, signal.SIGKILL)
        assert "a worker of it has died" in outcome.result().text
    assert ask(server).status_code == 200


@pytest.mark.slow
def test_a_session_stays_with_its_version(server: Server, configured: Callable[[str], None]) -> None:
    configured("four")
    with trying(server, share="50%", requests=100000) as outcome:
        assert running_now(server)
        for number in range(12):
            answers = {ask(server, **{"x-session-id": f"session{number}"}).text for _ in range(5)}
            assert len(answers) == 1
        assert len({ask(server, **{"x-request-id": "same"}).text for _ in range(60)}) == 2, "the id chooses no version"
        everyone = {ask(server, **{"x-session-id": f"session{number}"}).text for number in range(40)}
        assert len(everyone) == 2, "half of the sessions get the new version"
        again = canary(server)
        assert again.status_code == 409
        assert "is being tried already" in again.text
        assert canary(server, "/take_back").json()["status"] == "TAKEN_BACK"
        assert "a call asked for it" in outcome.result().text
    assert canary(server, "/promote").status_code == 404


@pytest.mark.slow
def test_a_session_that_stays_with_the_new_version_does_not_decide_alone(
    server: Server, configured: Callable[[str], None]
) -> None:
    old = ask(server).text
    configured("new")
    with trying(server, share="50%", requests=20) as outcome:
        mine = next(
            session for number in range(100)
            if ask(server, **(session := {"x-session-id": f"mine{number}"})).text != old
        )  # fmt: skip
        for _ in range(30):
            assert ask(server, **mine).text == "new"
            assert ask(server, b"bad", **mine).status_code == 400
        figures = described(server)
        assert (figures["status"], figures["new"]["uncounted"]) == ("RUNNING", 59), "2 of its 61 requests count"
        text = 'lmi_canary_requests_total{model="model",outcome="uncounted",version="new"} 59.0'
        assert text in server.http.get("/metrics").text
        with load(server, 2):
            assert outcome.result().json()["canary"]["status"] == "PROMOTED"


@pytest.mark.slow
def test_a_model_without_a_version_is_named_beside_versions(server: Server, store: Path) -> None:
    beside = {"url": str(store / "model"), "model_name": "model", "model_version": "2"}
    assert server.http.post("/models", params=beside).status_code == 200
    try:
        assert 'model_version="" is the one without a version' in canary(server).json()["message"]
        assert "only 0 of 200 requests came" in canary(server, model_version="", duration=0.2).text
        url = f"http://127.0.0.1:{server.port}"
        reloaded = run_command("reload", "model:", "--url", url, env=os.environ, cwd=ROOT)
        assert reloaded.returncode == 0, reloaded.stderr
        states = {
            each.get("version"): each["models"][0].get("reload") for each in server.http.get("/models/model").json()
        }
        assert states["2"] is None
        assert states[None]["status"] == "DONE"
    finally:
        assert server.http.delete("/models/model/2").status_code == 200


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
        ({"share": "0.05"}, "send 5%, or 0.05% if so few requests are meant"),
        ({"share": "1e-3"}, "send 0.1%, or 0.001%"),
        ({"max_client": "101"}, "max_client"),
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


@pytest.mark.slow
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


def figures(requests: int, errors: int = 0, seconds: float = 0.1, refused: int = 0) -> Figures:
    made = Figures()
    for number in range(requests):
        outcome = AnswerOutcome.ERROR if number < errors else AnswerOutcome.SUCCESS
        made.add(outcome, seconds * (1 + number % 7 / 100))
    for _ in range(refused):
        made.add(AnswerOutcome.REFUSED, 0.0)
    return made


RULES = Rules(
    requests=50, duration_s=60, max_errors=0.01, max_slower=1.2, max_changed=0.1, max_shift=0.5, max_client=0.1
)


@pytest.mark.parametrize(
    ("old", "new", "objects"),
    [
        (figures(1000), figures(50), False),
        (figures(1000), figures(50, errors=1), True),
        (figures(1000, errors=100), figures(50, errors=5), False),
        (figures(1000), figures(50, seconds=0.2), True),
        (figures(1000), figures(50, seconds=0.11), False),
        (figures(0), figures(50), False),
        (figures(1000), figures(50, refused=20), True),
        (figures(1000, refused=400), figures(50, refused=20), False),
        (figures(1000, refused=400), figures(50), False),
        (figures(0), figures(50, refused=20), False),
        (figures(100, errors=1, refused=900), figures(50, errors=1), False),
    ],
)
def test_errors_refusals_and_latency_speak_against_a_version(old: Figures, new: Figures, objects: bool) -> None:
    assert (RULES.objection(old, new, None) is not None) == objects


def test_few_errors_may_be_an_accident_before_the_time() -> None:
    assert RULES.early_objection(figures(1000), figures(10, errors=4)) is None
    assert RULES.early_objection(figures(1000), figures(10, errors=5)) is not None


def test_refusals_that_differ_are_a_finding() -> None:
    assert RULES.early_objection(figures(1000), figures(0, refused=2)) is not None
    assert RULES.early_objection(figures(1000), figures(9, refused=1)) is None
    fewer = RULES.finding(figures(1000, refused=400), figures(50))
    assert fewer is not None
    assert "0 of 50, and the old version 400 of 1400" in fewer
    assert RULES.finding(figures(1000, refused=400), figures(50, refused=18)) is None


@pytest.mark.parametrize("table", [(1, 20, 4, 7), (0, 9, 3, 5), (3, 10, 9, 10), (0, 1, 1, 1), (5, 40, 30, 40)])
def test_the_chance_of_a_difference_is_that_of_drawing_without_replacement(table: tuple[int, int, int, int]) -> None:
    few, of_few, many, of_many = table
    marked, total = few + many, of_few + of_many
    ways = [math.comb(marked, k) * math.comb(total - marked, of_many - k) for k in range(many, of_many + 1)]
    assert chance_of_more(*table) == pytest.approx(sum(ways) / math.comb(total, of_many))


def test_the_chance_of_a_difference_is_found_for_any_counts() -> None:
    assert chance_of_more(0, 0, 5, 5) == chance_of_more(5, 5, 0, 0) == chance_of_more(5, 10, 5, 10) == 1.0
    assert chance_of_more(0, 10**9, 10**9, 10**9) == pytest.approx(0.0)
    assert 0.3 < chance_of_more(5 * 10**8, 10**9, 5 * 10**8 + 10**4, 10**9) < 0.4


@pytest.mark.parametrize("route", ["invocations", "chat/completions"])
@pytest.mark.parametrize(
    ("error", "outcome"), [(RequestError, AnswerOutcome.REFUSED), (HandlerError, AnswerOutcome.ERROR)]
)
def test_what_a_client_got_wrong_is_told_from_what_failed(
    route: str, error: type[RequestError | HandlerError], outcome: AnswerOutcome
) -> None:
    status, headers, body = error_reply(route, error("x"))
    assert outcome_of(status, Reply(1, status, headers, body)) is outcome
    assert outcome_of(status, Error(1, error.__name__, "x")) is outcome


def test_a_deadline_of_the_client_is_no_error_of_the_version() -> None:
    assert outcome_of(504, Error(1, "DeadlineError", "x")) is AnswerOutcome.REFUSED
    assert outcome_of(504, Error(1, "PredictTimeoutError", "x")) is AnswerOutcome.ERROR
    assert outcome_of(503, Error(1, "AbortedError", "a call did that")) is AnswerOutcome.REFUSED


def test_an_end_of_no_known_kind_is_an_error_of_the_version() -> None:
    for data in (b"", b"[" * 10_000, b"\xff", b'{"type": 3}', b'{"type": "BadRequestException"}' + b" " * (1 << 17)):
        assert outcome_of(424, Reply(1, 424, [], data)) is AnswerOutcome.ERROR
    assert outcome_of(424, End(1, 424)) is outcome_of(424, None) is AnswerOutcome.ERROR
    assert outcome_of(499, None) is AnswerOutcome.REFUSED


def test_figures_take_bounded_memory() -> None:
    assert len(figures(10_000).seconds) == 500


def test_equal_answers_differ_in_ids_and_times_only() -> None:
    one = b'{"id": "1", "created": 1, "choices": [{"message": {"content": "a b"}}]}'
    two = b'{"id": "2", "created": 2, "choices": [{"message": {"content": "a b"}}]}'
    event = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n'
    stream = event % b"a" + event % b" b" + b"data: [DONE]\n"
    lines = b'{"token": {"text": "a"}}\n{"token": {"text": " b"}}\n'
    assert [read_answer(data).text for data in (one, two, stream, lines)] == ["a b"] * 4
    assert read_answer(b"\xff\x00") != read_answer(b"\xff\x01")
    compared = Compared()
    for data in (b"[" * 100_000, b'{"a":' * 5000, b"", b'{"text": 3}'):
        add(compared, data, data, 1.0)
    assert (compared.total.requests, compared.total.changed) == (4, 0)


def add(compared: Compared, old: bytes, new: bytes, ratio: float, session: bytes | None = None) -> None:
    compared.add(compare_answers(old, new), ratio, session)


def chat(*tokens: tuple[str, float, dict[str, float]], index: int = 0) -> bytes:
    content = [
        {"token": text, "logprob": value, "top_logprobs": [{"token": t, "logprob": v} for t, v in top.items()]}
        for text, value, top in tokens
    ]
    text = "".join(text for text, _, _ in tokens)
    return json.dumps(
        {"choices": [{"index": index, "message": {"content": text}, "logprobs": {"content": content}}]}
    ).encode()


def test_log_probabilities_of_copies_are_compared_where_both_have_them() -> None:
    compared = Compared()
    old = chat(("a", -0.5, {"a": -0.5}), ("b", -1.0, {"b": -1.0, "c": -1.05}))
    add(compared, old, chat(("a", -0.7, {}), ("c", -0.9, {})), 1.0)
    add(compared, b'{"choices": [{"text": "x"}]}', b'{"choices": [{"text": "x"}]}', 1.0)
    said = compared.describe()
    assert said["changed"] == 1
    assert said["logProbs"] == {
        "compared": 1, "meanShift": pytest.approx(0.2), "largestShift": pytest.approx(0.2), "ties": 1
    }  # fmt: skip
    few = Compared()
    few.add_refusal()
    for _ in range(19):
        add(few, b"a", b"a", 1.0)
    assert RULES.objection(figures(50), figures(50), few) is None
    compared = Compared()
    add(compared, chat(("a", -0.1, {})), chat(("a", -1.0, {})), 1.0)
    objection = RULES.objection(figures(50), figures(50), compared)
    assert objection is not None
    assert "log-probabilities of 1 tokens differ by 0.9" in objection


def test_log_probabilities_are_read_in_every_form() -> None:
    completion = {"tokens": ["a", "b"], "token_logprobs": [-1, -2], "top_logprobs": None}
    stream = b"".join(
        b'data: {"choices":[{"index":%d,"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[-%d]}}]}\n\n' % each
        for each in ((0, 1), (1, 9), (0, 2))
    )
    details = {
        "generated_text": "ab",
        "details": {"tokens": [{"text": "a", "log_prob": -1}, {"text": "b", "logprob": -2}]},
    }
    lines = (
        b'{"token": {"text": "a", "log_prob": -1}}\n{"token": {"text": "b", "log_prob": -2}, "generated_text": "ab"}\n'
    )
    forms = (json.dumps({"choices": [{"text": "ab", "logprobs": completion}]}).encode(), stream, lines)
    for data in (*forms, json.dumps(details).encode(), chat(("a", -1, {}), ("b", -2, {}))):
        assert [token.logprob for token in read_answer(data).tokens] == [-1, -2], data


@pytest.mark.parametrize(
    "logprobs",
    ["3", "[]", '{"content": [{"token": "a"}]}', '{"content": [{"token": "a", "logprob": null}]}', '{"content": 7}',
     '{"content": [{"token": "a", "logprob": 1e999}]}', '{"tokens": ["a"], "token_logprobs": []}', '{"content": [3]}'],
)  # fmt: skip
def test_what_is_no_log_probability_is_not_compared(logprobs: str) -> None:
    data = b'{"choices": [{"message": {"content": "a"}, "logprobs": %b}]}' % logprobs.encode()
    assert read_answer(data).tokens == ()
    compared = Compared()
    add(compared, data, data, 1.0)
    assert (compared.total.requests, compared.total.changed, compared.total.shifts) == (1, 0, 0)


def of_session(name: bytes, outcome: AnswerOutcome, count: int, beside: Figures) -> Figures:
    for _ in range(count):
        beside.add(outcome, 0.1, name)
    return beside


def test_one_session_alone_speaks_neither_for_nor_against_a_version() -> None:
    refused = of_session(b"a", AnswerOutcome.REFUSED, 20, figures(50))
    assert RULES.early_objection(figures(1000), refused) is RULES.objection(figures(1000), refused, None) is None
    assert "one session is refused more often" in (RULES.finding(figures(1000), refused) or "")
    assert RULES.early_objection(figures(1000), of_session(b"b", AnswerOutcome.REFUSED, 20, refused)) is not None
    failed = of_session(b"a", AnswerOutcome.ERROR, 20, figures(50))
    assert RULES.early_objection(figures(1000), failed) is RULES.objection(figures(1000), failed, None) is None
    assert "20 of 70 requests failed" in (RULES.doubt(figures(1000), failed, None) or "")
    for _ in range(2000):
        failed.add(AnswerOutcome.SUCCESS, 0.1)
    assert RULES.doubt(figures(1000), failed, None) is None, "others outweigh it"
    both = of_session(b"b", AnswerOutcome.ERROR, 20, of_session(b"a", AnswerOutcome.ERROR, 20, figures(50)))
    assert RULES.early_objection(figures(1000), both) is not None
    alone = of_session(b"a", AnswerOutcome.ERROR, 20, figures(4))
    assert RULES.early_objection(figures(1000), alone) is not None, "nearly nobody else has sent anything"
    masked = of_session(b"a", AnswerOutcome.ERROR, 100, figures(1000))
    assert RULES.objection(masked, figures(50, errors=3), None) is not None, "a session hides no errors"


def test_a_session_whose_answers_change_is_in_doubt_alone() -> None:
    compared = Compared()
    for number in range(20):
        add(compared, chat(("a", -1, {})), chat(("b" if number < 5 else "a", -9 if number < 8 else -1, {})), 1.0, b"one"
                     if number < 8 else None)  # fmt: skip
    assert RULES.objection(figures(50), figures(50), compared) is None
    assert "5 of 20 answers are others" in (RULES.doubt(figures(50), figures(50), compared) or "")
    add(compared, chat(("a", -1, {})), chat(("a", -90, {})), 1.0)
    assert "log-probabilities" in (RULES.objection(figures(50), figures(50), compared) or "")


def test_a_session_counts_for_a_share_of_the_requests() -> None:
    assert replace(RULES, requests=3).max_of_client == 1
    some = Figures(RULES.max_of_client)
    assert [some.add(AnswerOutcome.SUCCESS, 0.1, b"a") for _ in range(7)] == [True] * 5 + [False] * 2
    assert [some.add(AnswerOutcome.SUCCESS, 0.1, each) for each in (b"b", None, None)] == [True] * 3
    assert (some.total.requests, some.uncounted) == (8, 2)


def test_counts_of_sessions_add_up_whatever_comes_in_which_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.canary.sessions._MAX_SESSIONS", 20)
    chance = random.Random(5)
    for _ in range(50):
        some, errors = Figures(chance.choice((3, None))), Counter[bytes | None]()
        for _ in range(200):
            session = chance.choice([None, *(bytes([each]) for each in range(chance.choice((3, 60))))])
            outcome = chance.choice(list(AnswerOutcome))
            errors[session] += some.add(outcome, 0.1, session) and outcome is AnswerOutcome.ERROR
        assert some.total.errors == errors.total()
        assert some.without_most_errors().errors <= some.total.errors
        assert len(some._counts._sessions) <= 20


def request_of(**headers: str) -> Input:
    return Input("invocations", dict(headers), [], request_id="chosen by the client")


def without_sessions() -> Any:
    """Return what stands for a pool whose workers have no sessions."""
    return SimpleNamespace(dispatcher=SimpleNamespace(router=SimpleNamespace(sessions=None)))


def test_a_request_without_a_session_is_drawn_by_chance_and_once() -> None:
    draw, pool = Draw(0.3), without_sessions()
    requests = [request_of() for _ in range(2000)]
    drawn = [draw.includes(request, pool, pool) for request in requests for _ in range(3)]
    assert drawn[::3] == drawn[1::3] == drawn[2::3]
    assert 500 < sum(drawn[::3]) < 700, "0.3 of 2000 less or more than five standard deviations"
    session = request_of(**{"x-session-id": "a"})
    assert draw.session(session, b"one") != draw.session(session, b"two") != draw.session(request_of(), b"two") is None


def test_an_api_key_that_sticks_to_a_version_counts_as_often_as_chance_and_a_little_more() -> None:
    trial = CanaryTrial(cast("Any", None), 0.05, replace(RULES, requests=200), False, 0.0)

    def send(is_new: bool, number: int, tenant: bytes) -> None:
        trial._add(AnswerOutcome.SUCCESS, 0.1, is_new, request_of(**{"x-session-id": str(number)}), tenant)

    for number in range(400):
        send(True, number, b"sticks")
    assert (trial.new.total.requests, trial.new.uncounted) == (40, 360), "20 and 5 % of 400"
    for number in range(400):
        send(number % 20 == 0, number, b"fair")
    assert trial.new.total.requests == 60
