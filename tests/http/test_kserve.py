"""The Open Inference Protocol: models of each kind in a server, asked in JSON and in binary tensors."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_environment import ClientScripts
from server_helpers import Server, running

ROWS = [[0.0, 1.0], [1.0, 0.0], [2.0, 3.0]]
OWN = """
def handle(inputs):
    from djl_python import Output

    if inputs.is_empty():
        return None
    body = inputs.get_as_json()
    return Output().add_as_json({"inputs": [tensor["name"] for tensor in body["inputs"]]})
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(*text_and_own(tmp_path_factory.mktemp("kserve")), workers=2) as server:
        yield server


@pytest.fixture(scope="module")
def with_table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a table as well, for slow tests: the import of scikit-learn takes seconds, here and in the worker."""
    home = tmp_path_factory.mktemp("kserve")
    (home / "table").mkdir()
    save_table(home / "table")
    with running(*text_and_own(home), home / "table", workers=3) as server:
        yield server


def text_and_own(home: Path) -> tuple[Path, Path]:
    """Write a model that generates text and one of its own code."""
    for name in ("text", "own"):
        (home / name).mkdir()
    (home / "text" / "serving.properties").write_text("option.entryPoint=djl_python.echo")
    (home / "own" / "model.py").write_text(OWN)
    return home / "text", home / "own"


def save_table(directory: Path) -> None:
    """Save a linear model as a pickle: skops takes seconds to import, here and in the worker."""
    from sklearn.linear_model import LinearRegression

    fitted = LinearRegression().fit([[0, 0], [1, 0], [0, 1]], [1, 2, 3])
    (directory / "model.pkl").write_bytes(pickle.dumps(fitted))
    (directory / "serving.properties").write_text("engine=Python\noption.trust_insecure_model_files=true")


def tensor(data: Any, datatype: str = "BYTES", name: str = "text_input", **parameters: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [len(data)], "data": data, "parameters": parameters}


def infer(server: Server, model: str, *inputs: dict[str, Any], **more: Any) -> httpx.Response:
    return server.http.post(f"/v2/models/{model}/infer", json={"inputs": list(inputs), **more})


def binary(server: Server, model: str, header: dict[str, Any], *blobs: bytes) -> httpx.Response:
    head = json.dumps(header).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return server.http.post(f"/v2/models/{model}/infer", content=b"".join((head, *blobs)), headers=headers)


def test_health_and_metadata(server: Server) -> None:
    get = server.http.get
    assert get("/v2/health/live").json() == {"live": True}
    assert get("/v2/health/ready").json() == {"ready": True}
    about = get("/v2").json()
    assert (about["name"], "binary_tensor_data" in about["extensions"]) == ("lmi-server", True)
    assert get("/v2/models/text/ready").json() == {"name": "text", "ready": True}
    text = get("/v2/models/text").json()
    assert text["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [-1]}]
    assert text["outputs"] == [{"name": "text_output", "datatype": "BYTES", "shape": [-1]}]
    assert get("/v2/models/own").json()["inputs"] == []
    index = server.http.post("/v2/repository/index").json()
    assert [(model["name"], model["state"]) for model in index] == [("own", "READY"), ("text", "READY")]


@pytest.mark.slow
def test_metadata_of_a_table(with_table: Server) -> None:
    about = with_table.http.get("/v2/models/table").json()
    assert about["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, -1]}]
    index = with_table.http.post("/v2/repository/index").json()
    assert [(model["name"], model["state"]) for model in index] == [
        (name, "READY") for name in ("own", "table", "text")
    ]


def test_texts_in_tensors(server: Server) -> None:
    answer = infer(server, "text", tensor(["a b c", "d"]), tensor([2], "INT32", "max_tokens"), id="7").json()
    output = {"name": "text_output", "datatype": "BYTES", "shape": [2], "data": [" a b", " d d"]}
    assert answer == {"model_name": "text", "id": "7", "outputs": [output]}
    parameters = {
        "max_tokens": 1,
        "exclude_input_in_output": False,
        "sampling_parameters": '{"seed": 1}',
        "stop_words": "",
    }
    with_prompt = infer(server, "text", tensor([["a b"]], name="prompt") | {"shape": [1, 1]}, parameters=parameters)
    assert with_prompt.json()["outputs"][0]["data"] == ["a b a"]


def test_binary_tensors(server: Server) -> None:
    prompt = "grüße b".encode()
    element = struct.pack("<I", len(prompt)) + prompt
    header = {
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(element)}},
            {"name": "max_tokens", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}},
        ],
        "parameters": {"binary_data_output": True},
    }
    answer = binary(server, "text", header, element, struct.pack("<i", 1))
    length = int(answer.headers["inference-header-content-length"])
    output = json.loads(answer.content[:length])["outputs"][0]
    text = " grüße".encode()
    assert answer.content[length:] == struct.pack("<I", len(text)) + text
    assert output["parameters"] == {"binary_data_size": len(text) + 4}
    assert answer.headers["content-type"] == "application/octet-stream"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("datatype", "code"), [("FP16", "e"), ("FP32", "f"), ("FP64", "d"), ("INT64", "q"), ("UINT8", "B")]
)
def test_rows_of_numbers(with_table: Server, datatype: str, code: str) -> None:
    flat = [int(value) if datatype[0] in "IU" else value for row in ROWS for value in row]
    data = struct.pack(f"<6{code}", *flat)
    entry = {"name": "rows", "datatype": datatype, "shape": [3, 2], "parameters": {"binary_data_size": len(data)}}
    answer = binary(with_table, "table", {"inputs": [entry], "outputs": [{"name": "output"}]}, data).json()
    (output,) = answer["outputs"]
    assert (output["datatype"], output["shape"]) == ("FP64", [3])
    assert output["data"] == pytest.approx([3, 2, 9])


def test_code_of_a_user_gets_the_json_as_it_is(server: Server) -> None:
    assert infer(server, "own", tensor(["a"], name="x"), tensor([1], "INT8", "y")).json() == {"inputs": ["x", "y"]}


def test_the_generate_extension(server: Server) -> None:
    body = {"text_input": "a b c", "parameters": {"max_tokens": 2, "stream": False}, "id": "1"}
    answer = server.http.post("/v2/models/text/generate", json=body)
    assert answer.json() == {"model_name": "text", "id": "1", "text_output": " a b"}
    flat = {"text_input": "a b c", "max_tokens": 2, "bad_words": "", "stream": True}
    stream = server.http.post("/v2/models/text/generate_stream", json=flat)
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in stream.text.splitlines() if line]
    assert [event["text_output"] for event in events] == [" a", " b"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("text/infer", b"{", 400, "the body cannot be read"),
        ("text/infer", {"inputs": []}, 400, "send one tensor of prompts"),
        ("text/infer", {"inputs": [tensor(["a"], "FP8")]}, 400, "datatype FP8 is not supported; send BOOL, "),
        ("text/infer", {"inputs": [tensor(["a"]) | {"shape": [2]}]}, 400, "shape [2] does not fit 1 elements"),
        ("text/infer", {"inputs": [tensor(["a"], "INT8")]}, 400, "data has elements that are not INT8"),
        ("text/infer", {"inputs": [tensor(["a"], shared_memory_region="x")]}, 400, "shared_memory_region is not"),
        ("text/infer", {"inputs": [tensor(["a"], binary_data_size=9)]}, 400, "binary_data_size is more than"),
        ("text/infer", {"inputs": [tensor(["a"])], "outputs": [{"name": "x"}]}, 400, "ask for text_output"),
        ("text/infer", {"inputs": [tensor(["a"])], "parameters": {"n": 2, "do_sample": True}}, 400, "n and best_of"),
        ("text/infer", {"inputs": [tensor(["a"])], "parameters": {"top_p": 3}}, 400, "parameters.top_p"),
        ("text/generate", {"text_input": "a", "stream": True}, 400, "post to generate_stream"),
        ("text/generate", {"text_input": ""}, 400, "text_input"),
        ("none/infer", {"inputs": []}, 404, "Model or workflow not found: none"),
        ("text/versions/9/infer", {"inputs": []}, 404, "Model or workflow not found: text/9"),
        ("text/unknown", {}, 404, "Requested resource is not found"),
    ],
)
def test_errors_have_the_protocol_s_form(server: Server, path: str, body: Any, status: int, message: str) -> None:
    check_error(server, path, body, status, message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("table/infer", {"inputs": [tensor([1.0], "FP32"), tensor([1.0], "FP32")]}, "this model takes one"),
        ("table/infer", {"inputs": [tensor([1.0], "FP32")], "outputs": [{"name": "x"}]}, "ask for output"),
        ("table/generate", {"text_input": "a"}, ""),
    ],
)
def test_errors_of_a_table_have_the_protocol_s_form(with_table: Server, path: str, body: Any, message: str) -> None:
    check_error(with_table, path, body, 400, message)


def check_error(server: Server, path: str, body: Any, status: int, message: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.http.post(f"/v2/models/{path}", content=content)
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    assert message in answer.json()["error"]


def test_a_wrong_method_and_a_wrong_length(server: Server) -> None:
    refused = server.http.get("/v2/models/text/infer")
    assert (refused.status_code, refused.json()) == (
        405,
        {"error": "GET is not allowed on /v2/models/text/infer; use POST"},
    )
    wrong = server.http.post("/v2/models/text/infer", content=b"{}", headers={"Inference-Header-Content-Length": "9"})
    assert (wrong.status_code, list(wrong.json())) == (400, ["error"])


TRITON = """
import numpy as np
import tritonclient.http as triton

with triton.InferenceServerClient("127.0.0.1:8080") as client:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("text")
    assert client.get_model_metadata("text")["name"] == "text"
    assert len(client.get_model_repository_index()) == 3
    prompts = triton.InferInput("text_input", [2], "BYTES")
    prompts.set_data_from_numpy(np.array(["a b", "c"], dtype=object))
    result = client.infer("text", [prompts], parameters={"max_tokens": 1}, request_id="5")
    assert result.as_numpy("text_output").tolist() == [b" a", b" c"]
    rows = triton.InferInput("rows", [3, 2], "FP32")
    rows.set_data_from_numpy(np.array(ROWS, dtype=np.float32))
    for as_binary in (True, False):
        outputs = [triton.InferRequestedOutput("output", binary_data=as_binary)]
        answer = client.infer("table", [rows], outputs=outputs, request_compression_algorithm="gzip")
        assert np.allclose(answer.as_numpy("output"), [3, 2, 9], atol=1e-5)
    try:
        client.infer("none", [rows])
    except triton.InferenceServerException as error:
        print(error.message())
"""


@pytest.mark.slow
def test_triton_s_client(with_table: Server) -> None:
    code = TRITON.replace("127.0.0.1:8080", f"127.0.0.1:{with_table.port}").replace("ROWS", str(ROWS))
    printed = ClientScripts({"triton": ("tritonclient", code)}).output("triton")
    assert printed == "Model or workflow not found: none\n"


# The bodies are those of kserve 0.21, whose thirty packages no environment of the tests has.
KSERVE_ID = "a3ab4e73-79c0-4dcb-9c7b-af10074f3333"


def test_what_kserve_s_client_sends(server: Server) -> None:
    body = {"id": KSERVE_ID, "model_name": "text"}
    prompts = {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["a b", "c"]}
    asked = {**body, "inputs": [prompts], "parameters": {"max_tokens": 1}}
    answer = server.http.post("/v2/models/text/infer", json=asked).json()
    assert (answer["id"], answer["outputs"][0]["data"]) == (body["id"], [" a", " c"])


@pytest.mark.slow
def test_what_kserve_s_client_sends_for_a_table(with_table: Server) -> None:
    rows = {"name": "rows", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    header = {"id": KSERVE_ID, "model_name": "table", "inputs": [rows]}
    assert binary(with_table, "table", header, struct.pack("<2f", 2, 3)).json()["outputs"][0]["data"] == pytest.approx(
        [9]
    )
