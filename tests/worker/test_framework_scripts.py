"""Scripts for SageMaker's framework containers: code/inference.py with model_fn and its kin."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_helpers import Server, running

from lmi_server.configuration.resolve import inspect_model

# Every function, one that takes a context, a helper beside it, and a file of the model.
WHOLE = """
import json
import os
from helper import doubled

def model_fn(model_dir):
    with open(os.path.join(model_dir, "factor.txt")) as file:
        return int(file.read())

def input_fn(data, content_type, context):
    assert isinstance(data, str), type(data)
    context.set_response_header(0, "x-seen", context.get_request_header(0, "X-Mine"))
    return json.loads(data)["x"]

def predict_fn(data, model):
    return doubled(data) * model

def output_fn(prediction, accept):
    return f"{accept}: {prediction}", "text/plain"
"""
# Only what loads the model: the rest is the toolkit's own.
SHORT = """
import numpy as np

def model_fn(model_dir, context=None):
    return lambda data: np.asarray(data) * 2
"""
TRANSFORM = """
def model_fn(model_dir):
    return "model"

def transform_fn(model, data, content_type, accept, context):
    return f"{model} {data!r} {content_type} {accept} {context.system_properties['model_dir'][-9:]}", "text/x"
"""
UNLOADED = "def predict_fn(data, model): return data\n"


def script(directory: Path, code: str, place: str = "code/inference.py", **files: str) -> Path:
    path = directory / place
    path.parent.mkdir(parents=True)
    path.write_text(code)
    for name, text in files.items():
        (directory / name.replace("__", "/").replace("_", ".")).write_text(text)
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve one model of each kind; the first comes as an archive, as SageMaker has it."""
    home = tmp_path_factory.mktemp("scripts")
    store = home / "store"
    store.mkdir()
    helper = "def doubled(x):\n    return 2 * x\n"
    whole = script(home / "whole", WHOLE, factor_txt="7", code__helper_py=helper)
    with tarfile.open(store / "whole.tar.gz", "w:gz") as archive:
        archive.add(whole, ".")
    script(store / "short", SHORT)
    script(store / "transform", TRANSFORM, "inference.py")
    with running("--model-store", str(store)) as server:
        for _ in range(3):
            server.log_line(r"\] ready: process")
        yield server


def test_the_functions_are_called_in_turn(server: Server) -> None:
    headers = {"content-type": "application/json", "accept": "application/x-own", "x-mine": "1"}
    answer = server.http.post("/predictions/whole", json={"x": 3}, headers=headers)
    assert (answer.status_code, answer.text) == (200, "application/x-own: 42")
    assert (answer.headers["content-type"], answer.headers["x-seen"]) == ("text/plain", "1")


def test_an_exception_is_lmis_error(server: Server) -> None:
    answer = server.http.post("/predictions/whole", json={})
    assert (answer.status_code, "'x'" in answer.json()["error"]) == (424, True)


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"[[1, 2], [3, 4]]"),
        ("text/csv; charset=utf-8", b"1,2\n3,4\n"),
        ("application/x-npy", None),
    ],
)
def test_missing_functions_are_those_of_the_toolkit(server: Server, kind: str, body: bytes | None) -> None:
    content = npy(np.array([[1, 2], [3, 4]])) if body is None else body

    def ask(accept: str) -> Any:
        headers = {"content-type": kind, "accept": accept}
        return server.http.post("/predictions/short", content=content, headers=headers)

    assert ask("*/*").json() == [[2, 4], [6, 8]]
    rows = [[float(value) for value in line.split(",")] for line in ask("text/csv").text.splitlines()]
    assert rows == [[2, 4], [6, 8]]
    answer = ask("application/x-npy")
    assert answer.headers["content-type"] == "application/x-npy"
    assert np.load(io.BytesIO(answer.content)).tolist() == [[2, 4], [6, 8]]


def test_other_content_types_are_refused_by_name(server: Server) -> None:
    for headers, status in (({"content-type": "image/png"}, 415), ({"accept": "image/png"}, 406)):
        given = {"content-type": "application/json", **headers}
        answer = server.http.post("/predictions/short", content=b"[1]", headers=given)
        assert (answer.status_code, "image/png" in answer.text) == (status, True)


def test_one_function_may_do_all(server: Server) -> None:
    headers = {"content-type": "image/x", "accept": "text/y"}
    answer = server.http.post("/predictions/transform", content=b"\xff", headers=headers)
    assert (answer.text, answer.headers["content-type"]) == (r"model b'\xff' image/x text/y transform", "text/x")


def test_without_model_fn_the_error_says_so(tmp_path: Path) -> None:
    with running(script(tmp_path / "model", UNLOADED)) as server:
        server.log_line(r"inference\.py: defines no model_fn\(model_dir\), which loads the model")


# --- which script it is ---


def chosen(directory: Path, **environment: str) -> tuple[str, bool]:
    """Return the entry point of a model, and whether it is code of the user."""
    found = inspect_model(directory, environment)
    return found.options.entry_point or "", found.spec.runs_user_code


def test_sagemaker_names_the_script(tmp_path: Path) -> None:
    model = script(tmp_path / "model", WHOLE, "code/mine.py")
    assert chosen(model, SAGEMAKER_PROGRAM="mine.py") == ("code/mine.py", True)
    assert chosen(model)[1] is False


@pytest.mark.parametrize(
    ("more", "environment"),
    [
        ({"serving_properties": "option.rolling_batch=disable"}, {}),
        ({}, {"OPTION_MODEL_ID": "owner/model"}),
        ({}, {"HF_MODEL_ID": "owner/model"}),
        ({}, {"OPTION_ENTRYPOINT": "djl_python.huggingface"}),
    ],
)
def test_what_names_a_model_for_lmi_stays_one(
    tmp_path: Path, more: dict[str, str], environment: dict[str, str]
) -> None:
    model = script(tmp_path / "model", WHOLE, config_json='{"architectures": ["LlamaForCausalLM"]}', **more)
    assert chosen(model, **environment)[1] is False


def test_a_file_without_the_functions_is_no_script(tmp_path: Path) -> None:
    assert chosen(script(tmp_path / "model", "def main(): pass\n"))[1] is False


def test_secure_mode_knows_the_script_and_its_requirements(tmp_path: Path) -> None:
    model = script(tmp_path / "model", WHOLE, code__requirements_txt="x")
    controls = "DISALLOW_REQUIREMENTS_TXT,DISALLOW_CUSTOM_INFERENCE_SCRIPTS"
    variables = {"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": controls}
    problems = "\n".join(inspect_model(model, variables).problems)
    assert "code/requirements.txt is not allowed in secure mode" in problems
    assert 'option.entryPoint = "code/inference.py"' in problems
