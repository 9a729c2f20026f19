"""Images and sounds of requests: what they take when they are decoded is known, or limited, before it is taken."""

from __future__ import annotations

import contextlib
import io
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from lmi_server.contract.errors import PayloadTooLargeError, RequestError
from lmi_server.media import budget
from lmi_server.media.budget import MediaBudget, limit_media, media_of_request
from lmi_server.media.images import FORMATS, TooMuchWorkError, open_image, read_image, upright
from lmi_server.media.sounds import read_sound

MIB = 1 << 20
RATE = 16_000


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Let a request have 16 MiB: an image of 2048 x 2048 pixels, or four minutes of sound."""
    Image.init()  # which takes memory of its own
    before = budget._limit
    limit_media(16 * MIB)
    yield
    limit_media(before)


def image_file(kind: str, size: tuple[int, int] = (8, 4), mode: str = "RGB", frames: int = 1) -> bytes:
    file = io.BytesIO()
    more = {"save_all": True, "append_images": [Image.new(mode, size, n + 1) for n in range(frames - 1)]}
    Image.new(mode, size).save(file, kind, **more if frames > 1 else {})
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_head(width: int, height: int, data: bytes = b"") -> bytes:
    """Return a PNG file of these sizes with little in it."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def tiff_of_tiles(side: int) -> bytes:
    """Return a TIFF file of 16 x 16 pixels in one tile of `side` x `side` pixels."""
    tile = zlib.compress(bytes(side * side))
    entries = [
        *((256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side)),
        *((324, 8 + 2 + 12 * 10 + 4), (325, len(tile))),
    ]
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + directory + bytes(4) + tile


def sound_file(
    seconds: float = 1.0, rate: int = RATE, channels: int = 1, kind: str = "WAV", subtype: str = ""
) -> bytes:
    file = io.BytesIO()
    tone = np.sin(np.arange(int(seconds * rate)) * 2 * np.pi * 440 / rate).astype(np.float32) / 2
    soundfile.write(file, np.repeat(tone[:, None], channels, 1), rate, format=kind, subtype=subtype or None)
    return file.getvalue()


def memory(line: str) -> int:
    """Return a line of what the system knows of the memory of this process, in bytes."""
    found = re.search(rf"^{line}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@contextlib.contextmanager
def growing_less_than(size: int) -> Iterator[None]:
    """Decoders take memory that Python knows nothing of."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of the time from now on
    before = memory("VmRSS")
    yield
    assert memory("VmHWM") - before < size


# --- images ---


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_read(kind: str) -> None:
    image = read_image("image", image_file(kind))
    assert (image.size, image.convert("RGB").getpixel((0, 0))) == ((8, 4), (0, 0, 0))


@pytest.mark.parametrize(
    "data",
    [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n%%EOF\n",
        image_file("ICO", (16, 16)),
        image_file("PCX"),
        image_file("TGA"),
        b"no image",
        b"",
    ],
    ids=["eps", "ico", "pcx", "tga", "text", "nothing"],
)
def test_other_formats_are_refused(data: bytes) -> None:
    with pytest.raises(RequestError, match="image is not an image of a known format; send a file in one of AVIF, BMP"):
        read_image("image", data)
    with pytest.raises(UnidentifiedImageError):
        open_image(data)


@pytest.mark.parametrize(
    "make",
    [
        lambda: png_head(2049, 2048, bytes(3 * 2049 * 2048)),
        lambda: png_head(9000, 9000, bytes(9000)),
        lambda: image_file("PNG", (3000, 3000), "1"),
        lambda: image_file("GIF", (3000, 3000), "L"),
        lambda: image_file("TIFF", (3000, 3000), "L"),
        lambda: image_file("WEBP", (3000, 3000)),
        lambda: image_file("JPEG", (3000, 3000)),
        pytest.param(lambda: image_file("AVIF", (3000, 3000)), marks=pytest.mark.slow),
        lambda: b"P6 9000 9000 255\n",
        lambda: tiff_of_tiles(4096),
    ],
    ids=["just too large", "cut", "bits", "gif", "tiff", "webp", "jpeg", "avif", "ppm", "tiles"],
)
@pytest.mark.filterwarnings("ignore:Image size")
def test_an_image_that_would_take_too_much_is_not_decoded(make: Callable[[], bytes]) -> None:
    data = make()  # not while tests are collected, which every process of the tests does
    with growing_less_than(16 * MIB), pytest.raises(PayloadTooLargeError, match="max_media_size=16777216 bytes"):
        read_image("image", data)


def test_an_image_with_more_pixels_than_pillow_opens_is_too_large() -> None:
    with pytest.raises(PayloadTooLargeError, match="more pixels than Pillow opens"):
        read_image("image", png_head(100_000, 100_000))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "TIFF", "WEBP"])
def test_the_first_frame_alone_counts_and_is_decoded(kind: str) -> None:
    """There may be any number of others, of which nothing is read."""
    limit_media(100 * 100 * 4)
    image = read_image("image", image_file(kind, (100, 100), frames=20))
    assert image.convert("RGB").getpixel((0, 0)) == (0, 0, 0)


def test_an_image_of_the_whole_limit_is_read() -> None:
    assert read_image("image", image_file("PNG", (2048, 2048))).size == (2048, 2048)


@pytest.mark.parametrize("size", [(1, 201), (402_000, 2)])
def test_an_image_that_is_almost_a_line_is_refused(size: tuple[int, int]) -> None:
    """A processor that scales it by its shorter side, as CLIP's do, would make a thousand times its pixels."""
    with pytest.raises(RequestError, match="whose longer side has at most 200 times the pixels of the shorter one"):
        read_image("image", image_file("PNG", size))
    assert read_image("image", image_file("PNG", (200, 1))).size == (200, 1)


def test_a_broken_image_is_an_error_of_the_request() -> None:
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    with pytest.raises(RequestError, match="image is an image that cannot be read"):
        read_image("image", png_head(10, 10, b"short"))


def test_the_images_of_a_request_count_together() -> None:
    data = image_file("PNG", (1100, 1024))
    for _ in range(5):  # requests of their own
        with media_of_request():
            read_image("image", data)
    with media_of_request():
        for _ in range(3):
            read_image("image", data)
        with pytest.raises(PayloadTooLargeError, match="send fewer or smaller ones, or raise it"):
            read_image("image", data)
    one = MediaBudget()
    for _ in range(3):
        open_image(data, one)
    with pytest.raises(PayloadTooLargeError):
        open_image(data, one)


# --- sounds ---


@pytest.mark.parametrize(
    ("kind", "subtype"), [("WAV", ""), ("FLAC", ""), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", ""), ("AIFF", "")]
)
def test_each_sound_is_mixed_and_resampled(kind: str, subtype: str) -> None:
    samples = read_sound("inputs", sound_file(2.0, 48_000, 2, kind, subtype), RATE)
    assert (samples.dtype, samples.flags.writeable) == (np.float32, True)
    assert abs(len(samples) - 2 * RATE) < RATE / 10
    middle = samples[RATE // 2 : RATE]
    assert abs(float(np.sqrt((middle**2).mean())) - 0.5 / np.sqrt(2)) < 0.02
    assert np.argmax(np.abs(np.fft.rfft(middle))) == 220


def test_pieces_make_the_whole_sound() -> None:
    """It is longer than what is decoded at a time."""
    import soxr

    data = sound_file(40.0, 44_100)
    whole, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    expected = soxr.resample(whole, rate, RATE)
    found = read_sound("inputs", data, RATE)
    assert len(found) == len(expected)
    assert float(np.abs(found - expected).max()) < 1e-3
    assert np.array_equal(read_sound("inputs", data, 44_100), whole)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sound_file(60, RATE, 1, "FLAC"),
        lambda: sound_file(300, 1000, 1, "FLAC"),
        lambda: sound_file(1, 48_000, 200, "WAV", "PCM_U8"),
    ],
    ids=["long", "few samples a second", "many channels"],
)
def test_a_sound_that_would_take_too_much_is_not_decoded_to_its_end(make: Callable[[], bytes]) -> None:
    data = make()
    limit_media(MIB)
    with media_of_request():
        read_sound("inputs", sound_file(), RATE)
        with growing_less_than(8 * MIB), pytest.raises(PayloadTooLargeError, match="max_media_size"):
            read_sound("inputs", data, RATE)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e30])
@pytest.mark.parametrize("rate", [RATE, 48_000])
def test_a_sound_has_numbers_that_a_model_can_compute_with(value: float, rate: int) -> None:
    """A model's own numbers would be none after them, and sampling from these ends a GPU's process."""
    samples = np.zeros(2 * rate, np.float32)
    samples[rate] = value
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    with pytest.raises(
        RequestError, match="inputs has samples that are no numbers or above 1e\\+06; send them from -1"
    ):
        read_sound("inputs", file.getvalue(), RATE)


def test_a_head_that_lies_is_not_relied_on() -> None:
    wav = bytearray(sound_file(1.0))
    wav[40:44] = struct.pack("<I", 0xFFFFFFF0)  # the length of its samples
    flac = bytearray(sound_file(1.0, kind="FLAC"))
    flac[21] |= 0x0F  # the upper bits of the number of its samples
    with growing_less_than(8 * MIB):
        assert len(read_sound("inputs", bytes(wav), RATE)) == RATE
    with growing_less_than(8 * MIB), pytest.raises(RequestError, match="inputs is no sound file"):
        read_sound("inputs", bytes(flac), RATE)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (sound_file(1.0, kind="VOC"), "inputs is a sound in VOC; send a file in one of AIFF"),
        (sound_file(1.0, 500), "inputs is a sound with 500 samples a second; send one with 1000 or more"),
        (sound_file(0.0), "inputs is a sound without samples"),
        (b"no sound", "inputs is no sound file: Format not recognised; send the bytes of a WAV"),
    ],
    ids=["format", "rate", "empty", "text"],
)
def test_what_is_no_sound_for_a_model(data: bytes, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        read_sound("inputs", data, RATE)


# --- images that take long ---


def jpeg_segment(marker: int, data: bytes = b"") -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data


def jpeg_of_exif(segments: int) -> bytes:
    """Return a JPEG file with EXIF in many parts, to each of which Pillow copies all those before."""
    file = image_file("JPEG")
    return file[:2] + jpeg_segment(0xE1, b"Exif\0\0.") * segments + file[2:]


def jpeg_of_comments(segments: int) -> bytes:
    file = image_file("JPEG")
    return file[:2] + jpeg_segment(0xFE) * segments + file[2:]


def jpeg_of_scans(scans: int, behind: bytes = b"") -> bytes:
    """Return a progressive JPEG file of so many scans and more, each of which passes over all pixels."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * scans + data[-2:] + behind


def tiff(entries: list[tuple[int, int, int, int]], behind: bytes) -> bytes:
    directory = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + directory + bytes(4) + behind


def tiff_of_strips(strips: int, magic: bytes = b"II*\0") -> bytes:
    """Return a TIFF file of one column of pixels with `strips` strips, whatever its height."""
    begin = 10 + 12 * 9 + 4
    values = [(256, 1), (257, 99), (258, 8), (259, 1), (262, 1), (277, 1), (278, 1)]
    entries = [(tag, 4, 1, value) for tag, value in values]
    places = [(273, 4, strips, begin), (279, 4, strips, begin + 4 * strips)]
    behind = struct.pack("<I", 8) * strips + struct.pack("<I", 1) * strips
    return magic + tiff(sorted(entries + places), behind)[4:]


def bmp_in_rle() -> bytes:
    lines = b"\1\0\0\0" * 8
    head = struct.pack("<IiiHHIIiiII", 40, 8, 8, 1, 8, 1, len(lines), 1, 1, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(lines), 0, 0, 1078) + head + bytes(1024) + lines


def png_with_chunks(kind: bytes) -> bytes:
    file = image_file("PNG")
    return file[:33] + chunk(kind, b"") * 5000 + file[33:]


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (lambda: jpeg_of_exif(17), "its EXIF has too many parts"),
        (lambda: jpeg_of_comments(2000), "too many parts"),
        (lambda: jpeg_of_scans(100), "passes over its pixels more than 32 times"),
        (lambda: jpeg_of_scans(100)[:-40] + jpeg_segment(0xFE) * 5000 + jpeg_of_scans(100)[-40:], "more than 32 times"),
        (lambda: png_with_chunks(b"prVt"), "too many parts"),
        (lambda: png_with_chunks(b"IDAT"), "too many parts"),
        (lambda: tiff_of_strips(300_000), "a tag of 300000 numbers"),
        (lambda: tiff_of_strips(300_000, b"II\0*"), "a tag of 300000 numbers"),
        (lambda: tiff_of_strips(1000), "draw the same pixels again and again"),
        (lambda: b"P3 8 8 255\n" + b"#\n" * 9 + b"1 " * 192, "reads one by one"),
        (lambda: b"P6 8 8 100\n" + bytes(192), "reads one by one"),
        (lambda: bmp_in_rle(), "reads one by one"),
    ],
    ids=[
        *("exif", "comments", "scans", "parts between scans", "chunks", "chunks of pixels", "strips"),
        "strips of another kind",
        *("pixels drawn twice", "plain ppm", "ppm of another range", "rle"),
    ],
)
def test_an_image_that_would_take_far_longer_than_its_pixels_is_refused(file: Callable[[], bytes], why: str) -> None:
    with pytest.raises(RequestError, match=f"image is an image that cannot be read: .*{why}.*; send another file"):
        read_image("image", file())


def test_a_progressive_image_with_another_file_behind_it_is_read() -> None:
    """Telephones put a film there, which may have the bytes of any marker."""
    assert read_image("image", jpeg_of_scans(0, behind=b"\xff\xda" * 100)).size == (64, 64)


def test_exif_of_many_numbers_is_not_read() -> None:
    """Pillow would make an object of each."""
    orientations = 300_000
    exif = tiff([(0x0112, 3, orientations, 26)], struct.pack("<H", 1000) * orientations)
    file = io.BytesIO()
    Image.new("RGB", (8, 4)).save(file, "PNG", exif=exif)
    image = read_image("image", file.getvalue())
    with pytest.raises(TooMuchWorkError, match="a tag of 300000 numbers"):
        upright(image)


@pytest.mark.parametrize("orientation", range(10))
def test_an_image_stands_as_pillow_turns_it(orientation: int) -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = Image.effect_noise((8, 4), 90)
    picture.save(file, "PNG", exif=exif)
    image = read_image("image", file.getvalue())
    expected = ImageOps.exif_transpose(image)
    assert (upright(image).size, upright(image).tobytes()) == (expected.size, expected.tobytes())
