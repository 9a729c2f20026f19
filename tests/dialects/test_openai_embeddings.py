"""OpenAI's embeddings: requests as texts and token ids, vectors as floats and base64."""

from __future__ import annotations

import base64
import json
from array import array
from typing import Any

import pytest

from lmi_server.contract.errors import RequestError
from lmi_server.dialects.openai import embeddings
from lmi_server.dialects.openai.embeddings import EmbeddingRequest

VECTORS = [array("f", values).tobytes() for values in ([0.5, -1.0], [0.25, 2.0])]


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_inputs(given: Any, inputs: tuple[Any, ...]) -> None:
    assert embeddings.parse({"input": given}) == EmbeddingRequest(inputs=inputs)


def test_every_field() -> None:
    body = {"input": "a", "model": "m", "encoding_format": "base64", "dimensions": 2, "truncate_prompt_tokens": -1}
    assert embeddings.parse(body | {"user": "u"}) == EmbeddingRequest(
        inputs=("a",), model="m", encoding_format="base64", dimensions=2, truncate_tokens=-1
    )
    assert embeddings.parse({"input": "a", "encodingformat": "float"}).warnings == (
        "encodingformat is not known and is ignored; did you mean encoding_format?",
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, "input is missing"),
        ({"input": []}, "input: a list of 0"),
        ({"input": [None]}, "input[0]"),
        ({"input": ["a", 1]}, "input[1]: 1"),
        ({"input": [[1, -2]]}, "input[0]: -2"),
        ({"input": ["a"] * 2049}, "at most 2048"),
        ({"input": "a", "encoding_format": "hex"}, 'encoding_format: "hex"'),
        ({"input": "a", "dimensions": 0}, "dimensions: 0"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens: 0"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(body: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        embeddings.parse(body)
    assert expected in caught.value.message


def test_vectors_as_floats_and_in_base64() -> None:
    floats = json.loads(embeddings.body("m", VECTORS, "float", 7))
    assert [row["embedding"] for row in floats["data"]] == [[0.5, -1.0], [0.25, 2.0]]
    assert [row["index"] for row in floats["data"]] == [0, 1]
    assert (floats["model"], floats["usage"]) == ("m", {"prompt_tokens": 7, "total_tokens": 7})
    encoded = json.loads(embeddings.body("m", VECTORS, "base64", 7))
    decoded = [array("f", base64.b64decode(row["embedding"])).tolist() for row in encoded["data"]]
    assert decoded == [row["embedding"] for row in floats["data"]]
