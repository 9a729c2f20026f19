"""Opens the files of images."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from lmi_server.contract.errors import LmiServerError, PayloadTooLargeError, RequestError
from lmi_server.media.budget import MediaBudget, current_budget

if TYPE_CHECKING:
    from PIL.Image import Image

# Formats whose head says how many pixels are decoded, and that Pillow decodes in this process: EPS starts Ghostscript,
# and the image inside of an ICO file may be any size.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_PIXEL_SIZE = 4  # bytes of a pixel in memory, whatever its mode; only grey ones take less
_MAX_RATIO = 200  # of the sides; processors that scale by the shorter one would make any number of pixels of a line
_ORIENTATION = 0x0112  # of EXIF
_TILE_TAGS = (322, 323)  # width and height of the tiles of a TIFF file, which are decoded as a whole
if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

_MAX_PARTS = 4096  # reads before the pixels: a few for each segment, chunk or tag
_PART_OF_PIXELS = 256  # bytes for each further read, on average; encoders of PNG write 8 KiB or more at a time
_MAX_EXIF = 16  # parts of up to 64 KiB in a JPEG file; each of the pictures in it has one
_MAX_SCANS = 32  # of a JPEG file; encoders write up to about 20 for a progressive one
_MAX_NUMBERS = 200_000  # of a tag of a TIFF file; there is one for each strip of rows
_MAX_LAYERS = 8  # times that the pixels are drawn: a TIFF file may have a layer for each colour
_JPEG_MARKER = re.compile(rb"\xff+[^\x00\x01\xd0-\xd8\xff]")  # one that a length follows, or the end
_EXIF = b"Exif\0\0"
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_BYTES = (1, 2, 7)  # types of tags that Pillow leaves as they are


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


class TooMuchWorkError(ValueError):
    """The file of an image would take far more work than its pixels."""


class CountedFile(io.BytesIO):
    """A file in memory that can be read so many times, first for its head and then for its pixels."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = _MAX_PARTS
        self._for_pixels = _MAX_PARTS + len(data) // _PART_OF_PIXELS

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise TooMuchWorkError("it has too many parts beside its pixels")
        return super().read(size)

    def head_is_read(self) -> None:
        """Let the pixels be read."""
        self._left = self._for_pixels


def refuse_long_tags(data: bytes) -> None:
    """Raise TooMuchWorkError for a TIFF file, or EXIF, with more strips, tiles or other numbers than any image needs.

    Pillow ignores a tag that is longer than the data.
    """
    data = data.removeprefix(_EXIF).removeprefix(_EXIF)  # as Pillow does
    if data[:2] not in (b"II", b"MM") or len(data) < _MAX_NUMBERS:
        return

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little" if data[:2] == b"II" else "big")

    word, head = (8, 8) if data[2:3] == b"+" else (4, 2)
    begin = number(word, word) + head
    step = 4 + 2 * word
    tags = min(number(begin - head, head), _MAX_PARTS)  # a file that has more is refused when they are read
    end = min(begin + tags * step, len(data))
    counts = (number(tag + 4, word) for tag in range(begin, end, step) if number(tag + 2, 2) not in _BYTES)
    longest = max(counts, default=0)
    if longest > _MAX_NUMBERS:
        raise TooMuchWorkError(f"it has a tag of {longest} numbers, such as those of its strips")


def refuse_long_exif(data: bytes) -> None:
    """Raise TooMuchWorkError for a JPEG file that puts its EXIF together of many parts: Pillow reads it at once."""
    if data.startswith(b"\xff\xd8") and data.count(_EXIF) > _MAX_EXIF:
        raise TooMuchWorkError("its EXIF has too many parts")


def refuse_slow_pixels(image: ImageFile, data: bytes) -> None:
    """Raise TooMuchWorkError if the pixels of an opened image would take far longer than others."""
    from PIL import Image

    tiles: list[Any] = image.tile
    if any(tile[0] in Image.DECODERS for tile in tiles):  # as a plain PPM file or a BMP file in RLE
        raise TooMuchWorkError("its pixels are stored in a way that Pillow reads one by one")
    drawn = sum((right - left) * (lower - upper) for _, (left, upper, right, lower), *_ in tiles)
    if drawn > _MAX_LAYERS * image.width * image.height:
        raise TooMuchWorkError("its strips or tiles draw the same pixels again and again")
    if image.format in ("JPEG", "MPO") and data.count(b"\xff\xda") > _MAX_SCANS and _scans(data) > _MAX_SCANS:
        raise TooMuchWorkError(f"it passes over its pixels more than {_MAX_SCANS} times")


def _scans(data: bytes) -> int:
    """Return how many scans a JPEG file has; more than are allowed if it has too many parts to tell."""
    at, scans = 2, 0  # other files may follow its end, with markers of their own
    for _ in range(_MAX_PARTS):
        found = _JPEG_MARKER.search(data, at)
        if found is None or data[found.end() - 1] == _END_OF_IMAGE:
            return scans
        scans += data[found.end() - 1] == _START_OF_SCAN
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2])
    return _MAX_SCANS + 1
