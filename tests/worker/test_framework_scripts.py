"""Scripts for SageMaker's framework containers: code/inference.py with model_fn and its kin."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
# Shows what a context has; the body says what to set of the answer.
CONTEXT = """
import json

calls = []

def pre_model_fn(model_dir):
    calls.append("pre")

def model_fn(model_dir, context):
    calls.append(context.system_properties["server_name"])
    return calls

def model_warmup_fn(model_dir, model, context):
    model.append("warm")

def transform_fn(model, data, content_type, accept, context):
    asked = json.loads(data)
    for name, arguments in asked.get("set", []):
        getattr(context, name)(*arguments)
    for name, arguments in asked.get("report", []):
        getattr(context.metrics, name)(*arguments)
    shown = {name: eval(name, {"context": context}) for name in asked.get("show", [])}
    return json.dumps({"calls": model, **shown})
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
    script(store / "context", CONTEXT)
    batched = script(store / "batched", CONTEXT)
    (batched / "serving.properties").write_text("engine=Python\noption.entryPoint=code/inference.py\nbatch_size=4")
    with running("--model-store", str(store), workers=5) as server:
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


ATTRIBUTES = "trace=1; tenant=a b"


def shown(server: Server, *names: str, model: str = "context", **headers: str) -> list[Any]:
    """Return what expressions with `context` are in the script."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = server.http.post(f"/predictions/{model}", json={"show": names}, headers=given).json()
    return [answer[name] for name in names]


def test_the_functions_around_the_load_are_called(server: Server) -> None:
    answer = server.http.post("/predictions/context", json={}).json()
    assert answer == {"calls": ["pre", "lmi-server", "warm"]}


def test_custom_attributes_arrive_as_they_were_sent(server: Server) -> None:
    name = "X-Amzn-SageMaker-Custom-Attributes"
    names = f"context.get_request_header(0, '{name}')", f"context.get_all_request_header(0)['{name}']"
    for sent in (ATTRIBUTES, "an id"):
        assert shown(server, *names, x_amzn_sagemaker_custom_attributes=sent) == [sent, sent]
    assert shown(server, names[0]) == [None]
    assert shown(server, names[0], model="batched", x_amzn_sagemaker_custom_attributes=ATTRIBUTES) == [ATTRIBUTES]


def test_a_context_describes_the_request_and_the_model(server: Server) -> None:
    names = (
        "context.get_request_id()",
        "context.get_request_id(0)",
        "context.get_request_id(1)",
        "context.get_request_header(0, 'x-MINE')",
        "context.request_processor[0].get_request_property('X-Mine')",
        "sorted(name for name in context.get_all_request_header(0) if name in ('x-mine', 'model_dir', 'requestId'))",
        "context.model_name",
        "context.manifest",
        "context.system_properties['gpu_id']",
        "context.system_properties['batch_size']",
        "context.get_response_status(0)",
        "context.get_response_content_type(0)",
    )
    values = shown(server, *names, x_mine="1", x_request_id="mine")
    assert values == ["mine", "mine", None, "1", "1", ["x-mine"], "context", {}, None, 1, [200, ""], None]


@pytest.mark.parametrize("setter", ["set_response_status", "set_all_response_status"])
def test_a_context_sets_status_and_headers_of_the_answer(server: Server, setter: str) -> None:
    wanted = [
        (setter, (201, "Made")),
        ("set_response_content_type", (0, "text/mine")),
        ("set_response_header", (0, "x-set", "2")),
    ]
    show = ["context.get_response_headers(0)", "context.get_response_status(0)", "context.get_response_content_type(0)"]
    answer = server.http.post("/predictions/context", json={"set": wanted, "show": show})
    assert (answer.status_code, answer.reason_phrase) == (201, "Made")
    assert (answer.headers["content-type"], answer.headers["x-set"]) == ("text/mine", "2")
    headers, status, kind = (answer.json()[name] for name in show)
    assert (headers, status, kind) == ({"content-type": "text/mine", "x-set": "2"}, [201, "Made"], "text/mine")


def test_metrics_of_a_context_are_the_models(server: Server) -> None:
    report = [
        ("add_counter", ("Seen", 2)),
        ("add_time", ("Took", 1.5, 0, "s")),
        ("add_size", ("Size", 3)),
        ("add_percent", ("Share", 50)),
        ("add_metric", ("Other", 7)),
        ("add_error", ("Broken", "a\nb")),
    ]
    assert server.http.post("/predictions/context", json={"report": report}).status_code == 200
    server.log_line(r"\[METRICS\]Broken\.Error:a b\|#ModelName:context$")
    metrics = server.http.get("/metrics").text
    for name in ("Seen", "Took", "Size", "Share", "Other"):
        assert re.search(rf"^{name}.*context", metrics, re.MULTILINE), name
    refused = server.http.post("/predictions/context", json={"report": [("add_time", ("Took", 1, 0, "h"))]})
    assert (refused.status_code, "unit 'h' is not allowed; allowed: ms, s" in refused.text) == (424, True)


def test_a_script_gets_one_request_at_a_time(server: Server) -> None:
    with ThreadPoolExecutor(8) as clients:
        answers = clients.map(
            lambda index: shown(server, "1", "context.get_request_id()", model="batched", x_request_id=str(index)),
            range(8),
        )
    assert list(answers) == [[1, str(index)] for index in range(8)]


def test_without_model_fn_the_error_says_so(tmp_path: Path) -> None:
    with running(script(tmp_path / "model", UNLOADED)) as server:
        server.log_line(r"inference\.py: defines no model_fn\(model_dir\), which loads the model")


def test_one_function_for_all_and_its_parts_contradict_each_other(tmp_path: Path) -> None:
    with running(script(tmp_path / "model", f"{TRANSFORM}\n{UNLOADED}")) as server:
        server.log_line(r"inference\.py: transform_fn does the work of predict_fn; define one or the other")


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
