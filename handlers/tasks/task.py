"""The interface of a task, and readers for inputs and parameters."""

from __future__ import annotations

import base64
import binascii
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import FinishReason
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects import fields
from lmi_server.dialects.fields import Field, Reader
from lmi_server.media import images


class Piece(NamedTuple):
    """What one step adds to the text of one input. The last piece has why the text ended, and its number of tokens."""

    text: str
    token: int = -1  # the id of the token that completes the text; -1 for text that was held back
    finish_reason: FinishReason | None = None
    tokens: int = 0


class Task(ABC):
    """One loaded model and how it computes a result for an input.

    `parameters` are what a request may have beside its inputs, by name; `run` gets each under the `target` of its
    Field. `max_length` is in tokens, 0 if inputs are no texts. If an input is an object with the fields
    `object_fields`, a body may be such an object itself, and its answer is the bare result instead of a list.
    """

    parameters: Mapping[str, Field] = {}
    object_fields: tuple[str, ...] = ()
    max_length: int = 0
    model: Any  # the torch module that computes; a handler may change it in place before the first request
    tokenizer: Any = None  # None if inputs are no texts

    @abstractmethod
    def read(self, value: Any, parameters: Mapping[str, Any]) -> Any:
        """Return one input of a request, validated and in the form that `run` takes. Raises RequestError."""

    @abstractmethod
    def run(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        """Return a result per input, in order. A result that is an LmiServerError fails only the request of its input.

        `inputs` may belong to several requests of one group. Raises ValueError or RequestError if one of the inputs
        cannot be used and it is not known which one, and anything else if the model fails.
        """

    def group_of(self, parameters: Mapping[str, Any]) -> Any:
        """Return a key that is equal for requests which may run together; None for one that must run alone.

        A request with a seed runs alone, because its random numbers depend on the other rows of a batch.
        """
        return None if "seed" in parameters else msgspec.json.encode(parameters, order="deterministic")

    def stream(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Iterator[list[Piece]]:
        """Yield for each step what it adds to each input, then the last pieces. Only tasks that generate have it."""
        raise NotImplementedError(f"{type(self).__name__} generates no text")

    def check_stream(self, parameters: Mapping[str, Any]) -> None:
        """Raise RequestError if a request with these parameters cannot be streamed."""
        return

    def check(self, parameters: Mapping[str, Any]) -> None:
        """Raise RequestError for parameters that this model cannot be given."""
        return

    def fit(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the parameters with which the inputs of one request fit the model."""
        return parameters

    def to_plain(self, result: Any) -> Any:
        """Return a result as plain values or numpy's, in the form of LMI's answers."""
        return result

    def items(self, result: Any) -> Sequence[Any]:
        """Return what an answer lists for one input."""
        return (self.to_plain(result),)

    def input_error(self, value: Any) -> RequestError | None:
        """Return the error of an input on which the model failed; None if the input is not the cause."""
        return None

    def details(self) -> Mapping[str, Any]:
        """Return facts of the model for the log and `explain`."""
        import torch

        from handlers.checkpoints.placement import main_device

        return {
            "model": type(self.model).__name__,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(main_device(self.model)),
            "threads": torch.get_num_threads(),
        }


def read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"inputs: {_show(value)} is not allowed; send a string, or a list of them")
    return value


def _show(value: Any) -> str:
    return "bytes" if isinstance(value, bytes) else fields.show(value)


def read_object(value: Any, names: Sequence[str]) -> Mapping[str, Any]:
    """Return `value`, an object with the fields `names`. Raises RequestError for anything else."""
    wanted = ", ".join(f'"{name}": ...' for name in names)
    if not isinstance(value, dict):
        raise RequestError(f"inputs: {_show(value)} is not allowed; send {{{wanted}}}, or a list of such objects")
    for name in names:
        if value.get(name) is None:
            raise RequestError(f"inputs.{name} is missing; send {{{wanted}}}")
    return value


def read_image(value: Any) -> Any:
    """Return the image in `value`, the bytes of a file, or base64 of them, also as a data: URL. Raises RequestError.

    URLs are not fetched: a server that fetches whatever a client names can be made to read its internal network.
    """
    image = images.read_image("inputs", file_bytes(value, "image"))
    return image if image.mode == "RGB" else image.convert("RGB")


def file_bytes(value: Any, kind: str) -> bytes:
    """Return the bytes of a file that is the body, or base64 in JSON. Raises RequestError."""
    if isinstance(value, bytes):
        return value
    remedy = f"send the bytes of the file with Content-Type {kind}/..., or them as base64"
    if not isinstance(value, str):
        raise RequestError(f"inputs: {fields.show(value)} is not allowed; {remedy}")
    if value.startswith(("http://", "https://", "s3://", "file://")):
        raise RequestError(f"inputs: {fields.show(value)} is not fetched; {remedy}")
    encoded = value.partition(";base64,")[2] if value.startswith("data:") else value
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"inputs: {fields.show(value)} is not base64; {remedy}") from None


# --- readers of parameters ---


def texts(name: str, value: Any) -> list[str]:
    """Return a string or a list of strings, not empty, as a list. Raises RequestError."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items or not all(isinstance(item, str) for item in items):
        raise fields.not_allowed(name, value, "send a string or a list of strings")
    return items


def same_names(**readers: Reader) -> dict[str, Field]:
    """Return parameters whose `run` gets them under the same name."""
    return {name: Field(name, reader) for name, reader in readers.items()}


def read_parameters(value: Any, known: Mapping[str, Field]) -> dict[str, Any]:
    """Return the parameters of a request. Raises RequestError for one that is not in `known`."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.not_allowed("parameters", value, "send an object")
    values, unknown = fields.read_fields(value, known, "parameters.")
    if unknown:
        allowed = ", ".join(known) or "none"
        raise RequestError(f"parameters.{excerpt(unknown[0])} is not known to this task; allowed: {allowed}")
    return values
