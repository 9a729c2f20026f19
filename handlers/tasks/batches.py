"""Which texts go through the model together: those of similar length, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def even_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield lists of indices, the longest texts first; padded to its longest a batch has at most `max_tokens` tokens.

    A text that is longer than that is a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    begin = 0
    while begin < len(order):
        size = max(1, max_tokens // max(1, lengths[order[begin]]))
        yield order[begin : begin + size]
        begin += size
