"""What the pipeline handler asks of a task, and how inputs of each kind are read."""

from __future__ import annotations

import base64
import binascii
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.dialects import fields
from lmi_server.dialects.fields import Field, Reader


class Task(ABC):
    """One loaded model and what it does with inputs.

    `parameters` are what a request may say beside its inputs, by name; the reader's `target` is the name that `run`
    finds. `max_length` is in tokens, 0 where inputs are no texts. `object_fields` are the fields of an input that is an
    object and may stand for the whole body; such a single input is answered with the bare result.
    """

    parameters: Mapping[str, Field] = {}
    object_fields: tuple[str, ...] = ()
    max_length: int = 0

    @property
    @abstractmethod
    def model(self) -> Any:
        """Return the torch module that does the work; a handler may change it in place before the first request."""

    @property
    def tokenizer(self) -> Any:
        """Return what makes tokens of texts; None where inputs are no texts."""
        return None

    @abstractmethod
    def read(self, value: Any, parameters: Mapping[str, Any]) -> Any:
        """Return one input of a request, checked and ready to run. Raises RequestError."""

    @abstractmethod
    def run(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        """Return a result per input, in order; one that is an LmiServerError fails the request of that input alone.

        `inputs` may come from several requests of one group. Raises ValueError or RequestError where one of them cannot
        be used and it is not known which, anything else where the model fails.
        """

    def group_of(self, parameters: Mapping[str, Any]) -> Any:
        """Return what requests that may run together have in common; None where one must run alone.

        A seed gives the same answer only in a batch of its own.
        """
        return None if "seed" in parameters else msgspec.json.encode(parameters, order="deterministic")

    def stream(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Iterator[list[str]]:
        """Yield what each step adds to the text of each input. Only of tasks that generate text."""
        raise NotImplementedError(f"{type(self).__name__} generates no text")

    def check_stream(self, parameters: Mapping[str, Any]) -> None:
        """Raise RequestError where a request with these parameters cannot be streamed."""
        return

    def to_plain(self, result: Any) -> Any:
        """Return a result as LMI's answers show it: plain values, or numpy's."""
        return result

    def input_error(self, value: Any) -> RequestError | None:
        """Return what is wrong with an input that the model failed on, where that can be told."""
        return None

    def details(self) -> Mapping[str, Any]:
        """Return what the log and `explain` tell of the model."""
        return {}


def read_text(value: Any) -> str:
    return _as_text("inputs", value)


def _as_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        shown = "bytes" if isinstance(value, bytes) else fields.show(value)
        raise RequestError(f"{name}: {shown} is not allowed; send a string, or a list of them")
    return value


def read_object(value: Any, names: Sequence[str]) -> Mapping[str, Any]:
    """Return an input that must be an object with these fields."""
    wanted = ", ".join(f'"{name}": ...' for name in names)
    if not isinstance(value, dict):
        shown = "bytes" if isinstance(value, bytes) else fields.show(value)
        raise RequestError(f"inputs: {shown} is not allowed; send {{{wanted}}}, or a list of such objects")
    for name in names:
        if value.get(name) is None:
            raise RequestError(f"inputs.{name} is missing; send {{{wanted}}}")
    return value


def read_image(value: Any) -> Any:
    """Return the image in `value`: the bytes of a file, or them as base64 (a data: URL too). Nothing is fetched."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(file_bytes(value, "image"))).convert("RGB")
    except UnidentifiedImageError:
        raise RequestError("inputs is not an image of a known format; send the bytes of a PNG or JPEG file") from None
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise RequestError(f"inputs is an image that cannot be read: {error}; send another file") from None


def file_bytes(value: Any, kind: str) -> bytes:
    """Return the bytes of a file that was sent as the body, or as base64 in JSON."""
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


def one_of(*allowed: str) -> Reader:
    def read(name: str, value: Any) -> str:
        if value not in allowed:
            raise fields.not_allowed(name, value, f"send {' or '.join(allowed)}")
        return str(value)

    return read


def texts(name: str, value: Any) -> list[str]:
    """Reads a string, or a list of strings with something in it."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items or not all(isinstance(item, str) for item in items):
        raise fields.not_allowed(name, value, "send a string or a list of strings")
    return items


def named(**readers: Reader) -> dict[str, Field]:
    """Return parameters that go by the same name inside."""
    return {name: Field(name, reader) for name, reader in readers.items()}


def read_parameters(value: Any, known: Mapping[str, Field]) -> dict[str, Any]:
    """Return the parameters of a request. Raises RequestError for one that the task does not know."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.not_allowed("parameters", value, "send an object")
    values, unknown = fields.read_fields(value, known, "parameters.")
    if unknown:
        allowed = ", ".join(known) or "none"
        raise RequestError(f"parameters.{unknown[0][:60]} is not known to this task; allowed: {allowed}")
    return values
