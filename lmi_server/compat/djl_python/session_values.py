"""Values of a session as bytes: msgpack, in which NumPy arrays and tuples are extension types."""

from __future__ import annotations

import io
from typing import Any

import msgspec

from djl_python.optional_packages import needs

_ARRAY, _TUPLE = 1, 2  # codes of msgpack's extension types
_PLAIN = (type(None), bool, int, float, str, bytes)
_ALLOWED = "None, bool, int, float, str, bytes, NumPy arrays and scalars, and list, tuple and dict of these"


def encode(value: Any) -> bytes:
    """Return `value` as bytes. Raises TypeError that names the type if it cannot be stored."""
    try:
        return msgspec.msgpack.encode(_writable(value))
    except OverflowError as error:
        raise TypeError(f"an int of more than 64 bits cannot be stored in a session: {error}") from error


def decode(data: bytes) -> Any:
    """Return the value that `encode` encoded. Raises ValueError for other bytes."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_read)
    except msgspec.DecodeError as error:
        raise ValueError(f"put() did not store this value; read an array with get_as_numpy: {error}") from error


def _writable(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_writable(item) for item in value]
    if kind is tuple:  # msgpack has no tuples; as a plain array it would come back as a list
        return msgspec.msgpack.Ext(_TUPLE, encode(list(value)))
    if kind is dict:
        return {_key(key): _writable(item) for key, item in value.items()}
    if kind.__module__ == "numpy":  # by name, so that sessions without arrays need no numpy
        return msgspec.msgpack.Ext(_ARRAY, _array(value))
    raise TypeError(
        f"{kind.__module__}.{kind.__qualname__} cannot be stored in a session; allowed: {_ALLOWED} (of a tensor: "
        "tensor.numpy())"
    )


def _key(key: Any) -> Any:
    if type(key) not in (str, int, bytes, bool):
        raise TypeError(f"a dict with keys of {type(key).__qualname__} cannot be stored in a session; use str or int")
    return key


def _array(value: Any) -> bytes:
    with needs("numpy", "arrays of a session"):
        import numpy as np

    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.hasobject:
        raise TypeError(f"numpy.{type(value).__name__} of objects cannot be stored in a session; allowed: {_ALLOWED}")
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return file.getvalue()


def _read(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(decode(bytes(data)))
    if code == _ARRAY:
        with needs("numpy", "arrays of a session"):
            import numpy as np

        array = np.load(io.BytesIO(bytes(data)), allow_pickle=False)
        return array if array.ndim else array[()]
    raise ValueError(f"unknown extension {code}")
