"""Late imports of packages that the base install lacks: if one is missing, the error says how to install it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_REMEDIES = {
    "numpy": "pip install numpy, or lmi-server[huggingface], which brings it along",
    "Pillow": 'pip install "lmi-server[tasks]"',
}


@contextmanager
def needs(package: str, purpose: str) -> Iterator[None]:
    """Around the import of `package`: raise an ImportError with its name, its use and the remedy."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{purpose} need {package} ({error}); {_REMEDIES[package]}") from error
