"""Pooling models under vLLM: embeddings, scores of pairs, reranked documents, classes of texts."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from model_directories import write_properties
from paths import BUILT_MODELS, SAMPLES
from product_helpers import Server, serving
from tiny_models import byte_tokenizer, saved_model
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel
from vllm_helpers import Loader

from lmi_server.dialects import routes

pytestmark = pytest.mark.slow

SAMPLE = SAMPLES / "vllm-embedding.properties"
MINILM = BUILT_MODELS / "all-minilm-l6-v2"
TEXTS = ["A man is eating food.", "Someone eats.", "The girl is carrying a baby.", "word " * 100]
SETTINGS = {"rolling_batch": "vllm", "dtype": "fp32", "enforce_eager": "true"}


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    lines = [line.partition("=")[::2] for line in SAMPLE.read_text().splitlines() if not line.startswith("#")]
    instead = {"option.model_id": str(MINILM), "option.dtype": "fp32"}
    keys = {**dict(lines), **instead}
    with serving(tmp_path_factory.mktemp("embedding"), MINILM, libraries="vllm", **keys) as server:
        yield server


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    import sentence_transformers

    model = sentence_transformers.SentenceTransformer(str(MINILM), device="cpu")
    return np.asarray(model.encode(TEXTS))


def classifier(labels: int) -> PreTrainedModel:
    config = BertConfig(
        vocab_size=259, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, num_labels=labels, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(3)
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


def answers(loader: Loader, directory: Path, model: PreTrainedModel, *requests: tuple[str, Any]) -> list[Any]:
    """Return what the handler answers to pairs of a route and a body, without a server."""
    weights = directory / "weights"
    saved_model(model, weights)
    write_properties(directory, **SETTINGS, model_id=weights)
    return list(loader.load(directory=str(directory), requests=requests)["answers"])


def embedded(server: Server, **body: Any) -> dict[str, Any]:
    response = server.http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def refusal(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


def test_embeddings_are_those_of_sentence_transformers(embedding: Server, reference: np.ndarray) -> None:
    response = embedded(embedding, model="model", input=TEXTS)
    vectors = np.array([entry["embedding"] for entry in response["data"]])
    np.testing.assert_allclose(vectors, reference, atol=2e-5)
    assert [entry["index"] for entry in response["data"]] == [0, 1, 2, 3]
    assert response["usage"]["prompt_tokens"] == response["usage"]["total_tokens"] > 100
    coded = embedded(embedding, model="model", input=TEXTS[0], encoding_format="base64")["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded), "<f4"), reference[0], atol=2e-5)


def test_an_empty_text_has_a_vector(embedding: Server, reference: np.ndarray) -> None:
    response = embedded(embedding, model="model", input=["", TEXTS[0]])
    empty, other = (np.array(entry["embedding"]) for entry in response["data"])
    np.testing.assert_allclose(other, reference[0], atol=2e-5)
    assert np.linalg.norm(empty) == pytest.approx(1, abs=1e-5)


def test_requests_of_one_batch_get_their_own_answers(embedding: Server, reference: np.ndarray) -> None:
    """A request that cannot be served fails alone."""
    texts: list[Any] = [*TEXTS[:3], [10**6], "word " * 600] * 4

    def ask(text: Any) -> httpx.Response:
        return embedding.http.post("/v1/embeddings", json={"model": "model", "input": text})

    with ThreadPoolExecutor(len(texts)) as pool:
        replies = list(pool.map(ask, texts))
    for place, reply in enumerate(replies):
        if place % 5 < 3:
            vector = reply.json()["data"][0]["embedding"]
            np.testing.assert_allclose(vector, reference[place % 5], atol=2e-5)
        else:
            assert ("vocabulary" if place % 5 == 3 else "maximum context length") in refusal(reply)


def test_lmis_path_takes_all_forms(embedding: Server, reference: np.ndarray) -> None:
    def ask(**body: Any) -> Any:
        return embedding.http.post("/invocations", json=body).json()

    np.testing.assert_allclose(ask(inputs=TEXTS[:2]), reference[:2], atol=2e-5)
    np.testing.assert_allclose(ask(input=TEXTS[0])["data"][0]["embedding"], reference[0], atol=2e-5)
    loose = np.array(ask(inputs=TEXTS[0], parameters={"normalize": False})[0])
    np.testing.assert_allclose(loose / np.linalg.norm(loose), reference[0], atol=2e-5)
    assert abs(np.linalg.norm(loose) - 1) > 0.01
    assert len(ask(inputs="word " * 600, parameters={"truncate": True})[0]) == 384
    assert ask(text_1=TEXTS[0], text_2=TEXTS[1:3])["object"] == "list"
    assert len(ask(query=TEXTS[0], documents=TEXTS[1:3])["results"]) == 2


def test_an_embedding_model_scores_by_the_angle(embedding: Server, reference: np.ndarray) -> None:
    body = {"model": "model", "text_1": TEXTS[0], "text_2": TEXTS[1:3]}
    response = embedding.http.post("/v1/score", json=body).json()
    angles = reference[1:3] @ reference[0]
    assert [entry["score"] for entry in response["data"]] == pytest.approx(list(angles), abs=1e-4)
    ranked = embedding.http.post("/rerank", json={"query": TEXTS[0], "documents": TEXTS[1:3][::-1], "top_n": 1}).json()
    (best,) = ranked["results"]
    assert (best["index"], best["document"]["text"]) == (1, TEXTS[1])
    assert best["relevance_score"] == pytest.approx(angles[0], abs=1e-4)


def test_an_embedding_model_refuses_what_it_does_not_do(embedding: Server) -> None:
    chat = {"model": "model", "messages": [{"role": "user", "content": "Hi"}]}
    unknown = embedding.http.post("/v1/embeddings", json={"model": "another", "input": "a"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "the model serves embed" in refusal(embedding.http.post("/v1/chat/completions", json=chat))
    cut = {"model": "model", "input": "a", "dimensions": 8}
    assert "Matryoshka" in refusal(embedding.http.post("/v1/embeddings", json=cut))
    assert "text_2" in refusal(embedding.http.post("/score", json={"text_1": "a"}))
    assert "query" in refusal(embedding.http.post("/rerank", json={"documents": ["a"]}))


def test_a_cross_encoder_scores_pairs(loader: Loader, tmp_path: Path) -> None:
    model, tokenizer = classifier(1), byte_tokenizer()
    pairs = {"text_1": "one", "text_2": ["two", "three"]}
    scored, refused = answers(loader, tmp_path, model, (routes.SCORE, pairs), (routes.EMBEDDINGS, {"input": "a"}))
    with torch.inference_mode():
        expected = [
            torch.sigmoid(model(**tokenizer("one", other, return_tensors="pt")).logits).item()
            for other in ("two", "three")
        ]
    assert [entry["score"] for entry in scored["data"]] == pytest.approx(expected, abs=1e-4)
    assert "makes no embeddings" in refused


def test_a_classifier_returns_the_most_likely_label(loader: Loader, tmp_path: Path) -> None:
    model, tokenizer = classifier(3), byte_tokenizer()
    texts, pair = {"inputs": ["one", "another"]}, {"text_1": "a", "text_2": "b"}
    labels, refused = answers(loader, tmp_path, model, (routes.INVOCATIONS, texts), (routes.SCORE, pair))
    with torch.inference_mode():
        scores = [torch.softmax(model(**tokenizer(text, return_tensors="pt")).logits[0], 0) for text in texts["inputs"]]
    assert [entry["label"] for entry in labels] == [f"LABEL_{int(score.argmax())}" for score in scores]
    assert [entry["score"] for entry in labels] == pytest.approx([float(score.max()) for score in scores], abs=1e-4)
    assert "a classifier with one label" in refused
