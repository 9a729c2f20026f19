"""Makes the package gguf quick enough for how transformers uses it: benchmarks/gguf_reading.py says what that saves."""

from __future__ import annotations

import functools
from typing import Any


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
    """Return a reader that takes its parts out of an array: a memmap makes each of a million parts in Python."""
    import numpy as np

    class PlainReader(reader):  # type: ignore[misc]
        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._data = mapped.view(np.ndarray)

    return PlainReader
