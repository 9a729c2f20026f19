"""Tasks over HTTP: one of each kind in one server, and OpenAI's SDK against the embeddings."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import sentence_transformers
from pipeline_helpers import approximately, png, started, wav
from pipeline_helpers import ask as ask_handler
from server_helpers import Server, running
from tiny_tasks import make_task_model

pytestmark = pytest.mark.slow

TEXTS = ["the fox", "a", "the dog jumps over the blue fox"]
TABLE = {"query": "who is red", "table": {"name": ["fox", "dog"], "colour": ["red", "blue"]}}
QUESTION = {"question": "who is red", "context": "the fox is red. the dog is blue."}
# One task of each kind: those of a kind run the same code, and other tests ask each of them without a server.
BODIES: dict[str, tuple[Any, str]] = {
    "fill-mask": ({"inputs": "the [MASK] jumps"}, "application/json"),
    "question-answering": (QUESTION, "application/json"),
    "text-embedding": ({"inputs": TEXTS}, "application/json"),
    "table-question-answering": (TABLE, "application/json"),
    "text2text-generation": ({"inputs": "a", "parameters": {"max_new_tokens": 4}}, "application/json"),
    "image-classification": (png(), "image/png"),
    "automatic-speech-recognition": (wav(), "audio/wav"),
}


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    directory = make_task_model("text-embedding", tmp_path_factory.mktemp("http") / "model")
    with running(directory) as server:
        server.log_line(r"\] ready: process")
        yield server, directory


def sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def test_openai_s_sdk_embeds(embeddings: tuple[Server, Path]) -> None:
    server, directory = embeddings
    expected = sentence_transformers.SentenceTransformer(str(directory), device="cpu").encode(TEXTS)
    with sdk(server) as client:
        found = client.embeddings.create(model="model", input=TEXTS)  # the SDK asks for base64
        floats = client.embeddings.create(model="model", input=TEXTS[0], encoding_format="float", dimensions=5)
    assert np.array([item.embedding for item in found.data]) == pytest.approx(expected, abs=1e-5)
    assert len(floats.data[0].embedding) == 5
    assert floats.usage.prompt_tokens == floats.usage.total_tokens > 0


def test_errors_have_openai_s_form(embeddings: tuple[Server, Path]) -> None:
    server, _ = embeddings
    with sdk(server) as client, pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model="model", input="the " * 100)
    assert raised.value.code == "context_length_exceeded"
    with sdk(server) as client, pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model="another", input="the")
    assert unknown.value.code == "model_not_found"
    assert "served here: model" in unknown.value.message
    answer = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    answer = server.http.post("/invocations", json={"inputs": 3})
    assert (answer.status_code, answer.json()["code"]) == (424, 424)


def test_vectors_are_sent_as_tensors_too(embeddings: tuple[Server, Path]) -> None:
    server, _ = embeddings
    body = {"inputs": ["the fox", "a"]}
    expected = server.http.post("/invocations", json=body).json()
    npz = server.http.post("/invocations", json=body, headers={"Accept": "tensor/npz"})
    assert npz.headers["content-type"] == "tensor/npz"
    assert [array.tolist() for array in np.load(io.BytesIO(npz.content)).values()] == expected
    listed = server.http.post("/invocations", json=body, headers={"Accept": "tensor/ndlist"})
    assert listed.content[:4] == (2).to_bytes(4)
    assert listed.content.endswith(np.array(expected[1], "<f4").tobytes())
    refused = server.http.post("/invocations", content=b"PK", headers={"Content-Type": "tensor/npz"})
    assert (refused.status_code, "send application/json" in refused.json()["message"]) == (424, True)


def test_many_clients_get_each_its_own(embeddings: tuple[Server, Path]) -> None:
    server, directory = embeddings
    texts = [f"the fox {number} jumps" + " over" * (number % 7) for number in range(64)]
    expected = sentence_transformers.SentenceTransformer(str(directory), device="cpu").encode(texts)

    def embed(text: str) -> Any:
        return server.http.post("/invocations", json={"inputs": text}).json()[0]

    with ThreadPoolExecutor(16) as clients:
        found = list(clients.map(embed, texts))
    assert np.array(found) == pytest.approx(expected, abs=1e-5)


def test_base64_is_little_endian(embeddings: tuple[Server, Path]) -> None:
    server, _ = embeddings
    body = {"input": "the fox", "model": "model"}
    floats, coded = (
        server.http.post("/v1/embeddings", json={**body, "encoding_format": form}).json()["data"][0]["embedding"]
        for form in ("float", "base64")
    )
    assert np.frombuffer(base64.b64decode(coded), "<f4") == pytest.approx(floats)


def test_each_kind_of_task_is_served(tmp_path: Path) -> None:
    store = tmp_path / "store"
    names = {task: task.replace("-", "_") for task in BODIES}
    for task, name in names.items():
        make_task_model(task, store / name)
    with running("--model-store", store) as server:
        for _ in names:
            server.log_line(r"\] ready: process")
        for task, name in names.items():
            body, kind = BODIES[task]
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = server.http.post(f"/predictions/{name}", content=data, headers={"content-type": kind})
            assert answer.status_code == 200, answer.text
            expected = ask_handler(started(store / name), body, content_type=kind)
            assert approximately(answer.json(), expected, 1e-4), task


def test_a_static_batch_is_streamed(tmp_path: Path) -> None:
    directory = make_task_model("text-generation", tmp_path / "model", enable_streaming="true")
    with running(directory) as server:
        server.log_line(r"\] ready: process")
        body = {"inputs": ["a", "hello"], "parameters": {"max_new_tokens": 6, "return_full_text": False}}
        with server.http.stream("POST", "/invocations", json=body) as answer:
            assert answer.headers["content-type"] == "application/jsonlines"
            steps = [json.loads(line)["outputs"] for line in answer.iter_lines()]
        whole = server.http.post("/invocations", json={**body, "stream": False}).json()
        assert [{"generated_text": "".join(pieces)} for pieces in zip(*steps, strict=True)] == whole


def test_kserve_s_clients_embed(embeddings: tuple[Server, Path]) -> None:
    server, _ = embeddings
    tensor = {"name": "texts", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}
    (output,) = server.http.post("/v2/models/model/infer", json={"inputs": [tensor]}).json()["outputs"]
    expected = np.array(server.http.post("/invocations", json={"inputs": TEXTS}).json())
    assert (output["datatype"], output["shape"]) == ("FP64", list(expected.shape))
    assert np.array(output["data"]).reshape(expected.shape) == pytest.approx(expected, abs=1e-6)
    refused = server.http.post("/v2/models/model/generate", json={"text_input": "a"})
    assert (refused.status_code, list(refused.json())) == (400, ["error"])
