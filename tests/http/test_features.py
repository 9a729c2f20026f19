"""A feature is its modules and its entry in the table: without both, the core starts and serves."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from feature_modules import BUILT_ON, FEATURE_MODULES
from paths import ROOT
from process_log import ProcessLog

from lmi_server.features import FEATURES

TABLE = "lmi_server/features.py"
# Prints the settings and the commands that there are, then is `python -m lmi_server`.
PARTS_AND_SERVER = """
import json
from typer.main import get_command
from lmi_server.commands.cli import app
from lmi_server.commands.container_command import COMMANDS
from lmi_server.configuration.server_settings import ServerSettings
assert dict(get_command(app).commands).keys() == COMMANDS  # the dict has them all imported
print(json.dumps([[option.key for option in ServerSettings.declared_options()], sorted(COMMANDS)]), flush=True)
from lmi_server.commands.start import main
main()
"""
# What a server with the feature answers to, with another status than 404 or 405.
PATHS = {
    "sagemaker": "/endpoints/model/invocations",
    "kserve": "/v2/models/model/generate",
    "tgi": "/generate",
    "anthropic": "/v1/messages",
    "speech": "/v1/audio/transcriptions",
    "vllm_calls": "/sleep",
}
KEYS = {
    "capture": "capture_to",
    "sagemaker": "async_jobs_size",
    "batches": "batches_store",
    "stored_responses": "responses_store",
    "vllm_calls": "wake_on_request",
    "console": "console",
    "traces": "trace_sample",
    "emf": "emf_namespace",
}
"""One setting of each feature that has settings."""
EXTENDED = {"reload"}
"""Commands of the core in whose place a feature has one that can more."""


def test_the_table_is_that_of_the_tests() -> None:
    assert [feature.name for feature in FEATURES] == list(FEATURE_MODULES)


def removed(name: str) -> set[str]:
    """Return the features that go with one."""
    return {name, *(other for other, needed in BUILT_ON.items() if name in needed)}


def tree_without(names: Collection[str], directory: Path) -> Path:
    """Return a copy of the source without the modules and the entries of these features."""
    for package in ("lmi_server", "frontend", "handlers"):
        shutil.copytree(ROOT / package, directory / package, copy_function=link)
    for module in (module for name in names for module in FEATURE_MODULES[name]):
        path = directory / module.replace(".", "/")
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.with_suffix(".py").unlink()
    table = (directory / TABLE).read_text(encoding="utf-8")
    lines = table.splitlines(keepends=True)
    entries = [node for node in ast.walk(ast.parse(table)) if is_entry(node, names)]
    assert len(entries) == len(names)
    for entry in entries:
        assert entry.end_lineno is not None
        lines[entry.lineno - 1 : entry.end_lineno] = [""] * (entry.end_lineno - entry.lineno + 1)
    (directory / TABLE).unlink()  # it is that of the project
    (directory / TABLE).write_text("".join(lines), encoding="utf-8")
    return directory


def link(source: str, target: str) -> None:
    """Copy a file by a name more for it, which costs no blocks on the disk."""
    try:
        os.link(source, target)
    except OSError:  # the directory of the tests is on another file system
        shutil.copy2(source, target)


def is_entry(node: ast.AST, names: Collection[str]) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "FeatureSpec":
        return False
    named = {keyword.value.value for keyword in node.keywords if isinstance(keyword.value, ast.Constant)}
    return not named.isdisjoint(names)


@dataclass(frozen=True)
class Started:
    """What the code of a tree has as settings and commands, and a client of its server."""

    settings: Collection[str]
    commands: Collection[str]
    client: httpx.Client


@contextlib.contextmanager
def serving(tree: Path) -> Iterator[Started]:
    """Serve the echo model with the code of `tree`."""
    model = tree / "model"
    model.mkdir()
    (model / "serving.properties").write_text("option.entryPoint=djl_python.echo\n")
    process = subprocess.Popen(
        [sys.executable, "-c", PARTS_AND_SERVER, "serve", str(model), "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd=tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = ProcessLog(process.stderr)
    assert process.stdout is not None
    try:
        printed = process.stdout.readline()
        url = log.wait_for(r"ready: API ([^\s,;]+)")[1]
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Started(*json.loads(printed), client)
    finally:
        process.terminate()
        assert process.wait(60) == 0
        log.close()
        process.stdout.close()


def check_core(client: httpx.Client) -> None:
    assert client.get("/ping").status_code == 200
    answer = client.post("/invocations", json={"inputs": "one two three"})
    assert (answer.status_code, "generated_text" in answer.json()) == (200, True), answer.text
    chat = {"model": "model", "messages": [{"role": "user", "content": "one two"}]}
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    assert "lmi_requests" in client.get("/metrics").text
    assert "/invocations" in client.get("/openapi.json").json()["paths"]


def check_absence(client: httpx.Client, names: Collection[str]) -> None:
    """Check that the server has the paths of the other features, and none of these."""
    for name, path in PATHS.items():
        absent = client.post(path, json={}).status_code in (404, 405)
        assert absent == (name in names), (name, path)
    page = client.get("/console", follow_redirects=False)
    assert (page.status_code == 404) == ("console" in names)


def check_parts(found: Started, names: Collection[str]) -> None:
    """Check that there are the settings and the commands of the other features, and none of these."""
    settings, commands = found.settings, found.commands
    assert all((key in settings) == (name not in names) for name, key in KEYS.items())
    for feature in FEATURES:
        own = feature.commands.keys() - EXTENDED
        assert all((command in commands) == (feature.name not in names) for command in own)
    assert set(commands) >= EXTENDED


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURE_MODULES)
def test_without_a_feature_the_core_serves(name: str, tmp_path: Path) -> None:
    names = removed(name)
    tree = tree_without(names, tmp_path)
    with serving(tree) as found:
        check_parts(found, names)
        check_core(found.client)
        check_absence(found.client, names)


def test_without_any_feature_the_core_serves(tmp_path: Path) -> None:
    tree = tree_without(FEATURE_MODULES, tmp_path)
    with serving(tree) as found:
        check_parts(found, FEATURE_MODULES)
        check_core(found.client)
        check_absence(found.client, FEATURE_MODULES)
