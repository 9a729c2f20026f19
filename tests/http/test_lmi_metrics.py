"""DJL Serving's metrics under its own names, those that models print, and its three further logs."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from own_code_helpers import make_own
from prometheus_client.parser import text_string_to_metric_families
from server_helpers import Server, running
from waiting import wait_until

from frontend.observability.metrics.collector import PLAIN, Metrics
from frontend.observability.metrics.recorded import RecordedMetrics
from lmi_server.contract.metrics import Metric, parse_metric

HOST = socket.gethostname()
CODE = Path("printed_metrics")


class LoggingServer:
    """A server that writes all three logs into `logs`."""

    def __init__(self, server: Server, logs: Path) -> None:
        self.server = server
        self.http = server.http
        self._logs = logs

    def sample(self, series: str) -> float | None:
        found = re.search(rf"^{re.escape(series)} (\S+)$", self.http.get("/server/metrics").text, re.MULTILINE)
        return None if found is None else float(found[1])

    def print_lines(self, *lines: str, stderr: bool = False) -> httpx.Response:
        return self.http.post("/predictions/model", json={"lines": lines, "stderr": stderr})

    def log(self, name: str) -> str:
        return (self._logs / f"{name}.log").read_text()

    def wait_for_line(self, name: str, pattern: str) -> None:
        stamped = rf"^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {pattern}$"
        wait_until(lambda: re.search(stamped, self.log(name), re.MULTILINE), f"{name}.log has {pattern}")


@pytest.fixture(scope="module")
def logging_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoggingServer]:
    directory = tmp_path_factory.mktemp("metrics")
    variables = {"SERVING_LOG_DIR": str(directory / "logs")}
    with running(make_own(directory / "model", CODE), variables=variables, workers=1) as server:
        yield LoggingServer(server, directory / "logs")


# --- names that dashboards know ---


def test_answers_and_errors_count_under_lmis_names(logging_server: LoggingServer) -> None:
    names = {code: f'Response_{code}XX_total{{Host="{HOST}"}}' for code in (2, 4, 5)}
    before = {code: logging_server.sample(name) or 0.0 for code, name in names.items()}
    assert logging_server.print_lines().status_code == 200
    assert logging_server.http.post("/predictions/model", content=b"{").status_code == 424
    assert {code: logging_server.sample(name) for code, name in names.items()} == {
        2: before[2] + 1,
        4: before[4] + 1,
        5: before[5],
    }
    assert logging_server.sample(f'WlmError_total{{Host="{HOST}"}}') == 0
    assert logging_server.sample(f'ServerError_total{{Host="{HOST}"}}') == 0


def test_the_times_of_requests_are_in_microseconds(logging_server: LoggingServer) -> None:
    logging_server.print_lines()
    for name in ("RequestLatency", "QueueTime"):
        count = logging_server.sample(f'{name}_count{{Model="model"}}')
        assert count is not None
        assert logging_server.sample(f'{name}_bucket{{Model="model",le="+Inf"}}') == count
        assert logging_server.sample(f'{name}_bucket{{Model="model",le="5e+06"}}') in (count, None)
    total = logging_server.sample('RequestLatency_sum{Model="model"}')
    assert total is not None
    assert 10 < total < 1e9


def test_the_start_is_measured(logging_server: LoggingServer) -> None:
    assert logging_server.sample('DJLServingStart_total{Version="0.1.0"}') == 1
    for series in (
        f'StartupLatency{{Host="{HOST}"}}',
        'LoadModel{Model="model"}',
        'DownloadModel{Model="model"}',
        'RegisterWorkflow{Model="model"}',
    ):
        assert (logging_server.sample(series) or 0) > 0, series


def test_a_scrape_may_ask_for_some_names(logging_server: LoggingServer) -> None:
    logging_server.print_lines()
    query = {"name[]": ["Response_2XX", "lmi_requests_total", "LoadModel"]}
    text = logging_server.http.get("/server/metrics", params=query).text
    assert set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)) == {
        "Response_2XX_total",
        "lmi_requests_total",
        "LoadModel",
    }
    assert logging_server.http.get("/metrics", params={"name[]": "no_such"}).text == ""


def test_what_is_refused_for_lack_of_workers_is_a_wlm_error(tmp_path: Path) -> None:
    variables = {"SERVING_EXTRA_LOGS": "access,server_metric"}
    with running(make_own(tmp_path / "model", CODE), variables=variables, workers=1) as server:
        assert server.http.put("/models/model?min_worker=0&max_worker=0").status_code == 200
        assert server.http.post("/predictions/model", json={"lines": []}).status_code == 503
        assert f'WlmError_total{{Host="{HOST}"}} 1.0' in server.http.get("/server/metrics").text
        # Without a directory the lines go to standard error with the server's own.
        server.log_line(rf"INFO server_metric: WlmError\.Count:1\|#Host:{re.escape(HOST)}$")
        server.log_line(r'INFO ACCESS_LOG: /127\.0\.0\.1:\d+ "POST /predictions/model HTTP/1\.1" 503 \d+$')


# --- what models print ---


def test_lines_of_a_worker_become_metrics(logging_server: LoggingServer) -> None:
    logging_server.print_lines(
        "[METRICS]Tokens.Count:2|#Model:m|c",
        "[METRICS]Tokens.Count:3|#Model:m,Phase:decode|1650953744320|c",
        "[METRICS]Free Space.Gigabytes:311.5|#Host:here|1650953744320",
        "[METRICS]Step.Milliseconds:7|#Model:m|h",
        "[METRICS]Pages.Count:1",
    )
    logging_server.print_lines("[METRICS]Tokens.Count:2.5|#Model:m", stderr=True)
    wanted = {
        'Tokens_total{Model="m"}': 4.5,
        'Tokens_total{Model="m",Phase="decode"}': 3.0,
        'Free_Space{Host="here"}': 311.5,
        'Step_bucket{Model="m",le="5.0"}': 0.0,
        'Step_bucket{Model="m",le="10.0"}': 1.0,
        'Step_sum{Model="m"}': 7.0,
        f'Pages_total{{Host="{HOST}"}}': 1.0,
    }
    wait_until(lambda: {series: logging_server.sample(series) for series in wanted} == wanted, "every line counts")
    assert not any("[METRICS]" in line for line in logging_server.server.lines)


def test_what_is_no_metric_stays_in_the_log(logging_server: LoggingServer) -> None:
    logging_server.print_lines("[METRICS]no number.Count:many", "[METRICS]Fell.Count:-1|#Model:m|c")
    logging_server.server.log_line(r"\[METRICS\]no number\.Count:many")
    logging_server.server.log_line(r"metric Fell is not counted: a counter cannot fall; print it as a gauge")


def test_a_mark_that_does_not_begin_the_line_is_text(logging_server: LoggingServer) -> None:
    logging_server.print_lines("asked for [METRICS]Quoted.Count:1|#Model:m|c")
    logging_server.server.log_line(r"asked for \[METRICS\]Quoted\.Count:1")
    assert "Quoted" not in logging_server.http.get("/server/metrics").text


def test_names_of_the_server_are_not_overwritten(logging_server: LoggingServer) -> None:
    logging_server.print_lines(
        "[METRICS]lmi_requests_total.Count:9|#model:m|c", "[METRICS]QueueTime.Count:9|#Model:m|c"
    )
    logging_server.server.log_line("metric lmi_requests_total is not counted: the server has a metric of that name")
    logging_server.server.log_line("metric QueueTime is not counted")
    text = logging_server.http.get("/server/metrics").text
    assert len(re.findall(r"^# TYPE lmi_requests_total ", text, re.MULTILINE)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "RequestLatency.Microseconds:1520|#Model:demo|h",
        "DiskAvailable.Gigabytes:311|#Host:localhost,Disk:sda",
        "Size.Count/Item:2|g",
    ],
)
def test_a_line_reads_as_it_is_written(text: str) -> None:
    metric = parse_metric(text)
    assert metric is not None
    assert str(metric) == text


@pytest.mark.parametrize(
    "text", ["", "Name:1", "Name.Unit:", "Name.Unit:1,5", "Name.Unit:nan", "Name.Unit:1|x", "N.U:1e999"]
)
def test_a_line_that_is_no_metric(text: str) -> None:
    assert parse_metric(text) is None


def test_names_of_others_can_be_left_out() -> None:
    printed = asyncio.run(Metrics(list, names=()).exposition(PLAIN))[0].decode()
    assert "Response_2XX" not in printed
    assert "process_resident_memory_bytes" in printed


def test_whatever_is_printed_the_text_can_be_read() -> None:
    metrics = Metrics(list)
    for text in (
        "1st.Count:1|#le:a,__x:b,Model:m|c",
        "Same.Count:1|#Model:m|c",
        "Same_total.Bytes:7|g",  # would be a second family with the samples of the first
        "Odd Name.Bytes:1|#A b:c d\\",
        "Took.Seconds:0.2|#Model:m|h",
        "Took.Seconds:2000|#Model:m|h",
        "Size.Count/Item:3|#Model:m|h",
    ):
        metric = parse_metric(text)
        assert metric is not None, text
        metrics.record(metric)
    printed = asyncio.run(metrics.exposition(PLAIN))[0].decode()
    families = {family.name: family for family in text_string_to_metric_families(printed)}
    heads = re.findall(r"^# TYPE (\S+)", printed, re.MULTILINE)
    assert len(heads) == len(set(heads))
    assert [sample.value for sample in families["Same"].samples] == [1.0]
    assert families["Odd_Name"].samples[0].labels == {"A_b": "c d\\"}
    assert families["_1st"].samples[0].labels == {"_le": "a", "_x": "b", "Model": "m"}
    buckets = {sample.labels.get("le"): sample.value for sample in families["Took"].samples}
    assert (buckets["0.1"], buckets["0.25"], buckets["600.0"], buckets["+Inf"]) == (0, 1, 1, 2)


def test_printed_series_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    metrics = RecordedMetrics()
    for model in ("one", "two"):
        for number in range(3000):
            metrics.record(Metric(model, "Count", 1, (("Id", str(number)),), model=model))
    for number in range(3000):
        metrics.record(Metric("own", "Count", 1, (("Id", str(number)),)))
    shares = {family.name: len(family.samples) for family in metrics.families()}
    assert shares == {"one": 1000, "two": 500, "own": 2000}
    assert next(record.message for record in caplog.records) == (
        "metric one is not counted: there are 1000 series already, of at most 2000; print fewer names and dimensions"
    )


def test_values_without_a_kind() -> None:
    assert parse_metric(" Free.Bytes:-1.5e3 ") == Metric("Free", "Bytes", -1500.0)


# --- the logs ---


def test_the_access_log(logging_server: LoggingServer) -> None:
    logging_server.http.post("/predictions/model?a=%20b", json={"lines": []})
    logging_server.http.get("/nothing")
    logging_server.wait_for_line("access", r'/127\.0\.0\.1:\d+ "POST /predictions/model\?a=%20b HTTP/1\.1" 200 \d+')
    logging_server.wait_for_line("access", r'/127\.0\.0\.1:\d+ "GET /nothing HTTP/1\.1" 404 \d+')
    secret = {"option.hf_token": "a", "url": "s3://me:secret@b/c?d", "option.env": "A_TOKEN=a secret,B=1", "a": "é&"}
    logging_server.http.post("/models", params=secret)
    query = r"option\.hf_token=\*{3}&url=\*{3}&option\.env=\*{3}&a=%C3%A9%26"
    logging_server.wait_for_line("access", rf'/127\.0\.0\.1:\d+ "POST /models\?{query} HTTP/1\.1" 404 \d+')


def test_the_logs_of_metrics(logging_server: LoggingServer) -> None:
    logging_server.print_lines("[METRICS]Logged.Count:1|#Model:m|c")
    logging_server.wait_for_line("model_metric", r"QueueTime\.Microseconds:\d+\|#Model:model\|h")
    logging_server.wait_for_line("model_metric", r"RequestLatency\.Microseconds:\d+\|#Model:model\|h")
    logging_server.wait_for_line("model_metric", r"LoadModel\.Microseconds:\d+\|#Model:model")
    logging_server.wait_for_line("model_metric", r"Logged\.Count:1\|#Model:m\|c")
    logging_server.wait_for_line("server_metric", rf"Response_2XX\.Count:1\|#Host:{re.escape(HOST)}")
    logging_server.wait_for_line("server_metric", r"DJLServingStart\.Count:1\|#Version:0\.1\.0")
    logging_server.wait_for_line("server_metric", rf"StartupLatency\.Microseconds:\d+\|#Host:{re.escape(HOST)}")
    assert not any("ACCESS_LOG" in line or "server_metric" in line for line in logging_server.server.lines)


@pytest.mark.slow
def test_a_directory_for_logs_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = (
        "from frontend.server import run; from lmi_server.configuration.server_settings import ServerSettings\n"
        "raise SystemExit(run([], ServerSettings(port=0, log_dir='file/logs'), {'MODEL_SERVER_HOME': %r}))"
    )
    ended = subprocess.run([sys.executable, "-c", code % str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert f'log_dir = "{tmp_path}/file/logs": Not a directory; name a directory' in ended.stderr
