"""NDList and NPZ, the two formats of tensors in requests and answers. The first call imports numpy.

An NDList is big-endian but for the data, which follows its own byte-order mark:

    int32 count, then per array:
    text "NDAR", int32 version (3), byte flag, text name if the flag is 1, text "default" (the sparse format),
    text dtype in upper case, int32 rank, int64 each dimension, int32 length of the layout, int16 per character of it,
    byte "<" or ">", int32 length, data

A text is an int16 length and that many bytes.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from djl_python.optional_packages import needs

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MAGIC_NUMBER = "NDAR"
VERSION = 3
_DENSE = "default"
_ZIP = b"PK"


def to_nd_list(np_list: Sequence[Array] | Array) -> bytearray:
    """Return arrays of any shape as an NDList; a single array is a list of one."""
    with needs("numpy", "tensors"):
        import numpy as np

    arrays = [np_list] if isinstance(np_list, np.ndarray) else np_list
    encoded = bytearray(struct.pack(">i", len(arrays)))
    for array in arrays:
        _encode(np.asarray(array), encoded)
    return encoded


def from_nd_list(encoded: bytes | bytearray) -> list[Array]:
    """Return the arrays of an NDList, or of an NPZ file. Raises ValueError if the bytes are neither."""
    if encoded[:2] == _ZIP:
        return from_npz(encoded)
    reader = _Reader(encoded)
    try:
        return [_decode(reader) for _ in range(reader.integer(">i"))]
    except (struct.error, TypeError, IndexError) as error:
        raise ValueError(f"the bytes are no NDList: {error}") from error


def to_npz(arrays: Sequence[Array]) -> bytes:
    """Return arrays as an NPZ file."""
    with needs("numpy", "tensors"):
        import numpy as np

    file = io.BytesIO()
    np.savez(file, *arrays)
    return file.getvalue()


def from_npz(encoded: bytes | bytearray) -> list[Array]:
    """Return the arrays of an NPZ file in its order. Raises ValueError for pickled objects, which could run code."""
    with needs("numpy", "tensors"):
        import numpy as np

    with np.load(io.BytesIO(encoded), allow_pickle=False) as archive:
        return [archive[name] for name in archive.files]


# --- the parts of an NDList, for code that reads or writes one itself ---


def set_int(value: int) -> bytes:
    return struct.pack(">i", value)


def set_long(value: int) -> bytes:
    return struct.pack(">q", value)


def set_str(value: str) -> bytes:
    data = value.encode()
    return struct.pack(">h", len(data)) + data


def set_char(value: str) -> bytes:
    return struct.pack(">h", ord(value))


def get_byte_as_int(encoded: bytes | bytearray, idx: int) -> tuple[int, int]:
    """Return the value at an index, and the index after it, as every function of this kind does."""
    return encoded[idx], idx + 1


def get_bytes(encoded: bytes | bytearray, idx: int, length: int) -> tuple[bytes | bytearray, int]:
    return encoded[idx : idx + length], idx + length


def get_char(encoded: bytes | bytearray, idx: int) -> tuple[str, int]:
    code, after = _unpack(">h", encoded, idx)
    return chr(code), after


def get_str(encoded: bytes | bytearray, idx: int) -> tuple[str, int]:
    length, begin = _unpack(">h", encoded, idx)
    data, after = get_bytes(encoded, begin, length)
    return data.decode(), after


def get_int(encoded: bytes | bytearray, idx: int) -> tuple[int, int]:
    return _unpack(">i", encoded, idx)


def get_long(encoded: bytes | bytearray, idx: int) -> tuple[int, int]:
    return _unpack(">q", encoded, idx)


def _unpack(form: str, encoded: bytes | bytearray, idx: int) -> tuple[int, int]:
    return struct.unpack_from(form, encoded, idx)[0], idx + struct.calcsize(form)


def _encode(array: Array, encoded: bytearray) -> None:
    import numpy as np

    if array.dtype.hasobject:
        raise TypeError("an NDList holds numbers; an array of Python objects cannot be written")
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    _put_text(MAGIC_NUMBER, encoded)
    encoded += struct.pack(">iB", VERSION, 0)
    _put_text(_DENSE, encoded)
    _put_text(array.dtype.name.upper(), encoded)
    encoded += struct.pack(f">i{array.ndim}q", array.ndim, *array.shape)
    # The layout names each dimension by a character (N, C, H, W, ...); "?" is an unknown one.
    encoded += struct.pack(">i", array.ndim) + "?".encode("utf-16-be") * array.ndim
    encoded += b"<" + struct.pack(">i", little.nbytes)
    encoded += little.tobytes()


def _put_text(text: str, encoded: bytearray) -> None:
    encoded += struct.pack(">h", len(text)) + text.encode()


class _Reader:
    def __init__(self, data: bytes | bytearray) -> None:
        self._data = data
        self._at = 0

    def take(self, length: int) -> bytes:
        taken = bytes(self._data[self._at : self._at + length])
        if length < 0 or len(taken) < length:
            raise ValueError(
                f"the bytes are no NDList: {length} bytes are expected at {self._at}, but there are {len(taken)}"
            )
        self._at += length
        return taken

    def integer(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def text(self) -> str:
        return self.take(self.integer(">h")).decode()


def _decode(reader: _Reader) -> Array:
    with needs("numpy", "tensors"):
        import numpy as np

    magic = reader.text()
    if magic != MAGIC_NUMBER:
        raise ValueError(f"the bytes are no NDList: they begin with {magic!r} instead of {MAGIC_NUMBER!r}")
    version = reader.integer(">i")
    if version != VERSION:
        raise ValueError(f"an NDList of version {version} is not supported; send version {VERSION}")
    if reader.integer(">B"):
        reader.text()  # its name
    sparse = reader.text()
    if sparse != _DENSE:
        raise ValueError(f"an NDList with arrays of the format {sparse!r} is not supported; send dense arrays")
    dtype = np.dtype(reader.text().lower())
    shape = [reader.integer(">q") for _ in range(reader.integer(">i"))]
    reader.take(2 * reader.integer(">i"))  # the layout
    order = reader.take(1).decode("latin-1")
    if order not in "<>":
        raise ValueError(f"the bytes are no NDList: the byte order is {order!r} instead of < or >")
    data = reader.take(reader.integer(">i"))
    return np.frombuffer(data, dtype.newbyteorder(order)).reshape(shape)  # type: ignore[arg-type]
