"""Registers the profile of `pytest --hypothesis-profile=long`, which pytest looks for before it imports any test."""

from __future__ import annotations

from fuzzing import is_long
from hypothesis import settings

settings.register_profile("long", derandomize=False)

_LONG = ("test_schemathesis.py", "test_vllm_schemas.py")


def pytest_ignore_collect(collection_path: object) -> bool | None:
    """Leave out what needs the network, or vLLM for minutes, unless somebody asks for the long run."""
    return True if str(collection_path).endswith(_LONG) and not is_long() else None
