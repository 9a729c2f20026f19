"""Writes tar and zip files field by field, so that they can say what no library would write."""

from __future__ import annotations

import binascii
import struct
import zlib
from dataclasses import dataclass

BLOCK = 512
FILE, HARD_LINK, SYMBOLIC_LINK, DIRECTORY, FIFO = b"0", b"1", b"2", b"5", b"6"
LONG_NAME, LONG_LINK, OLD_SPARSE, PAX, GLOBAL_PAX = b"L", b"K", b"S", b"x", b"g"
END = bytes(2 * BLOCK)


def header(
    name: bytes, kind: bytes = FILE, *, size: bytes | int = 0, linked: bytes = b"", mode: int = 0o644
) -> bytearray:
    """Return the header of an entry; `size` may be the bytes of the field."""
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    block = bytearray(BLOCK)
    block[0:100] = name[:100].ljust(100, b"\0")
    block[100:124] = b"%07o\0%07o\0%07o\0" % (mode, 0, 0)
    block[124:136] = field.ljust(12, b"\0")
    block[136:148] = b"%011o\0" % 0
    block[156:157] = kind
    block[157:257] = linked[:100].ljust(100, b"\0")
    block[257:265] = b"ustar\x0000"
    return signed(block)


def signed(block: bytearray) -> bytearray:
    """Return the header with its checksum."""
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    return block


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % BLOCK)


def entry(name: bytes, content: bytes = b"", kind: bytes = FILE, *, mode: int = 0o644) -> bytes:
    return bytes(header(name, kind, size=len(content), mode=mode)) + padded(content)


def link(name: bytes, linked: bytes, kind: bytes = SYMBOLIC_LINK) -> bytes:
    return bytes(header(name, kind, linked=linked))


def hard_link(name: bytes, linked: bytes) -> bytes:
    return link(name, linked, HARD_LINK)


def long_name(name: bytes, kind: bytes = LONG_NAME) -> bytes:
    """Return what GNU tar writes before an entry with a long name."""
    return entry(b"././@LongLink", name + b"\0", kind)


def record(key: bytes, value: bytes) -> bytes:
    """Return a record of an extended header, which begins with its own length."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest)
    while len(b"%d" % length) + len(rest) != length:
        length = len(b"%d" % length) + len(rest)
    return b"%d" % length + rest


def extended(content: bytes, kind: bytes = PAX) -> bytes:
    return entry(b"extended", content, kind)


def old_sparse(pieces: int) -> bytes:
    """Return an entry in GNU's old format of sparse files, with a map of many pieces."""
    block = header(b"sparse", OLD_SPARSE, size=0)
    block[482:483] = b"\1"  # the map goes on in the blocks behind
    block[483:495] = b"%011o\0" % 1
    piece = b"%011o\0%011o\0" % (1, 1)
    more = (piece * 21 + b"\1").ljust(BLOCK, b"\0")
    return bytes(signed(block)) + more * (pieces // 21)


@dataclass(frozen=True)
class Packed:
    """An entry of a zip. `size` and `checksum` are what the headers say of the content."""

    name: bytes
    content: bytes = b""
    mode: int = 0
    flags: int = 0
    method: int = 0
    compressed: bytes | None = None
    size: int | None = None
    place_of: int | None = None  # the entry whose bytes this one shares

    def fields(self) -> bytes:
        stored = self.stored()
        size = len(self.content) if self.size is None else self.size
        sizes = (binascii.crc32(self.content), len(stored), size)
        return struct.pack("<HHHHHIII", 20, self.flags, self.method, 0, 0, *sizes)

    def stored(self) -> bytes:
        return self.content if self.compressed is None else self.compressed

    def local(self) -> bytes:
        return b"PK\3\4" + self.fields() + struct.pack("<HH", len(self.name), 0) + self.name + self.stored()

    def central(self, offset: int) -> bytes:
        rest = struct.pack("<HHHHHII", len(self.name), 0, 0, 0, 0, self.mode << 16, offset)
        return b"PK\1\2" + struct.pack("<H", 3 << 8) + self.fields() + rest + self.name


def zip_of(*entries: Packed) -> bytes:
    data, offsets = b"", []
    for packed in entries:
        offsets.append(len(data) if packed.place_of is None else offsets[packed.place_of])
        data += packed.local() if packed.place_of is None else b""
    central = b"".join(packed.central(offset) for packed, offset in zip(entries, offsets, strict=True))
    return data + central + end_of_zip(len(entries), len(central), len(data))


def end_of_zip(count: int, size: int, offset: int) -> bytes:
    return b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count & 0xFFFF, count & 0xFFFF, size, offset, 0)


def deflated(content: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(content) + packer.flush()


def tar_of(*entries: bytes) -> bytes:
    return b"".join(entries) + END
