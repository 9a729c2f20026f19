"""Decodes the images of requests, and encodes the images of answers."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from handlers.tasks.task import file_bytes
from lmi_server.contract.errors import RequestError
from lmi_server.media import images

if TYPE_CHECKING:
    from PIL.Image import Image

_LOSSY_QUALITY = 95


def read_image(name: str, value: Any) -> Image:
    """Return the image in the bytes of a file, or in base64 of them, the right side up. Raises RequestError."""
    image = images.read_image(name, file_bytes(value, "image"))
    try:
        return images.upright(image)
    except Exception as error:  # noqa: BLE001 - the border to Pillow, which raises anything for broken metadata
        raise RequestError(f"{name} is an image that cannot be turned: {error}; send another file") from None


def transparent_parts(image: Image) -> Image | None:
    """Return a mask that is white where `image` is transparent; None if it is nowhere."""
    from PIL import ImageChops

    if not image.has_transparency_data:
        return None
    mask = ImageChops.invert(image.convert("RGBA").getchannel("A"))
    return mask if mask.getbbox() else None


def encode_image(image: Image, kind: str, quality: int | None = None) -> bytes:
    """Return the file of an image; `kind` is png, jpeg or webp, and `quality`, from 0 to 100, is for the lossy ones."""
    file = io.BytesIO()
    lossy = {} if kind == "png" else {"quality": _LOSSY_QUALITY if quality is None else quality}
    image.convert("RGB").save(file, kind, **lossy)
    return file.getvalue()
