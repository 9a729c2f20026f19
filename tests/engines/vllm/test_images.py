"""A model of images and text, which option.rolling_batch=auto serves with vLLM, asked about an image."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from pipeline_helpers import png
from product_helpers import Server, serving
from transformers import AutoProcessor, Blip2ForConditionalGeneration
from vllm_helpers import make_image_model

pytestmark = pytest.mark.slow

TEXT = "what is it?"
ASKED = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Blip2ForConditionalGeneration]:
    return make_image_model(tmp_path_factory.mktemp("made") / "blip")


@pytest.fixture(scope="module")
def server(made: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {"dtype": "fp32", "enforce_eager": "true"}
    with serving(tmp_path_factory.mktemp("served"), made[0], libraries="vllm", **options) as server:
        yield server


def ask(server: Server, *parts: dict[str, Any]) -> Any:
    body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}]}
    reply = server.http.post("/v1/chat/completions", json={**body, **ASKED})
    assert reply.status_code == 200, reply.text
    return reply.json()


def image_part(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file).decode()}"}}


def generated(directory: Path, model: Blip2ForConditionalGeneration, file: bytes) -> list[int]:
    """Return the tokens of what the model itself says of an image."""
    processor = AutoProcessor.from_pretrained(directory)
    pixels = processor.image_processor(Image.open(BytesIO(file)), return_tensors="pt")["pixel_values"]
    image = [model.config.image_token_index] * model.config.num_query_tokens
    ids = torch.tensor([[*image, *processor.tokenizer(TEXT, add_special_tokens=False)["input_ids"]]])
    found = model.generate(pixel_values=pixels, input_ids=ids, max_new_tokens=8, do_sample=False)[0]
    return [int(token) for token in found[ids.shape[1] :]]


def test_auto_says_that_it_chose_vllm(server: Server) -> None:
    said = "Blip2ForConditionalGeneration reads more than text, and is served with vllm; option.rolling_batch=vllm says"
    assert any(said in line for line in server.lines)


def test_an_image_in_a_chat_is_answered_as_by_the_model_itself(server: Server, made: Any) -> None:
    expected = [generated(*made, png(seed)) for seed in (1, 2)]
    answers = [ask(server, image_part(png(seed))) for seed in (1, 2)]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
    assert expected[0] != expected[1]
    assert answers[0]["usage"]["prompt_tokens"] == len(TEXT) + 4


def test_text_alone_is_answered_too(server: Server) -> None:
    assert ask(server)["usage"]["prompt_tokens"] == len(TEXT)
