"""The dashboard and the alert rules of deploy/: a Prometheus that has scraped a server answers each query."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from paths import ROOT
from ports import reserved_port
from server_helpers import Server, serving
from waiting import wait_until

DASHBOARD = ROOT / "deploy" / "grafana" / "lmi-server.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
UNPACKED = Path(sys.prefix) / "prometheus" / "usr" / "bin"
COMMAND = "apt-get download prometheus && dpkg -x prometheus_*.deb .venv/prometheus"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
VARIABLES = {"$__rate_interval": "20s", "$model": ".*", "$job": ".*"}


def program(name: str) -> str:
    found = shutil.which(name, path=str(UNPACKED)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; `make setup` unpacks Debian's package, as does: {COMMAND}")
    return found


def panels() -> list[Any]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [
        pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def rules() -> list[Any]:
    [group] = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [pytest.param(rule["expr"], id=rule["alert"]) for rule in group["rules"]]


class Prometheus:
    """A Prometheus that scrapes one server every second."""

    def __init__(self, directory: Path, target: int, port: int) -> None:
        job = {"job_name": "lmi-server", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
        times = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config = {"global": times, "rule_files": [str(ALERTS)], "scrape_configs": [job]}
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = (directory / "log").open("wb")
        self.process = subprocess.Popen(
            [
                *(program("prometheus"), f"--config.file={directory / 'prometheus.yml'}"),
                *(f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
                *("--enable-feature=exemplar-storage", "--log.level=warn"),
            ],
            stdout=self._log,
            stderr=self._log,
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def query(self, expression: str) -> list[Any]:
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        answer = self.http.get("/api/v1/query", params={"query": expression})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["data"]["result"])

    def is_ready(self) -> bool:
        assert self.process.poll() is None, Path(self._log.name).read_text()
        try:
            return self.http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(60)
        self._log.close()


def load(server: Server) -> None:
    """Have the server answer, fail and refuse requests, and lose a worker."""
    chat = {"model": "model", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 4}
    for _ in range(3):
        server.http.post("/v1/chat/completions", json=chat, headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"})
    server.invoke("raise")
    server.invoke("a", headers={"x-request-timeout": "0.000001"})


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program("prometheus")
    directory = tmp_path_factory.mktemp("monitored")
    with serving(directory / "server", "fault_handlers:CachingHandler") as server, reserved_port() as port:
        load(server)
        prometheus = Prometheus(directory, server.port, port)
        try:
            wait_until(prometheus.is_ready, "Prometheus is ready")
            wait_until(lambda: prometheus.query("lmi_requests_total"), "it has scraped the server")
            load(server)  # rates take two scrapes with different values
            wait_until(lambda: prometheus.query("sum(rate(lmi_output_tokens_total[20s])) > 0"), "it knows rates")
            wait_until(lambda: prometheus.query("lmi_handler_kv_cache_usage"), "the worker has reported")
            yield prometheus
        finally:
            prometheus.stop()


@pytest.mark.slow
@pytest.mark.parametrize("expression", panels())
def test_a_panel_shows_something(prometheus: Prometheus, expression: str) -> None:
    assert prometheus.query(expression)


@pytest.mark.slow
@pytest.mark.parametrize("expression", rules())
def test_an_alert_asks_for_what_is_there(prometheus: Prometheus, expression: str) -> None:
    prometheus.query(expression)
    names = set(re.findall(r"\b(?:lmi_\w+|up)\b", expression))
    assert names
    assert not [name for name in names if not prometheus.query(name)]


@pytest.mark.slow
def test_prometheus_takes_the_whole_exposition(prometheus: Prometheus) -> None:
    """It asks for OpenMetrics, and keeps the exemplars."""
    [target] = prometheus.http.get("/api/v1/targets").json()["data"]["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    [group] = prometheus.http.get("/api/v1/rules").json()["data"]["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    asked = {"query": "lmi_time_to_first_token_seconds_bucket", "start": "0", "end": "9999999999"}
    found = prometheus.http.get("/api/v1/query_exemplars", params=asked).json()["data"]
    assert {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]} == {TRACE}


def test_promtool_accepts_the_rules() -> None:
    checked = subprocess.run([program("promtool"), "check", "rules", str(ALERTS)], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


UP = {"series": 'up{job="lmi-server", instance="a"}', "values": "1+0x60"}
READY = {"series": 'lmi_model_ready{job="lmi-server", model="m", instance="a"}', "values": "1+0x60"}
ANSWERS = {"series": 'lmi_requests_total{job="lmi-server", model="m", code="200"}', "values": "0+60x60"}
FAILURES = {"series": 'lmi_requests_total{job="lmi-server", model="m", code="424"}', "values": "0+20x60"}


def evaluated(directory: Path, series: list[dict[str, str]], **wanted: list[dict[str, Any]]) -> str:
    """Have promtool evaluate the rules, or queries, on these series an hour long; return what it finds wrong."""
    test = {"interval": "1m", "input_series": series, **wanted}
    file = directory / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [test]}))
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def alert(name: str, *labels: dict[str, str]) -> dict[str, Any]:
    return {"eval_time": "30m", "alertname": name, "exp_alerts": [{"exp_labels": each} for each in labels]}


def fires(directory: Path, name: str, series: list[dict[str, str]]) -> bool:
    """Return whether the rule has an alert on these series."""
    return evaluated(directory, series, alert_rule_test=[alert(name)]) != ""


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("LmiServerMissing", []),
        ("LmiServerDown", [{**UP, "values": "0+0x60"}]),
        ("LmiNoModel", [UP]),
        (
            "LmiModelNotReady",
            [UP, {"series": 'lmi_model_ready{job="lmi-server", model="m", instance="a"}', "values": "0+0x60"}],
        ),
        ("LmiRequestsFail", [UP, ANSWERS, FAILURES]),
    ],
)
def test_a_rule_finds_what_is_wrong(tmp_path: Path, name: str, series: list[dict[str, str]]) -> None:
    assert fires(tmp_path, name, series)
    assert not fires(tmp_path, name, [UP, ANSWERS, READY])


def test_the_share_of_failures_is_zero_while_nothing_fails(tmp_path: Path) -> None:
    [expression] = [each.values[0] for each in panels() if "424" in each.values[0]]
    for name, value in (VARIABLES | {"$__rate_interval": "5m"}).items():
        expression = expression.replace(name, value)
    for series, share in (([ANSWERS], 0), ([ANSWERS, FAILURES], 0.25)):
        wanted = {"expr": expression, "eval_time": "30m", "exp_samples": [{"labels": '{model="m"}', "value": share}]}
        assert evaluated(tmp_path, series, promql_expr_test=[wanted]) == ""
