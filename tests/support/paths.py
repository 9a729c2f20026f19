"""Paths of the checkout and of what the tests use in it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DATA = TESTS / "data"
MODEL_CODE = TESTS / "models"
"""Code of models and handlers that the tests serve."""

BUILT_MODELS = ROOT / "models"
"""The real models, as `make demo-model` and `make embedding-model` build them."""

SAMPLES = ROOT / "serving.properties.d"
