"""Tasks over HTTP: one of each kind, all in one server, and OpenAI's SDK against the embeddings."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pipeline_helpers import approximately, png, started, wav
from pipeline_helpers import ask as ask_handler
from server_helpers import Server, running
from tiny_tasks import make_task_model

if TYPE_CHECKING:
    import openai

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


EMBED = "/predictions/text_embedding"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind, named after its task, and one whose static batches are streamed."""
    store = tmp_path_factory.mktemp("http") / "store"
    for task in BODIES:
        make_task_model(task, store / task.replace("-", "_"))
    make_task_model("text-generation", store / "streamed", enable_streaming="true")
    return store


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with running("--model-store", store, libraries="transformers", workers=len(list(store.iterdir()))) as server:
        yield server


def sdk(server: Server) -> openai.OpenAI:
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    return server.clients.enter_context(client)


def encoded(store: Path, texts: list[str]) -> np.ndarray:
    """Return what sentence-transformers makes of texts."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(store / "text_embedding"), device="cpu").encode(texts)


def test_openai_s_sdk_embeds(server: Server, store: Path) -> None:
    expected = encoded(store, TEXTS)
    with sdk(server) as client:
        found = client.embeddings.create(model="text_embedding", input=TEXTS)  # the SDK asks for base64
        floats = client.embeddings.create(model="text_embedding", input=TEXTS[0], encoding_format="float", dimensions=5)
    assert np.array([item.embedding for item in found.data]) == pytest.approx(expected, abs=1e-5)
    assert len(floats.data[0].embedding) == 5
    assert floats.usage.prompt_tokens == floats.usage.total_tokens > 0


def test_errors_have_openai_s_form(server: Server) -> None:
    import openai

    with sdk(server) as client, pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model="text_embedding", input="the " * 100)
    assert raised.value.code == "context_length_exceeded"
    with sdk(server) as client, pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model="another", input="the")
    assert unknown.value.code == "model_not_found"
    assert "another" in unknown.value.message
    answer = server.http.post(
        "/v1/chat/completions", json={"model": "text_embedding", "messages": [{"role": "user", "content": "a"}]}
    )
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    answer = server.http.post(EMBED, json={"inputs": 3})
    assert (answer.status_code, answer.json()["code"]) == (424, 424)


def test_vectors_are_sent_as_tensors_too(server: Server) -> None:
    body = {"inputs": ["the fox", "a"]}
    expected = server.http.post(EMBED, json=body).json()
    npz = server.http.post(EMBED, json=body, headers={"Accept": "tensor/npz"})
    assert npz.headers["content-type"] == "tensor/npz"
    assert [array.tolist() for array in np.load(io.BytesIO(npz.content)).values()] == expected
    listed = server.http.post(EMBED, json=body, headers={"Accept": "tensor/ndlist"})
    assert listed.content[:4] == (2).to_bytes(4)
    assert listed.content.endswith(np.array(expected[1], "<f4").tobytes())
    refused = server.http.post(EMBED, content=b"PK", headers={"Content-Type": "tensor/npz"})
    assert (refused.status_code, "send application/json" in refused.json()["message"]) == (424, True)


def test_many_clients_get_each_its_own(server: Server, store: Path) -> None:
    texts = [f"the fox {number} jumps" + " over" * (number % 7) for number in range(64)]
    expected = encoded(store, texts)

    def embed(text: str) -> Any:
        return server.http.post(EMBED, json={"inputs": text}).json()[0]

    with ThreadPoolExecutor(16) as clients:
        found = list(clients.map(embed, texts))
    assert np.array(found) == pytest.approx(expected, abs=1e-5)


def test_base64_is_little_endian(server: Server) -> None:
    body = {"input": "the fox", "model": "text_embedding"}
    floats, coded = (
        server.http.post("/v1/embeddings", json={**body, "encoding_format": form}).json()["data"][0]["embedding"]
        for form in ("float", "base64")
    )
    assert np.frombuffer(base64.b64decode(coded), "<f4") == pytest.approx(floats)


@pytest.mark.parametrize("task", BODIES)
def test_each_kind_of_task_is_served(task: str, server: Server, store: Path) -> None:
    name, (body, kind) = task.replace("-", "_"), BODIES[task]
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.http.post(f"/predictions/{name}", content=data, headers={"content-type": kind})
    assert answer.status_code == 200, answer.text
    expected = ask_handler(started(store / name), body, content_type=kind)
    assert approximately(answer.json(), expected, 1e-4)


def test_a_static_batch_is_streamed(server: Server) -> None:
    body = {"inputs": ["a", "hello"], "parameters": {"max_new_tokens": 6, "return_full_text": False}}
    with server.http.stream("POST", "/predictions/streamed", json=body) as answer:
        assert answer.headers["content-type"] == "application/jsonlines"
        steps = [json.loads(line)["outputs"] for line in answer.iter_lines()]
    whole = server.http.post("/predictions/streamed", json={**body, "stream": False}).json()
    assert [{"generated_text": "".join(pieces)} for pieces in zip(*steps, strict=True)] == whole


def test_kserve_s_clients_embed(server: Server) -> None:
    tensor = {"name": "texts", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}
    (output,) = server.http.post("/v2/models/text_embedding/infer", json={"inputs": [tensor]}).json()["outputs"]
    expected = np.array(server.http.post(EMBED, json={"inputs": TEXTS}).json())
    assert (output["datatype"], output["shape"]) == ("FP64", list(expected.shape))
    assert np.array(output["data"]).reshape(expected.shape) == pytest.approx(expected, abs=1e-6)
    refused = server.http.post("/v2/models/text_embedding/generate", json={"text_input": "a"})
    assert (refused.status_code, list(refused.json())) == (400, ["error"])
