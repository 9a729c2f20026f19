"""OpenAI's images: parses bodies into what to draw, and writes an answer from the files of the images.

/v1/images/generations has a body in JSON; /v1/images/edits and /v1/images/variations have a form with files, or JSON
with base64. Any handler that makes images can use them, and add its parameters to OpenAI's.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import Input
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects import fields, routes
from lmi_server.dialects.fields import Field
from lmi_server.dialects.forms import form_fields, is_form
from lmi_server.dialects.framing import encode

_SIZE = re.compile(r"(\d{1,6})x(\d{1,6})")
_NOT_STREAMED = "an image is sent whole; leave it out"

ImageFormat = Literal["png", "jpeg", "webp"]
FORMATS: tuple[ImageFormat, ...] = ("png", "jpeg", "webp")


class ImagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to draw: `n` images for one prompt.

    `size` is (width, height), None for what suits model and image. `image` and `mask` are as sent: the bytes of a file,
    or base64. `quality`, from 0 to 100, is for lossy formats. `parameters` are the handler's, by target.
    `warnings` name ignored fields.
    """

    prompt: str = ""
    model: str | None = None
    n: int = 1
    size: tuple[int, int] | None = None
    output_format: ImageFormat = "png"
    quality: int | None = None
    image: bytes | str | None = None
    mask: bytes | str | None = None
    parameters: Mapping[str, Any] = {}
    warnings: tuple[str, ...] = ()


class ImageFile(msgspec.Struct, frozen=True):
    """One image of an answer: the bytes of its file, and the seed with which it can be drawn again."""

    file: bytes
    seed: int


def read_body(request: Input) -> dict[str, Any]:
    """Return the fields of a body in JSON or of a form. A file of a form is bytes, any other value a text.

    Raises RequestError.
    """
    kind = request.properties.get("content-type", "")
    sent = form_fields(kind, request.body()) if is_form(kind) else None
    if sent is None:
        return fields.json_object(request)
    counts = Counter(name for name, _ in sent)
    repeated = min((name for name, count in counts.items() if count > 1), default=None)
    if repeated is not None:
        raise RequestError(f"{excerpt(repeated)} is in the form more than once; send it once")
    plain = [(name.removesuffix("[]"), value) for name, value in sent]  # some clients name a list so
    return {name: value if name in _FILES else _text(value) for name, value in plain}


def parse(request: Input, body: Mapping[str, Any], known: Mapping[str, Field]) -> ImagesRequest:
    """Parse what `read_body` returned; `known` are the handler's parameters. Raises RequestError."""
    own = _FIELDS_BY_ROUTE[request.route]
    values, unknown = fields.read_fields(body, {**known, **own})
    _require(request.route, values)
    targets = {field.target for field in own.values()}
    parameters = {name: values.pop(name) for name in list(values) if name not in targets}
    warnings = (*fields.unknown_warnings(unknown, {**known, **own}), *_without_effect(body))
    return ImagesRequest(**values, parameters=parameters, warnings=warnings)


def _require(route: str, values: Mapping[str, Any]) -> None:
    if route != routes.IMAGES_VARIATIONS and not values.get("prompt"):
        raise RequestError("prompt is missing; send a text that describes the image")
    if route != routes.IMAGES_GENERATIONS and not values.get("image"):
        raise RequestError("image is missing; send the file of an image as a part of a form, or base64 in JSON")


def _without_effect(body: Mapping[str, Any]) -> Iterator[str]:
    for name in ("quality", "style", "moderation", "input_fidelity"):
        if body.get(name) not in (None, "auto"):
            yield f"{name} has no effect: it is a setting of OpenAI's own models"


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


# --- readers ---


def _size(name: str, value: Any) -> tuple[int, int] | None:
    if value == "auto":
        return None
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise fields.not_allowed(name, value, 'send "auto", or width and height such as "512x512"')
    return int(found[1]), int(found[2])


def _response_format(name: str, value: Any) -> None:
    if value != "b64_json":
        raise fields.not_allowed(name, value, 'send "b64_json": this server keeps no files that a URL could name')


def image_format(name: str, value: Any) -> str:
    """Read the format of an image's file."""
    if value not in FORMATS:
        raise fields.not_allowed(name, value, f"send {', '.join(FORMATS)}")
    return str(value)


def _background(name: str, value: Any) -> None:
    if value not in ("auto", "opaque"):
        raise fields.not_allowed(name, value, "send opaque: the images have no transparent parts")


def _file(name: str, value: Any) -> bytes | str:
    if not isinstance(value, bytes | str):
        raise fields.not_allowed(name, value, "send one file of an image as a part of a form, or base64 in JSON")
    return value


_FILES = ("image", "mask")
_COMMON = {
    "model": Field("model", fields.string),
    "n": Field("n", fields.integer(1)),
    "size": Field("size", _size),
    "response_format": Field(None, _response_format),
    "output_format": Field("output_format", image_format),
    "output_compression": Field("quality", fields.integer(0, 100)),
    "background": Field(None, _background),
    "quality": Field(None, fields.ignored),
    "moderation": Field(None, fields.ignored),
    "user": Field(None, fields.ignored),
    "stream": Field(None, fields.off(_NOT_STREAMED)),
    "partial_images": Field(None, fields.off(_NOT_STREAMED)),
}
_PROMPT = {"prompt": Field("prompt", fields.string)}
_IMAGE = {"image": Field("image", _file)}
GENERATION_FIELDS = {**_PROMPT, **_COMMON, "style": Field(None, fields.ignored)}
EDIT_FIELDS = {
    **_PROMPT,
    **_IMAGE,
    "mask": Field("mask", _file),
    **_COMMON,
    "input_fidelity": Field(None, fields.ignored),
}
VARIATION_FIELDS = {**_IMAGE, **_COMMON}
_FIELDS_BY_ROUTE: Mapping[str, Mapping[str, Field]] = {
    routes.IMAGES_GENERATIONS: GENERATION_FIELDS,
    routes.IMAGES_EDITS: EDIT_FIELDS,
    routes.IMAGES_VARIATIONS: VARIATION_FIELDS,
}


def body(created: int, images: Sequence[ImageFile], output_format: ImageFormat, size: tuple[int, int]) -> bytes:
    """Return the answer; `created` is in seconds since 1970. Seeds are not OpenAI's: they allow to repeat an image."""
    data = [{"b64_json": base64.b64encode(one.file).decode(), "seed": one.seed} for one in images]
    width, height = size
    answer = {"created": created, "data": data, "output_format": output_format, "size": f"{width}x{height}"}
    return encode({**answer, "background": "opaque"})
