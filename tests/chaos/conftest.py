"""The switches of `make chaos`. pytest knows them if it is given this folder, as there.

CHAOS_SECONDS holds for a run of all tests.
"""

from __future__ import annotations

import os
import random

import pytest

_SECONDS = os.environ.get("CHAOS_SECONDS", "45")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-seconds", type=float, help="how long the chaos lasts")
    parser.addoption("--chaos-seed", type=int, help="the seed of what happens")


@pytest.fixture
def seconds(pytestconfig: pytest.Config) -> float:
    return float(pytestconfig.getoption("--chaos-seconds", None) or _SECONDS)


@pytest.fixture
def seed(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--chaos-seed", None) or random.SystemRandom().randrange(10**9))
