"""Opens the files of images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmi_server.contract.errors import LmiServerError, PayloadTooLargeError, RequestError
from lmi_server.media.budget import MediaBudget, current_budget
from lmi_server.media.image_work import CountedFile, refuse_long_exif, refuse_long_tags, refuse_slow_pixels

if TYPE_CHECKING:
    from PIL.Image import Image

# Formats whose head says how many pixels are decoded, and that Pillow decodes in this process: EPS starts Ghostscript,
# and the image inside of an ICO file may be any size.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_PIXEL_SIZE = 4  # bytes of a pixel in memory, whatever its mode; only grey ones take less
_MAX_RATIO = 200  # of the sides; processors that scale by the shorter one would make any number of pixels of a line
_ORIENTATION = 0x0112  # of EXIF
_TILE_TAGS = (322, 323)  # width and height of the tiles of a TIFF file, which are decoded as a whole


def open_image(data: bytes, budget: MediaBudget | None = None) -> Image:
    """Return the image in a file, its first frame if it has several; only the head has been read.

    Raises PayloadTooLargeError if it would take too much, TooMuchWorkError, and Pillow's errors for a file that is no
    image.
    """
    from PIL import Image

    Image.init()  # else it knows some of the formats only
    refuse_long_exif(data)
    refuse_long_tags(data)
    file = CountedFile(data)
    try:
        image = Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])
    except Image.DecompressionBombError as error:
        raise PayloadTooLargeError(f"an image has more pixels than Pillow opens: {error}") from error
    file.head_is_read()
    what = f"an image of {image.width} x {image.height} pixels"
    (budget or current_budget()).take(_pixels(image) * _PIXEL_SIZE, what)
    refuse_slow_pixels(image, data)
    return image


def read_image(name: str, data: bytes, budget: MediaBudget | None = None) -> Image:
    """Return the decoded image of a request's field. Raises RequestError and PayloadTooLargeError."""
    from PIL import UnidentifiedImageError

    try:
        image = open_image(data, budget)
        _check_sides(name, image)
        image.load()
    except LmiServerError:
        raise
    except UnidentifiedImageError:
        formats = ", ".join(FORMATS)
        raise RequestError(f"{name} is not an image of a known format; send a file in one of {formats}") from None
    except Exception as error:  # noqa: BLE001 - the border to Pillow, whose decoders raise anything for a broken file
        raise RequestError(f"{name} is an image that cannot be read: {error}; send another file") from None
    return image


def upright(image: Image) -> Image:
    """Return a decoded image as its camera was held, by its EXIF. Raises anything for EXIF that cannot be read.

    Pillow's own function also writes all of the EXIF anew, which may be far longer than the image.
    """
    from PIL.Image import Transpose

    refuse_long_tags(image.info.get("exif", b""))
    turns = (
        Transpose.FLIP_LEFT_RIGHT,
        Transpose.ROTATE_180,
        Transpose.FLIP_TOP_BOTTOM,
        Transpose.TRANSPOSE,
        Transpose.ROTATE_270,
        Transpose.TRANSVERSE,
        Transpose.ROTATE_90,
    )
    turn = dict(enumerate(turns, 2)).get(image.getexif().get(_ORIENTATION, 1))
    return image if turn is None else image.transpose(turn)


def _check_sides(name: str, image: Image) -> None:
    if max(image.size) > _MAX_RATIO * min(image.size):
        raise RequestError(
            f"{name} is an image of {image.width} x {image.height} pixels; send one whose longer side has at most"
            f" {_MAX_RATIO} times the pixels of the shorter one"
        )


def _pixels(image: Image) -> int:
    """Return how many pixels are decoded at once."""
    pixels = image.width * image.height
    if image.format != "TIFF":
        return pixels
    width, height = (image.tag_v2.get(tag, 0) for tag in _TILE_TAGS)  # type: ignore[attr-defined]
    return max(pixels, width * height if isinstance(width, int) and isinstance(height, int) else 0)
