"""The command line takes a model of the Hugging Face Hub, of S3, or in an archive where it takes a directory."""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from artifact_helpers import BUCKET, s3_server
from fake_hub import fake_hub
from forked_servers import run_command
from paths import ROOT
from process_log import ProcessLog
from waiting import wait_until

ECHO = "option.entryPoint=djl_python.echo\n"
CONFIG = b'{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}'
OF_THE_HUB = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "model.safetensors": struct.pack("<Q", 2) + b"{}",
    "serving.properties": b"option.entryPoint=of_the_hub.py\n",
}


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Run a hub and S3 with models, and return the variables of their clients."""
    home = tmp_path_factory.mktemp("home")
    with fake_hub("team/tiny", OF_THE_HUB) as hub, s3_server(home) as s3:
        s3.put("in/prefix/serving.properties", ECHO.encode())
        s3.put("packed.zip", packed(home / "packed.zip").read_bytes())
        hub_variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "HF_HUB_ETAG_TIMEOUT": "5"}
        yield {**s3.variables, **hub_variables, "COLUMNS": "200"}


def packed(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("serving.properties", ECHO)
    return path


def directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "serving.properties").write_text(ECHO)
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lmi_server", *arguments]


def run(variables: dict[str, str], cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, env=variables | {"PYTHONPATH": str(ROOT)}, cwd=cwd)


@contextlib.contextmanager
def served(variables: dict[str, str], cwd: Path, *arguments: str) -> Iterator[httpx.Client]:
    environment = variables | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command("serve", *arguments, "--port", "0"), stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd
    )
    log = ProcessLog(process.stderr)
    try:
        with httpx.Client(base_url=log.wait_for(r"listening on (http://.*)")[1], timeout=60) as http:
            yield http
    finally:
        process.terminate()
        log.close()
        process.wait(30)


@pytest.mark.slow
def test_every_form_is_served(variables: dict[str, str], tmp_path: Path) -> None:
    directory(tmp_path / "team" / "local")  # exists, so it is no model of the hub
    directory(tmp_path / "by url")
    packed(tmp_path / "z.zip")
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz") as archive:
        archive.add(directory(tmp_path / "inside"), "inside")
    arguments = [
        *("team/local", "z.zip", "t.tar.gz", f"file://{tmp_path}/by%20url/", f"named={tmp_path}/inside"),
        *(f"s3://{BUCKET}/in/prefix/", f"s3://{BUCKET}/packed.zip", "team/tiny?option.entryPoint=djl_python.echo"),
    ]
    with served(variables, tmp_path, *arguments) as http:
        wait_until(lambda: http.get("/ping").status_code != 503, "the models are ready", 60)
        names = {model["modelName"] for model in http.get("/models").json()["models"]}
        assert names == {"local", "z", "t", "by_url", "named", "prefix", "packed", "team_tiny"}
        for name in names:
            answer = http.post(f"/predictions/{name}", json={"inputs": "a b", "parameters": {"max_new_tokens": 1}})
            assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_explain_and_check_fetch_what_serve_would(variables: dict[str, str], tmp_path: Path) -> None:
    explained = run(variables, tmp_path, "explain", "team/tiny", "--json")
    found = json.loads(explained.stdout)
    assert (found["name"], found["handler"]) == ("team_tiny", "huggingface")
    assert Path(found["model"], "config.json").read_bytes() == CONFIG
    again = run(variables | {"HF_HUB_OFFLINE": "1"}, tmp_path, "check", "team/tiny")
    assert (again.returncode, again.stdout) == (0, "team/tiny: 0 warnings, no problem\n"), again.stderr
    of_s3 = run(variables, tmp_path, "check", f"s3://{BUCKET}/packed.zip")
    assert of_s3.returncode == 0, of_s3.stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("team/other", "team/other: there is no such directory, and the hub has no such model, or it is private"),
        ("other", "other: there is no such directory; a model is a directory, an archive, a file in GGUF, a model"),
        ("none.tar.gz", "none.tar.gz: there is no such directory; a model is a directory, an archive,"),
        ("s3://absent/model", "there is no bucket absent"),
        ("https://example.com/m.tar.gz", "the server fetches no model over HTTP; download it and name the local"),
    ],
)
def test_what_is_no_model(variables: dict[str, str], tmp_path: Path, argument: str, message: str) -> None:
    result = run(variables, tmp_path, "check", argument)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
