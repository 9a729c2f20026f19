"""Traces: which requests have one, what their spans say, and that a server without traces knows nothing of them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest
from server_helpers import Server, make_model, running
from waiting import wait_until

from frontend.observability.request_record import RequestRecord
from frontend.observability.trace_context import parse_traceparent
from frontend.observability.traces.tracing import Tracing
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import ConfigurationError

pytest.importorskip("opentelemetry.sdk", reason="pip install lmi-server[otel]")
Receiver = import_module("otlp_receiver").Receiver

PARENT_ID = "00f067aa0ba902b7"
SERVER_KIND = 2


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Server]:
    variables = {
        "SERVING_OTLP_TRACES_ENDPOINT": receiver.endpoint,
        "SERVING_TRACE_SAMPLE": "0",  # so that only requests of sampled traces have one
        "OTEL_BSP_SCHEDULE_DELAY": "20",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
    }
    with running(make_model(tmp_path_factory.mktemp("traced") / "model"), variables=variables, workers=1) as server:
        yield server


@pytest.fixture(scope="module")
def sampling(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Server]:
    variables = {"SERVING_OTLP_TRACES_ENDPOINT": receiver.endpoint, "SERVING_TRACE_SAMPLE": "0.25"}
    with running(make_model(tmp_path_factory.mktemp("sampling") / "model"), variables=variables, workers=1) as server:
        yield server


def trace_of(number: int, flags: str = "01") -> tuple[str, dict[str, str]]:
    """Return the id of a trace, and the headers of a request that belongs to it."""
    trace_id = f"{number:032x}"
    return trace_id, {"traceparent": f"00-{trace_id}-{PARENT_ID}-{flags}", "tracestate": "vendor=1"}


def wait_for(receiver: Receiver, trace_id: str, name: str) -> None:
    wait_until(lambda: name in receiver.of_trace(trace_id), f"the span {name} has arrived")


def test_the_spans_of_a_chat(server: Server, receiver: Receiver) -> None:
    trace_id, headers = trace_of(1)
    body = {"model": "model", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 4}
    answer = server.http.post("/v1/chat/completions", json=body, headers={**headers, "x-request-id": "traced"})
    wait_for(receiver, trace_id, "format")
    spans = receiver.of_trace(trace_id)
    assert list(spans) == ["chat model", "receive", "queue", "prefill", "decode", "format"]
    whole = spans.pop("chat model")
    assert answer.headers["traceparent"] == f"00-{trace_id}-{whole.span_id}-01"
    assert (whole.parent_id, whole.kind, whole.failed, whole.state) == (PARENT_ID, SERVER_KIND, False, "vendor=1")
    assert 0 < whole.attributes.pop("gen_ai.response.time_to_first_chunk") < 60
    assert whole.attributes.pop("user_agent.original").startswith("python-httpx/")
    assert whole.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "network.protocol.name": "http",
        "network.protocol.version": "1.1",
        "server.address": "127.0.0.1",
        "server.port": server.port,
        "http.response.status_code": 200,
        "client.address": "127.0.0.1",
        "lmi.request.id": "traced",
        "lmi.route": "chat/completions",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "lmi-server",
        "gen_ai.request.model": "model",
        "gen_ai.response.model": "model",
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert whole.resource["service.name"] == "lmi-server"
    assert whole.resource["deployment.environment.name"] == "test"
    edges = [whole.began, *(moment for span in spans.values() for moment in (span.began, span.ended)), whole.ended]
    assert edges == sorted(edges)
    assert {span.parent_id for span in spans.values()} == {whole.span_id}


def test_a_request_that_lost_its_worker_shows_each_attempt(server: Server, receiver: Receiver) -> None:
    trace_id, headers = trace_of(2)
    assert server.invoke("exit-once", headers=headers).status_code == 200
    wait_for(receiver, trace_id, "format")
    spans = [span for span in receiver.spans if span.trace_id == trace_id]
    names = [span.name for span in spans]
    wanted = ["text_completion model", "receive", "queue", "attempt", "queue", "prefill", "decode", "format"]
    assert (names, [span.name for span in spans if span.failed]) == (wanted, ["attempt"])


@pytest.mark.parametrize(
    ("number", "path", "prompt", "name", "kind", "failed"),
    [
        (3, "/invocations", "raise", "POST /invocations", "424", True),
        (4, "/predictions/nobody", "a", "POST /predictions/{model}", "ModelNotFoundError", False),
    ],
)
def test_failures(
    server: Server, receiver: Receiver, number: int, path: str, prompt: str, name: str, kind: str, failed: bool
) -> None:
    trace_id, headers = trace_of(number)
    server.http.post(path, json={"inputs": prompt}, headers=headers)
    wait_for(receiver, trace_id, name)
    span = receiver.of_trace(trace_id)[name]
    assert (span.failed, span.attributes["error.type"]) == (failed, kind)


def test_what_is_not_sampled_is_not_traced(server: Server, receiver: Receiver) -> None:
    unsampled, headers = trace_of(5, flags="00")
    assert "traceparent" not in server.invoke("a", headers=headers).headers
    assert "traceparent" not in server.invoke("a").headers
    last, headers = trace_of(6)
    server.invoke("a", headers=headers)
    wait_for(receiver, last, "format")
    assert not receiver.of_trace(unsampled)
    assert {span.trace_id for span in receiver.spans} <= {f"{number:032x}" for number in (1, 2, 3, 4, 6)}


def test_spans_that_wait_are_sent_at_the_end(server: Server, receiver: Receiver) -> None:
    """This test comes last: it ends the server."""
    trace_id, headers = trace_of(7)
    server.invoke("a", headers=headers)
    assert server.stop() == 0
    assert "format" in receiver.of_trace(trace_id)


@pytest.mark.slow
@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}], ids=["no trace", "no valid trace"])
def test_a_share_of_the_requests_without_a_trace_is_traced(sampling: Server, headers: dict[str, str]) -> None:
    answers = [sampling.invoke("a", headers=headers) for _ in range(400)]
    begun = [answer.headers["traceparent"] for answer in answers if "traceparent" in answer.headers]
    assert 50 < len(begun) < 150  # 100 are expected; chance leaves these limits less than once in a million runs
    assert all(re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", header) for header in begun)
    trace_ids, span_ids = (len({header.split("-")[part] for header in begun}) for part in (1, 2))
    assert trace_ids == span_ids == len(begun)


class FailingTrace:
    """Stands for a request whose spans have a fault."""

    trace_id = f"{1:032x}"
    header = f"00-{trace_id}-{PARENT_ID}-01"

    def end(self, record: RequestRecord) -> None:
        raise ValueError("no span")


class FailingSpans:
    def begin(self, properties: dict[str, str], scope: object) -> FailingTrace:
        raise ValueError("no span")

    def close(self) -> None: ...


def test_a_request_whose_span_cannot_be_begun_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    properties = {"host": "here"}
    assert Tracing(1, FailingSpans()).begin(properties, {}) is None
    assert "the span of a request cannot be begun" in caplog.text
    assert properties == {"host": "here"}


def test_an_odd_tracestate_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    spans = import_module("frontend.observability.traces.spans").OpenTelemetrySpans("http://127.0.0.1:1")
    scope = {"method": "POST", "path": "/", "scheme": "http", "http_version": "1.1", "server": None}
    for state in ("[x] what a client wants to have in the log", "=[x]"):
        properties = {"traceparent": trace_of(7)[1]["traceparent"], "tracestate": state}
        trace = spans.begin(properties, scope)
        assert trace.trace_id == f"{7:032x}"
    assert "[x]" not in caplog.text


def test_a_wrong_variable_of_opentelemetry_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    with pytest.raises(ConfigurationError, match=r"otlp_traces_endpoint = .* cannot be used: .*; check the variables"):
        Tracing.from_settings(ServerSettings(otlp_traces_endpoint="http://127.0.0.1:1/"))


def test_a_request_whose_spans_cannot_be_made_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    record = RequestRecord(200, 0.0, 0.0, "odd", "model", "invocations", "")
    Tracing(1, import_module("frontend.observability.traces.spans").OpenTelemetrySpans("http://127.0.0.1:1")).end(
        FailingTrace(), record
    )
    assert f"the spans of trace {1:032x} cannot be made" in caplog.text


def test_a_request_whose_spans_cannot_be_encoded_costs_no_others_theirs(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    spans = import_module("frontend.observability.traces.spans").OpenTelemetrySpans(receiver.endpoint)
    scope = {"method": "POST", "path": "/", "scheme": "http", "http_version": "1.1", "server": None}
    ids = []
    for model in ("first", "\ud800", "last"):  # a lone surrogate is no text in protobuf
        trace = spans.begin({}, scope)
        trace.end(RequestRecord(200, 0.0, 0.0, "id", model, "chat/completions", ""))
        ids.append(trace.trace_id)
    spans.close()
    assert [list(receiver.of_trace(each)) for each in ids] == [["chat first", "receive"], [], ["chat last", "receive"]]
    assert f"the spans of trace {ids[1]} cannot be made" in caplog.text


@pytest.mark.parametrize(
    ("header", "is_valid"),
    [
        (f"00-{1:032x}-{PARENT_ID}-01", True),
        (f"01-{1:032x}-{PARENT_ID}-01-what-comes-later", True),
        (f"00-{1:032x}-{PARENT_ID}-01-more", False),
        (f"ff-{1:032x}-{PARENT_ID}-01", False),
        (f"00-{0:032x}-{PARENT_ID}-01", False),
        (f"00-{1:032x}-{0:016x}-01", False),
        (f"00-{1:032X}-{PARENT_ID.upper()}-01", False),
        ("", False),
    ],
)
def test_the_header(header: str, is_valid: bool) -> None:
    assert (parse_traceparent(header) is not None) is is_valid


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/invocations", "/invocations"),
        ("/predictions/invoke", "/predictions/{model}"),
        ("/predictions/m/2", "/predictions/{model}/{version}"),
        ("/models/models/invoke", "/models/{model}/invoke"),
        ("/models/m/2/invoke", "/models/{model}/{version}/invoke"),
        ("/v2/models/v2/infer", "/v2/models/{model}/infer"),
        ("/v2/models/m/versions/2/generate", "/v2/models/{model}/versions/{version}/generate"),
        ("/endpoints/m/invocations", "/endpoints/{model}/invocations"),
    ],
)
def test_a_route_has_no_names(path: str, route: str) -> None:
    """A collector keeps a series for each."""
    assert import_module("frontend.observability.traces.spans").http_route(path) == route


@pytest.mark.slow
def test_without_traces_nothing_is_imported() -> None:
    code = (
        "import sys, frontend.server; from frontend.observability.traces.tracing import Tracing\n"
        "from lmi_server.configuration.server_settings import ServerSettings\n"
        "assert Tracing.from_settings(ServerSettings()) is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
