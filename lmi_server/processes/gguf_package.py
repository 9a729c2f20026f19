"""Makes the package gguf quick enough for how transformers uses it: benchmarks/gguf_reading.py says what that saves."""

from __future__ import annotations

import functools
import struct
from typing import Any

_LENGTH = struct.Struct("=Q")
_CUT = "the file ends within an array of its header"


def prepare() -> None:
    """Replace the reader and the table of names in the package gguf. Call it before transformers loads a file.

    transformers reads the header of a file up to four times while it loads a model, and makes the same table of the
    tensors' names once for each of the model's modules.
    """
    import gguf

    if not hasattr(gguf.get_tensor_name_map, "cache_info"):
        gguf.get_tensor_name_map = functools.lru_cache(maxsize=2)(gguf.get_tensor_name_map)
        gguf.GGUFReader = _plain_reader(gguf.GGUFReader)


def _plain_reader(reader: Any) -> Any:
    """Return a reader that reads an array in one loop, and takes its parts out of an array of numpy.

    A memmap makes each of a million parts in Python, and a call for each element costs ten times its part.
    """
    import numpy as np
    from gguf import GGUFValueType

    class PlainReader(reader):  # type: ignore[misc]
        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._data = mapped.view(np.ndarray)

        def _get_field_parts(
            self, orig_offs: int, raw_type: int
        ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
            head = self._get(orig_offs, np.uint8, 12).tobytes()
            if raw_type != GGUFValueType.ARRAY or self.byte_order != "I" or len(head) < 12:
                return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
            kind, count = struct.unpack("=IQ", head)
            if kind == GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
            start = orig_offs + len(head)
            if kind == GGUFValueType.STRING:
                end, parts = _strings(self._data.data, start, count)
            else:
                numbers = self._get(start, self.gguf_scalar_to_np[GGUFValueType(kind)], count)
                if len(numbers) < count:
                    raise ValueError(_CUT)
                end, parts = start + numbers.nbytes, [numbers[at : at + 1] for at in range(count)]
            types = [GGUFValueType.ARRAY, *([GGUFValueType(kind)] if count else [])]
            return end - orig_offs, parts, list(range(count)), types

    return PlainReader


def _strings(data: memoryview, at: int, count: int) -> tuple[int, list[memoryview]]:
    """Return where an array of strings ends, and its strings. Raises ValueError if the file ends before."""
    parts = []
    for _ in range(count):
        begin = at + _LENGTH.size
        if begin > len(data):
            raise ValueError(_CUT)
        at = begin + _LENGTH.unpack_from(data, at)[0]
        parts.append(data[begin:at])
    if at > len(data):
        raise ValueError(_CUT)
    return at, parts
