"""Identifies a model by the contents of its files, wherever its directory is."""

from __future__ import annotations

import hashlib
from pathlib import Path

_MODEL_FILES = frozenset({".json", ".py", ".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_SAMPLES, _SAMPLE_BYTES = 256, 16384  # of a large file


def contents_digest(directory: Path) -> str:
    """Return a digest of the configuration and the weights in a directory, which does not depend on its path.

    Of a file above 4 MiB it takes the size and samples, because reading all weights takes seconds or minutes. Two
    trainings of one model differ in nearly every number, so they differ in the samples. Raises OSError if a file cannot
    be read.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix not in _MODEL_FILES or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(size // _SAMPLES, _SAMPLE_BYTES)):
                file.seek(place)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
