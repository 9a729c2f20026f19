"""The body of a chat completion in OpenAI's form, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)

from djl_python.multimodal.utils import fetch_image
from lmi_server.media.budget import media_of_request


class TextInput:
    """A part of a message that is text."""

    def __init__(self, text: str) -> None:
        self.text = text


class ImageInput:
    """A part of a message that is an image: a PIL image of a URL (`http`, `https` or `data`)."""

    def __init__(self, image_url: str) -> None:
        self.image = fetch_image(image_url)


class Message(BaseModel):
    """A message; `content` is a text, or a list of TextInput and ImageInput."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    role: str
    content: str | list[Any]

    @field_validator("content", mode="before")
    @classmethod
    def validate_content(cls, contents: Any) -> Any:
        return contents if isinstance(contents, str) else [_part(part) for part in contents]

    def get_tokenizer_inputs(self, image_token: str = "<image>") -> dict[str, str]:
        """Return the message as chat templates take it: one text, in which `image_token` stands for each image."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        texts = [part.text for part in self.content if isinstance(part, TextInput)]
        missing = len(self.get_images()) - sum(text.count(image_token) for text in texts)
        return {"role": self.role, "content": "\n".join([image_token] * missing + texts)}

    def get_images(self) -> list[Any]:
        """Return the PIL images of the message."""
        return [] if isinstance(self.content, str) else [p.image for p in self.content if isinstance(p, ImageInput)]


class ChatProperties(BaseModel):
    """The fields of a chat completion. `model_dump(by_alias=True)` has them under LMI's names."""

    messages: list[Message]
    model: str | None = Field(default=None, exclude=True)
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = Field(default=None, exclude=True)
    logprobs: bool | None = Field(default=False, exclude=True)
    top_logprobs: int | None = Field(default=None, serialization_alias="logprobs")
    max_tokens: int | None = Field(default=None, serialization_alias="max_new_tokens")
    n: int | None = Field(default=1, exclude=True)
    presence_penalty: float | None = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    user: str | None = Field(default=None, exclude=True)
    ignore_eos: bool = False

    @model_validator(mode="wrap")
    @classmethod
    def count_images_together(cls, body: Any, handler: ModelWrapValidatorHandler[ChatProperties]) -> ChatProperties:
        with media_of_request():
            return handler(body)

    @field_validator("frequency_penalty", "presence_penalty", mode="before")
    @classmethod
    def validate_penalty(cls, penalty: Any) -> float:
        return _between(penalty, -2, 2, 0.0)

    @field_validator("temperature", mode="before")
    @classmethod
    def validate_temperature(cls, temperature: Any) -> float:
        return _between(temperature, 0, 2, 1.0)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def validate_logit_bias(cls, logit_bias: Mapping[str, Any] | None) -> Any:
        for bias in (logit_bias or {}).values():
            _between(bias, -100, 100, 0.0)
        return logit_bias

    @field_validator("top_logprobs")
    @classmethod
    def validate_top_logprobs(cls, top_logprobs: int | None, info: ValidationInfo) -> int | None:
        """Return the number of alternatives; None without `logprobs`."""
        if top_logprobs is None or not info.data.get("logprobs"):
            return None
        return int(_between(top_logprobs, 0, 20, 0.0))


def _part(part: Mapping[str, Any]) -> TextInput | ImageInput:
    if part.get("type") == "text":
        return TextInput(part["text"])
    if part.get("type") == "image_url":
        return ImageInput(part["image_url"]["url"])
    raise ValueError(f"a part of a message has the type {part.get('type')!r}; allowed: text, image_url")


def _between(value: Any, low: float, high: float, default: float) -> float:
    if not value:
        return default if value is None else 0.0
    number = float(value)
    if not low <= number <= high:
        raise ValueError(f"{number} is not allowed; allowed: {low} to {high}")
    return number
