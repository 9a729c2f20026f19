"""What the fuzzing tests share: their budgets, hostile values, and bodies made of the fields that a dialect knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_LONG = 20  # times the examples of `make test`
_USUAL = 100  # of hypothesis, for a test that names no number


def is_long() -> bool:
    """Return whether pytest runs with the profile `long`, as `make fuzz` does."""
    return settings.get_current_profile_name() == "long"


def budget(examples: int) -> settings:
    """Return the settings of a test: always the same examples, or under the profile `long` many more, at random.

    Where the profile of all tests has fewer examples than usual, so does the test.
    """
    share = min(1.0, settings().max_examples / _USUAL)
    return settings(
        max_examples=examples * _LONG if is_long() else max(1, int(examples * share)),
        derandomize=not is_long(),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


TEXTS = st.one_of(
    st.sampled_from(["", " ", "a", "model", "auto", "none", "json_object", "user", "text", "\x00", "\u2028", "1e400"]),
    st.sampled_from(["9" * 5000, "x" * 70_000, "../../etc/passwd", "%00", "{{ x }}", "(((a+)+)+)+$", "٣", "²"]),
    st.text(max_size=6),
)
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.5, 1e308, 1e-320]),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
NAMES = st.sampled_from(["type", "text", "role", "content", "name", "id", "function", "arguments", "data", "schema"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | TEXTS, inner, max_size=3),
    max_leaves=5,
)
NUMERALS = st.sampled_from([b"1e400", b"-1e400", b"1" * 400, b"1" * 5000, b"0.1e-400", b"-0"])


def words(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from(text.split())


@st.composite
def objects(
    draw: st.DrawFn,
    known: Mapping[str, st.SearchStrategy[Any]],
    required: Mapping[str, st.SearchStrategy[Any]] = {},
    most: int = 4,
) -> dict[str, Any]:
    """Draw objects with the required fields and a few of those that are known."""
    chosen = draw(st.lists(st.sampled_from(sorted(known)), max_size=most, unique=True)) if known else []
    return {name: draw(values) for name, values in {**{name: known[name] for name in chosen}, **required}.items()}
