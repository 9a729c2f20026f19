"""What a client is told of a request that vLLM refuses."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, ValidationError

pytestmark = pytest.mark.slow  # imports vLLM


class Message(BaseModel):
    """Stands for a message of vLLM's."""

    role: Literal["user"]
    content: str


class Body(BaseModel):
    """Stands for a body of vLLM's."""

    temperature: float = 1.0
    stop: int | list[int] = 0
    messages: list[Message] = []


def told(**body: object) -> str:
    from handlers.vllm.requests.rendering import error_message

    with pytest.raises(ValidationError) as raised:
        Body.model_validate(body)
    return error_message(raised.value)


def test_a_wrong_type_has_its_place() -> None:
    assert told(temperature="hot").startswith("temperature: Input should be a valid number")
    assert told(messages=[{"role": "user", "content": 3}]) == "messages.0.content: Input should be a valid string"
    assert told(stop="a").startswith("stop: Input should be a valid integer")
