"""How far a model is that loads: over the management API, as its worker says it."""

from __future__ import annotations

import os
import signal
from datetime import datetime, timedelta
from pathlib import Path

from server_helpers import make_model, running
from waiting import wait_until


def test_a_worker_says_how_far_it_is_until_it_is_loaded(tmp_path: Path) -> None:
    with running() as server:
        url = make_model(tmp_path / "slow", "fault_handlers:ReportingHandler")
        assert server.http.post("/models", params={"url": str(url), "synchronous": "false"}).status_code == 202
        wait_until(
            lambda: server.described("slow").get("loading", {}).get("done") == 3, "the worker says how far it is"
        )
        loading = server.described("slow")["loading"]
        assert loading["what"].startswith("<img src=x onerror=alert(1)>\\n")
        assert len(loading["what"]) < 300
        assert (loading["total"], loading["percent"], loading["unit"]) == (4, 75, "parts")
        assert loading["startTime"].endswith("Z")
        assert "secondsLeft" not in loading  # nothing moves
        assert server.log_line(r"\[slow\] <img src=x onerror=alert\(1\)>\\n.*: 3 of 4 parts \(75 %\)")
        (url / "go").touch()
        wait_until(lambda: server.described("slow")["status"] == "Healthy", "it is loaded")
        assert "loading" not in server.described("slow")


def test_a_reload_and_a_restart_say_how_far_they_are(tmp_path: Path) -> None:
    url = make_model(tmp_path / "slow", "fault_handlers:ReportingHandler")
    gate = url / "go"
    gate.touch()
    with running(url, workers=1) as server:
        assert "loading" not in server.described("slow")
        gate.unlink()
        assert server.http.post("/models/slow/reload", params={"synchronous": "false"}).status_code == 202
        wait_until(lambda: server.described("slow").get("loading", {}).get("done") == 3, "the next version says it")
        found = server.described("slow")
        assert (found["status"], found["reload"]["status"]) == ("Healthy", "LOADING")
        began = [datetime.fromisoformat(found[each]["startTime"]) for each in ("loading", "reload")]
        assert abs(began[1] - began[0]) < timedelta(seconds=1), "one after the other"
        gate.touch()
        wait_until(lambda: server.described("slow")["reload"]["status"] == "DONE", "it is loaded again")
        wait_until(lambda: "loading" not in server.described("slow"), "nothing loads any more")
        gate.unlink()
        reloaded = server.described("slow")
        os.kill(reloaded["workerGroups"][0]["workers"][0]["pid"], signal.SIGKILL)
        wait_until(lambda: server.described("slow").get("loading", {}).get("done") == 3, "the next worker says it")
        found = server.described("slow")
        assert found["status"] == "Unhealthy"
        assert found["loading"]["startTime"] > reloaded["reload"]["startTime"]
        gate.touch()
        wait_until(lambda: server.described("slow")["status"] == "Healthy", "it serves again")
        assert "loading" not in server.described("slow")
