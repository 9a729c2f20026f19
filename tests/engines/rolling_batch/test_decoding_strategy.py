"""What the refusal of option.decoding_strategy=contrastive says to set: sample and greedy, as requests find them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from product_helpers import Server, serving
from tiny_models import llama_of_whole_blocks, saved_model

pytestmark = pytest.mark.slow


def text_of(server: Server, **parameters: Any) -> str:
    answer = server.http.post(
        "/invocations", json={"inputs": "a fox", "parameters": {"max_new_tokens": 12, **parameters}}
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["generated_text"])


def test_requests_sample_unless_they_say_how_to_choose(tmp_path: Path) -> None:
    saved_model(llama_of_whole_blocks(), tmp_path / "weights")
    with serving(tmp_path, tmp_path / "weights", libraries="transformers", decoding_strategy="sample") as server:
        assert len({text_of(server) for _ in range(4)}) > 1
        assert len({text_of(server, do_sample=False) for _ in range(4)}) == 1
