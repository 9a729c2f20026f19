"""Which texts run together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from handlers.tasks.batches import even_batches

LENGTHS = st.lists(st.integers(1, 300))


@given(LENGTHS, st.integers(1, 2000), st.sampled_from(["cpu", "cuda"]))
def test_every_text_runs_once_and_no_pass_is_too_large(lengths: list[int], max_tokens: int, device: str) -> None:
    batches = list(even_batches(lengths, max_tokens, device))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= max_tokens


@given(LENGTHS)
def test_a_pass_has_little_padding(lengths: list[int]) -> None:
    padded = sum(len(batch) * max(lengths[index] for index in batch) for batch in even_batches(lengths, 16384, "cpu"))
    assert padded <= 2 * sum(lengths) + 128 * len(lengths)


def test_texts_of_one_length_run_in_one_pass() -> None:
    assert [len(batch) for batch in even_batches([20] * 100, 16384, "cpu")] == [100]


def test_a_few_long_texts_do_not_make_the_short_ones_long() -> None:
    assert [len(batch) for batch in even_batches([200, 200, *[5] * 30], 16384, "cpu")] == [2, 30]
    assert [len(batch) for batch in even_batches([9, 8, 7, 7, 6], 16384, "cpu")] == [5]
