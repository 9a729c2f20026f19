"""vLLM answers with what a random schema describes, or refuses the schema with 400. Only `make fuzz` runs it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
from fuzzing import budget
from hypothesis import given
from hypothesis import strategies as st
from product_helpers import Server, serving
from random_schemas import json_schemas
from rolling_batch_helpers import EOS
from tiny_models import CONTEXT
from vllm_helpers import SETTINGS, make_tiny_model

pytestmark = pytest.mark.slow

# Noise would go on in a text or a number for ever: these end what can end.
_ENDS = {str(ord(letter) - 33): 60.0 for letter in '"}]'} | {"11": 40.0, "25": 40.0, str(EOS): 90.0}


@pytest.fixture(scope="module", params=["xgrammar", "guidance"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("schemas")
    config = json.dumps({"backend": request.param, "disable_any_whitespace": True})
    settings = {**SETTINGS, "enforce_eager": "true", "structured_outputs_config": config}
    with serving(directory, make_tiny_model(directory / "tiny"), **settings) as server:
        yield server


def ask(server: Server, number: int, schema: dict[str, Any]) -> httpx.Response:
    body = {
        "prompt": [number], "max_tokens": CONTEXT - 8, "temperature": 1.5, "seed": number, "logit_bias": _ENDS,
        "structured_outputs": {"json": schema},
    }  # fmt: skip
    return server.http.post("/v1/completions", json=body, timeout=900)


def test_answers_of_vllm_match_their_schemas(server: Server) -> None:
    ended: Counter[str] = Counter()

    @budget(2)
    @given(st.lists(json_schemas(), min_size=12, max_size=12))
    def twelve(schemas: list[dict[str, Any]]) -> None:
        with ThreadPoolExecutor(len(schemas)) as pool:
            replies = list(pool.map(lambda entry: ask(server, *entry), enumerate(schemas)))
        for schema, reply in zip(schemas, replies, strict=True):
            if reply.status_code != 200:
                ended["refused"] += 1
                assert reply.status_code == 400, (schema, reply.text)
                continue
            choice = reply.json()["choices"][0]
            ended[choice["finish_reason"]] += 1
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["text"]), schema)

    twelve()
    print(f"{sum(ended.values())} schemas: {dict(ended)}")
    assert ended["stop"] > 0.5 * sum(ended.values()), ended
