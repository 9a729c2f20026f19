"""Files of images: decodes those of requests within limits, and encodes those of answers."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from handlers.tasks.task import file_bytes
from lmi_server.contract.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

# A file of a few kilobytes can hold any number of pixels, which take memory only when they are decoded.
_MOST_PIXELS = 64 * 2**20
_LOSSY_QUALITY = 95


def read_image(name: str, value: Any) -> Image:
    """Return the image in the bytes of a file, or in base64 of them, the right side up. Raises RequestError."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    data = file_bytes(value, "image")
    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > _MOST_PIXELS:
            raise Image.DecompressionBombError(f"it has {image.width} x {image.height} pixels")
        image.load()
        return ImageOps.exif_transpose(image)
    except UnidentifiedImageError:
        raise RequestError(f"{name} is not an image of a known format; send the bytes of a PNG or JPEG file") from None
    except Exception as error:  # noqa: BLE001 - the border to Pillow, whose decoders raise anything for a broken file
        raise RequestError(f"{name} is an image that cannot be read: {error}; send another file") from None


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
