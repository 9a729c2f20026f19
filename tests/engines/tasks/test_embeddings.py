"""Embeddings: OpenAI's form, LMI's form, and the same vectors as sentence-transformers."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_helpers import LoadTask, ask, content_of, request, started
from safetensors.torch import save_file
from tiny_models import random_model
from tiny_tasks import CONTEXT, make_task_model, sentence_transformer, seq2seq_tokenizer
from transformers import Phi3Config

from lmi_server.contract.errors import ContextLengthError, ModelLoadError, RequestError
from lmi_server.contract.handler import RequestHandler
from lmi_server.dialects.openai import embeddings as openai_embeddings

pytestmark = pytest.mark.slow

Load = Callable[..., tuple[RequestHandler, Path]]
TEXTS = ["the fox", "a", "the dog jumps over the blue fox. who is it?", "x y z"]


@pytest.fixture(scope="module")
def load(load_task: LoadTask) -> Load:
    return functools.partial(load_task, "text-embedding")


def reference(directory: Path, texts: list[str], **arguments: Any) -> np.ndarray:
    import sentence_transformers

    model = sentence_transformers.SentenceTransformer(str(directory), device="cpu")
    return np.asarray(model.encode(texts, **arguments))


def vectors(handler: RequestHandler, texts: Any, **parameters: Any) -> np.ndarray:
    return np.array(ask(handler, {"inputs": texts, "parameters": parameters}))


# --- the dialect ---


def parse(**body: Any) -> openai_embeddings.EmbeddingRequest:
    return openai_embeddings.parse(body)


@pytest.mark.parametrize(
    ("given_input", "inputs"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [1]], ("a", (1,))),
        ("", ("",)),
        (["a", ""], ("a", "")),
    ],
)
def test_an_input_has_several_forms(given_input: Any, inputs: Any) -> None:
    assert parse(input=given_input).inputs == inputs


def test_every_field_is_read() -> None:
    found = parse(
        input="a", model="m", encoding_format="base64", dimensions=3, truncate_prompt_tokens=-1, user="me", dimension=2
    )
    assert (found.model, found.encoding_format, found.dimensions, found.truncate_tokens) == ("m", "base64", 3, -1)
    assert found.warnings == ("dimension is not known and is ignored; did you mean dimensions?",)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input is missing"),
        ({"input": []}, "input: a list of 0 is not allowed"),
        ({"input": ["a", None]}, "input[1]: null is not allowed"),
        ({"input": [[]]}, "input[0]: a list of 0 is not allowed"),
        ({"input": [1, "a"]}, 'input[0]: "a" is not allowed; send an integer'),
        ({"input": [-1]}, "input[0]: -1 is not allowed"),
        ({"input": 3}, "input: 3 is not allowed"),
        ({"input": ["a"] * 2049}, "send at most 2048 inputs"),
        ({"input": "a", "encoding_format": "int8"}, "send float or base64"),
        ({"input": "a", "dimensions": 0}, "dimensions: 0 is not allowed"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens: 0 is not allowed"),
    ],
)
def test_a_bad_field_is_named(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        openai_embeddings.parse(body)
    assert message in str(raised.value)


_VECTORS = st.lists(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2), min_size=1
)


@given(_VECTORS)
def test_both_encodings_say_the_same(rows: list[list[float]]) -> None:
    raw = [np.array(row, dtype="<f4").tobytes() for row in rows]
    as_floats = msgspec.json.decode(openai_embeddings.body("m", raw, "float", 3))
    as_base64 = msgspec.json.decode(openai_embeddings.body("m", raw, "base64", 3))
    assert [item["embedding"] for item in as_floats["data"]] == rows
    assert [base64.b64decode(item["embedding"]) for item in as_base64["data"]] == raw
    assert as_floats["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [item["index"] for item in as_base64["data"]] == list(range(len(rows)))


# --- vectors ---


def test_vectors_are_those_of_sentence_transformers(load: Load) -> None:
    handler, directory = load()
    expected = reference(directory, TEXTS)
    assert vectors(handler, TEXTS) == pytest.approx(expected, abs=1e-5)
    assert vectors(handler, TEXTS[0]) == pytest.approx(expected[:1], abs=1e-5)
    outcomes = handler.handle([request({"inputs": text}) for text in TEXTS])
    assert np.array([content_of(outcome)[0] for outcome in outcomes]) == pytest.approx(expected, abs=1e-5)


def test_an_empty_text_has_the_vector_of_the_special_tokens_alone(load: Load) -> None:
    handler, directory = load()
    texts = ["", *TEXTS]
    expected = reference(directory, texts)
    assert vectors(handler, "") == pytest.approx(expected[:1], abs=1e-5)
    assert vectors(handler, texts) == pytest.approx(expected, abs=1e-5)
    (outcome,) = handler.handle([request({"input": texts}, "embeddings")])
    sent = [item["embedding"] for item in content_of(outcome)["data"]]
    assert np.array(sent) == pytest.approx(expected, abs=1e-5)


def test_a_text_without_any_token_is_refused_alone(tmp_path: Path) -> None:
    sentence_transformer(tmp_path, "mean")
    tokenizer = tmp_path / "tokenizer.json"
    bare = msgspec.json.decode(tokenizer.read_bytes()) | {"post_processor": None}
    tokenizer.write_bytes(msgspec.json.encode(bare))
    handler = started(tmp_path)
    refused, answered = handler.handle([request({"inputs": ""}), request({"inputs": "a"})])
    assert isinstance(refused, RequestError)
    assert "an input has no tokens" in refused.message
    assert len(content_of(answered)) == 1


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_every_pooling_is_that_of_sentence_transformers(tmp_path: Path, load: Load, pooling: str) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    sentence_transformer(directory, pooling)
    expected = reference(directory, TEXTS)
    assert vectors(started(directory), TEXTS) == pytest.approx(expected, abs=1e-5)
    forced, _ = load(pooling=pooling)
    assert vectors(forced, TEXTS) == pytest.approx(expected, abs=1e-5)


def test_dimensions_are_cut_and_the_rest_is_of_length_one(load: Load) -> None:
    handler, directory = load()
    expected = reference(directory, TEXTS, truncate_dim=5, normalize_embeddings=True)
    assert vectors(handler, TEXTS, dimensions=5) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(RequestError, match="dimensions: 33 is not allowed; send at most 32"):
        ask(handler, {"input": "a", "dimensions": 33}, "embeddings")


def test_the_length_of_a_vector_may_stay(load: Load) -> None:
    handler, directory = load(normalize="false")
    whole = vectors(handler, TEXTS)
    assert not np.allclose(np.linalg.norm(whole, axis=1), 1)
    unit = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    assert unit == pytest.approx(reference(directory, TEXTS), abs=1e-5)
    assert vectors(handler, TEXTS, normalize=True) == pytest.approx(unit, abs=1e-5)


def test_a_text_that_is_too_long_is_refused_or_cut(load: Load) -> None:
    handler, directory = load()
    long = "the fox jumps " * 40
    with pytest.raises(ContextLengthError, match=f"has 122 tokens, and the model takes at most {CONTEXT};"):
        ask(handler, {"input": ["a", long]}, "embeddings")
    expected = reference(directory, [long])
    assert vectors(handler, long, truncate=True) == pytest.approx(expected, abs=1e-5)
    body = {"input": long, "truncate_prompt_tokens": -1}
    found = ask(handler, body, "embeddings")
    assert found["usage"]["prompt_tokens"] == CONTEXT
    assert np.array(found["data"][0]["embedding"]) == pytest.approx(expected[0], abs=1e-5)
    assert ask(handler, {**body, "truncate_prompt_tokens": 10}, "embeddings")["usage"]["prompt_tokens"] == 10


def test_tokens_are_read_as_they_are(load: Load) -> None:
    handler, directory = load()
    import sentence_transformers

    ids = sentence_transformers.SentenceTransformer(str(directory), device="cpu").tokenizer("the fox")["input_ids"]
    texts, tokens = (ask(handler, {"input": value}, "embeddings")["data"][0]["embedding"] for value in ("the fox", ids))
    assert tokens == pytest.approx(texts, abs=1e-6)
    with pytest.raises(RequestError, match="token id 5000 is not allowed"):
        ask(handler, {"input": [5000]}, "embeddings")


def test_an_answer_in_openai_s_shape(load: Load) -> None:
    handler, _ = load()
    found = ask(handler, {"input": TEXTS, "model": "mine"}, "embeddings")
    assert (found["object"], found["model"]) == ("list", "mine")
    assert [(item["object"], item["index"]) for item in found["data"]] == [("embedding", i) for i in range(len(TEXTS))]
    assert np.array([item["embedding"] for item in found["data"]]) == pytest.approx(vectors(handler, TEXTS), abs=1e-6)
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > len(TEXTS)
    for named in ({"model": "mine"}, {"model": "another"}, {}):  # the platform knows /invocations and no name
        assert ask(handler, {"input": TEXTS, **named}) == found


def test_requests_of_any_shape_run_together(load: Load) -> None:
    handler, _ = load()
    good, long, bad, lmi = handler.handle(
        [
            request({"input": ["a", "the fox"]}, "embeddings"),
            request({"input": "the " * 100}, "embeddings"),
            request({"input": []}, "embeddings"),
            request({"inputs": "the fox", "parameters": {"dimensions": 4}}),
        ]
    )
    assert len(content_of(good)["data"]) == 2
    assert isinstance(long, ContextLengthError)
    assert isinstance(bad, RequestError)
    assert np.array(content_of(lmi)).shape == (1, 4)


# --- other files of sentence-transformers ---


def test_layers_after_the_pooling_are_run(tmp_path: Path) -> None:
    directory = make_task_model("text-embedding", tmp_path / "model")
    import torch

    layer = directory / "2_Dense"
    layer.mkdir()
    torch.manual_seed(1)
    weights = {"linear.weight": torch.randn(16, 32), "linear.bias": torch.randn(16)}
    save_file(weights, layer / "model.safetensors")
    config = {
        "in_features": 32,
        "out_features": 16,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (layer / "config.json").write_bytes(msgspec.json.encode(config))
    modules = msgspec.json.decode((directory / "modules.json").read_bytes())
    modules[2:] = [{"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (directory / "modules.json").write_bytes(msgspec.json.encode(modules))
    expected = reference(directory, TEXTS, normalize_embeddings=True)
    assert vectors(started(directory), TEXTS) == pytest.approx(expected, abs=1e-5)


def test_a_prompt_comes_before_every_text(tmp_path: Path) -> None:
    directory = make_task_model("text-embedding", tmp_path / "model")
    config = {"prompts": {"query": "who is "}, "default_prompt_name": "query"}
    (directory / "config_sentence_transformers.json").write_bytes(msgspec.json.encode(config))
    assert vectors(started(directory), TEXTS) == pytest.approx(reference(directory, TEXTS), abs=1e-5)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", b'[{"path": "", "type": "a.WordWeights"}]', "a module WordWeights is not supported"),
        ("modules.json", b"[", "is not valid JSON"),
        ("1_Pooling/config.json", b'{"pooling_mode": "median"}', "pooling median is not supported"),
        ("1_Pooling/config.json", b'{"include_prompt": false}', "include_prompt=false is not supported"),
    ],
)
def test_files_that_are_not_understood_are_named(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    directory = make_task_model("text-embedding", tmp_path / "model")
    (directory / file).write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        started(directory)


def test_a_real_model_gives_the_vectors_of_sentence_transformers(embedding_model_dir: Path) -> None:
    texts = ["How many people live in Berlin?", "Berlin has 3.7 million people.", "Grüße aus Köln", "word " * 200]
    expected = reference(embedding_model_dir, texts)
    found = vectors(started(embedding_model_dir), texts, truncate=True)
    assert found == pytest.approx(expected, abs=1e-5)
    assert found[0] @ found[1] > 0.7 > found[0] @ found[2]


def test_rotary_embeddings_that_change_with_the_length_let_no_vector_depend_on_its_neighbours(tmp_path: Path) -> None:
    """A long text beside a short one must not give the short one the frequencies of long texts."""
    config = Phi3Config(
        vocab_size=259, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=257, eos_token_id=258, pad_token_id=0, max_position_embeddings=96,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [9.0] * 8,
        },
    )  # fmt: skip
    random_model(config).save_pretrained(tmp_path)
    seq2seq_tokenizer().save_pretrained(tmp_path)
    handler = started(tmp_path, task="text-embedding")
    texts = [
        "sphinx of black quartz",
        "judge my vow; pack my box with five dozen liquor jugs",
        "the quick brown fox jumps",
    ]
    alone = [vectors(handler, [text])[0] for text in texts]
    assert np.allclose(vectors(handler, texts), alone, atol=1e-5)
