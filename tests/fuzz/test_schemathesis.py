"""schemathesis reads /openapi.json and calls every operation in it, in an environment of its own (`make fuzz`)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from paths import ROOT
from server_helpers import Server, make_model, running

VERSION = "4.32.5"
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance"
LEFT_OUT = r"^/(models|workflows)/\{model\}(/\{version\})?$|generate_stream$"
"""Calls that end the models which the others need, and streams: each event of one is no text, as the whole is."""

CONFIGURATION = """
[parameters]
"path.model" = "echo"
"path.adapter" = "none"
"""


@pytest.mark.slow
def test_every_operation_of_the_document(tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION)
    with running(make_model(tmp_path / "echo", "handlers.echo.handler:EchoHandler", enable_lora="true")) as server:
        server.log_line(r"\] ready: process")
        done = subprocess.run(command(server, tmp_path), capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        server.until("lmi_requests_in_flight", 0, "echo")
        assert server.stop() == 0
    assert not [line for line in server.lines if "Traceback" in line]


def command(server: Server, directory: Path) -> list[str]:
    tool = [str(ROOT / ".venv/bin/uv"), "tool", "run", "--from", f"schemathesis=={VERSION}", "schemathesis"]
    options = ["--config-file", str(directory / "schemathesis.toml"), "run", "--checks", CHECKS, "--max-examples", "60"]
    skipped = ["--exclude-path-regex", LEFT_OUT, "--suppress-health-check", "all", "--request-timeout", "60"]
    return [*tool, *options, *skipped, f"http://127.0.0.1:{server.port}/openapi.json"]
