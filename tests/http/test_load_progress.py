"""How far a model is that loads: over the management API, as its worker says it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from server_helpers import Server, make_model, running
from waiting import wait_until


def described(server: Server, name: str) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get(f"/models/{name}").json()[0]["models"][0]
    return found


def test_a_worker_says_how_far_it_is_until_it_is_loaded(tmp_path: Path) -> None:
    with running() as server:
        url = make_model(tmp_path / "slow", "fault_handlers:ReportingHandler")
        assert server.http.post("/models", params={"url": str(url), "synchronous": "false"}).status_code == 202
        wait_until(
            lambda: described(server, "slow").get("loading", {}).get("done") == 3, "the worker says how far it is"
        )
        loading = described(server, "slow")["loading"]
        assert loading["what"].startswith("<img src=x onerror=alert(1)>\\n")
        assert len(loading["what"]) < 300
        assert (loading["total"], loading["percent"], loading["unit"]) == (4, 75, "parts")
        assert loading["startTime"].endswith("Z")
        assert "secondsLeft" not in loading  # nothing moves
        assert server.log_line(r"\[slow\] <img src=x onerror=alert\(1\)>\\n.*: 3 of 4 parts \(75 %\)")
        (url / "go").touch()
        wait_until(lambda: described(server, "slow")["status"] == "Healthy", "it is loaded")
        assert "loading" not in described(server, "slow")


def test_a_reload_and_a_restart_say_how_far_they_are(tmp_path: Path) -> None:
    url = make_model(tmp_path / "slow", "fault_handlers:ReportingHandler")
    gate = url / "go"
    gate.touch()
    with running(url) as server:
        server.log_line(r"\] ready: process")
        assert "loading" not in described(server, "slow")
        gate.unlink()
        assert server.http.post("/models/slow/reload", params={"synchronous": "false"}).status_code == 202
        wait_until(lambda: described(server, "slow").get("loading", {}).get("done") == 3, "the next version says it")
        found = described(server, "slow")
        assert (found["status"], found["reload"]["status"]) == ("Healthy", "LOADING")
        assert found["loading"]["startTime"] == found["reload"]["startTime"]
        gate.touch()
        wait_until(lambda: described(server, "slow")["reload"]["status"] == "DONE", "it is loaded again")
        wait_until(lambda: "loading" not in described(server, "slow"), "nothing loads any more")
        gate.unlink()
        reloaded = described(server, "slow")
        os.kill(reloaded["workerGroups"][0]["workers"][0]["pid"], signal.SIGKILL)
        wait_until(lambda: described(server, "slow").get("loading", {}).get("done") == 3, "the next worker says it")
        found = described(server, "slow")
        assert found["status"] == "Unhealthy"
        assert found["loading"]["startTime"] > reloaded["reload"]["startTime"]
        gate.touch()
        wait_until(lambda: described(server, "slow")["status"] == "Healthy", "it serves again")
        assert "loading" not in described(server, "slow")
