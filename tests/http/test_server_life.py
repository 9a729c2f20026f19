"""The life of a server over HTTP: full, loading, failed, drained, killed. Each test has a server of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from ports import reserved_port
from server_helpers import Server, connect, make_model, raw_request, received, request, running, serving
from waiting import wait_until

pytestmark = pytest.mark.slow


def test_a_stream_counts_under_the_status_of_its_ending(tmp_path: Path) -> None:
    with serving(tmp_path, libraries="") as server:
        assert server.invoke("token-then-raise", stream=True).status_code == 200
        assert server.invoke("token-then-exit", stream=True).status_code == 200
        server.until("lmi_workers_ready", 1)
        with connect(server, raw_request("token-then-wait", stream=True)) as connection:
            received(connection, until=b'"token"')
        server.until("lmi_requests_in_flight", 0)
        text = server.http.get("/metrics").text
    counted = dict(re.findall(r'lmi_requests_total{code="(\d+)",model="model"} (\S+)', text))
    assert counted == {"424": "1.0", "503": "1.0", "499": "1.0"}


def test_a_full_queue(tmp_path: Path) -> None:
    with serving(tmp_path, libraries="", max_rolling_batch_size=1, job_queue_size=1) as server:
        connections = [connect(server, raw_request("wait")) for _ in range(2)]
        server.until("lmi_queue_depth", 1)
        response = server.invoke("a")
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json() == {
            "code": 503,
            "type": "WlmCapacityException",
            "message": "Worker queue capacity exceeded for model: model",
            "error": "Worker queue capacity exceeded for model: model",
        }
        for connection in connections:
            connection.close()


def test_the_line_at_the_end_of_the_start_says_where_the_server_is_and_how_to_try_it(tmp_path: Path) -> None:
    """The command of the line is run as it stands."""
    with serving(tmp_path, variables={"SERVING_API_KEYS": "KEY"}) as server:
        url = f"http://127.0.0.1:{server.port}"
        line = server.log_line(rf"ready: API {url}, console {url}/console; try: (curl .*)\n?$")
        answer = subprocess.run(["sh", "-c", line[1]], capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(answer.stdout)["choices"][0]["message"]["content"]
        (ready,) = (line for line in server.lines if "] ready: " in line)
        assert re.search(r"\] ready: process \d+$", ready)


def test_the_ready_line_waits_for_the_model(tmp_path: Path) -> None:
    with serving(tmp_path, "fault_handlers:GatedHandler", ready=False) as server:
        assert server.http.get("/ping").status_code == 503
        assert not any("ready: " in line for line in server.lines)
        (tmp_path / "model" / "go").touch()
        server.log_line("ready: API ")


def test_the_socket_is_bound_and_reports_while_the_model_loads(tmp_path: Path) -> None:
    with serving(tmp_path, "fault_handlers:GatedHandler", libraries="", ready=False) as server:
        response = server.http.get("/ping")
        assert (response.status_code, response.json()) == (503, {"model": {"status": "PENDING"}})
        assert health(server) == (200, 503)
        refused = server.invoke("a")
        assert (refused.status_code, refused.json()["message"]) == (503, "Model is not ready: model: it is loading")
        assert refused.headers["retry-after"]
        (tmp_path / "model" / "go").touch()
        server.log_line(r"\] ready: process")
        assert server.http.get("/ping").status_code == 200
        assert health(server) == (200, 200)
        assert server.invoke("a").status_code == 200
        # A worker that was ready is loaded again, which takes as long as it takes: nobody should end the server for it.
        (tmp_path / "model" / "go").unlink()
        os.kill(server.worker_pid(), signal.SIGKILL)
        server.until("lmi_workers_ready", 0)
        response = server.http.get("/ping")
        assert (response.status_code, response.json()) == (200, {"model": {"status": "Unhealthy"}})
        assert health(server) == (200, 503)


def health(server: Server) -> tuple[int, int]:
    """Return the codes of /health/live and /health/ready."""
    live, ready = (server.http.get(f"/health/{kind}").status_code for kind in ("live", "ready"))
    return live, ready


def test_ping_waits_for_every_model_of_the_start(tmp_path: Path) -> None:
    make_model(tmp_path / "store" / "fast")
    slow = make_model(tmp_path / "store" / "slow", "fault_handlers:GatedHandler")
    with running("--model-store", tmp_path / "store", libraries="", workers=1) as server:
        response = server.http.get("/ping")
        states = {"fast": {"status": "Healthy"}, "slow": {"status": "PENDING"}}
        assert (response.status_code, response.json()) == (503, states)
        assert server.http.post("/predictions/fast", json=request("a")).status_code == 200
        later = make_model(tmp_path / "later", "fault_handlers:GatedHandler")
        server.http.post("/models", params={"url": str(later), "synchronous": "false"})
        (slow / "go").touch()
        server.log_line(r"slow-0\] ready: process")
        response = server.http.get("/ping")
        states = {"fast": {"status": "Healthy"}, "slow": {"status": "Healthy"}, "later": {"status": "PENDING"}}
        assert (response.status_code, response.json()) == (200, states)


def test_a_failed_load_ends_the_server(tmp_path: Path) -> None:
    make_model(tmp_path / "store" / "model", "fault_handlers:FailingHandler")
    make_model(tmp_path / "store" / "other", "fault_handlers:GatedHandler")
    with running(
        "--model-store", tmp_path / "store", libraries="", variables={"SERVING_WAIT_MODEL_LOADING": "true"}
    ) as server:
        assert server.ended() == 1
        reason, ending = (line for line in server.lines if " ERROR " in line and "model model" in line)
        assert "model model could not be loaded: the weights are missing" in reason
        assert "ending the server, because model model could not be loaded; with --keep-going" in ending


def test_a_failed_load_leaves_the_other_models_be(tmp_path: Path) -> None:
    with serving(tmp_path, "fault_handlers:FailingHandler", libraries="", ready=False) as server:
        server.log_line("model model could not be loaded: the weights are missing")
        response = server.http.get("/ping")
        assert (response.status_code, response.json()) == (500, {"model": {"status": "FAILED"}})
        refused = server.invoke("a")
        assert refused.status_code == 503
        assert "the weights are missing" in refused.json()["message"]
        assert server.stop() == 0


def test_a_model_registered_later_never_ends_the_server(tmp_path: Path) -> None:
    failing = make_model(tmp_path / "failing", "fault_handlers:FailingHandler")
    strict = {"SERVING_WAIT_MODEL_LOADING": "true", "SERVING_FAIL_FAST": "true"}
    with serving(tmp_path, libraries="", variables=strict) as server:
        server.http.post("/models", params={"url": str(failing), "synchronous": "false"})
        server.log_line("model failing could not be loaded")
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(1.0)  # twice as long as fail_fast takes
        response = server.http.get("/ping")
        states = {"model": {"status": "Healthy"}, "failing": {"status": "FAILED"}}
        assert (response.status_code, response.json()) == (200, states)
        assert health(server) == (200, 200)


def test_with_fail_fast_a_failed_model_ends_the_server(tmp_path: Path) -> None:
    failing = "fault_handlers:FailingHandler"
    with serving(tmp_path, failing, libraries="", ready=False, variables={"SERVING_FAIL_FAST": "true"}) as server:
        server.log_line("model model has failed, and fail_fast is set")
        assert server.ended() == 1


# --- the end ---


def test_sigterm_drains(tmp_path: Path) -> None:
    with (
        serving(tmp_path, libraries="", max_rolling_batch_size=1, echo_delay_ms=2) as server,
        connect(server, raw_request("a", 200, stream=True)) as running,
        connect(server, raw_request("b", 2, close=True)) as queued,
        connect(server, raw_request("c")[:-5]) as late,
    ):
        server.until("lmi_queue_depth", 1)
        server.process.terminate()
        server.log_line("draining")
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            late.sendall(raw_request("c")[-5:])
            refused = received(late)
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"connection: close" in refused
        assert received(running).count(b'"token"') == 200
        assert b'{"generated_text":" b b"}' in received(queued)
        assert server.ended() == 0


def test_a_drain_has_an_end(tmp_path: Path) -> None:
    with (
        serving(tmp_path, libraries="", variables={"SERVING_DRAIN_TIMEOUT": "0.2"}) as server,
        connect(server, raw_request("wait")) as unseen,
        connect(server, raw_request("token-then-wait", stream=True)) as seen,
    ):
        received(seen, until=b'"token"')
        server.until("lmi_requests_in_flight", 2)
        server.process.terminate()
        assert received(unseen).startswith(b"HTTP/1.1 503 ")
        rest = received(seen)
        assert b"shutting down" in rest
        assert rest.endswith(b"0\r\n\r\n")
        assert server.ended() == 0


def test_a_second_signal_ends_at_once_and_no_line_of_the_log_is_lost(tmp_path: Path) -> None:
    variables = {"SERVING_ACCESS_LOG": "text"}
    with (
        serving(tmp_path, libraries="", variables=variables) as server,
        connect(server, raw_request("wait")),
    ):
        worker = server.worker_pid()
        server.until("lmi_requests_in_flight", 1)
        server.invoke("a", headers={"x-request-id": "the-last"})
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGINT)
        assert server.ended() == 1
        assert "id=the-last " in "".join(server.lines)
        assert is_gone(worker)


def test_sigterm_while_loading(tmp_path: Path) -> None:
    with serving(tmp_path, "fault_handlers:GatedHandler", libraries="", ready=False) as server:
        server.process.terminate()
        assert server.ended() == 0


@pytest.mark.parametrize("prompt", ["a", "hang"])
def test_no_worker_outlives_a_killed_server(tmp_path: Path, prompt: str) -> None:
    with serving(tmp_path, libraries="") as server, connect(server, raw_request(prompt, 100_000_000, stream=True)):
        worker = server.worker_pid()
        server.until("lmi_requests_in_flight", 1)
        server.process.kill()
        server.ended()
        assert is_gone(worker)


def is_gone(pid: int) -> bool:
    """Wait for the end of a process that is not our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 30)[0])
    finally:
        os.close(descriptor)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        source = (
            "from frontend.server import run; from lmi_server.configuration.server_settings import ServerSettings\n"
            f"raise SystemExit(run([], ServerSettings(port={port}), {{}}))"
        )
        ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in ended.stderr


def test_a_server_that_is_started_without_standard_files_serves(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model")
    with reserved_port() as port:
        command = [sys.executable, "-m", "lmi_server", "serve", str(directory), "--port", str(port)]
        process = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command])
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: process.poll() is not None or answers(f"{url}/ping"), "it is ready")
            assert httpx.post(f"{url}/invocations", json=request("a")).json() == {"generated_text": " a a a"}
        finally:
            process.terminate()
            assert process.wait(30) == 0


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False
