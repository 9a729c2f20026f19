"""Which texts go through the model together: those of similar length, so that little of a pass is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# What starting one more pass costs, in tokens that could be padding instead. On the CPU 32 texts of 3 to 120 words take
# a third of the time in four or five passes; a GPU can compute more in the time that starting one takes.
_PASS_COSTS = {"cpu": 128}
_PASS_COST = 4096
_FEWEST = 8  # texts for which it is worth to look ahead


def even_batches(lengths: Sequence[int], max_tokens: int, device: str) -> Iterator[list[int]]:
    """Yield lists of indices, the longest texts first; padded to its longest a batch has at most `max_tokens` tokens.

    A text that is longer than that is a batch of its own. `device` is the type of torch's device.
    """
    cost = _PASS_COSTS.get(device, _PASS_COST)
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    begin = 0
    while begin < len(order):
        longest = lengths[order[begin]]
        end = begin + 1
        while end < len(order) and (end - begin + 1) * longest <= max_tokens:
            followers = min(len(order) - end, max(_FEWEST, end - begin))
            if (longest - lengths[order[end]]) * followers > cost:
                break
            end += 1
        yield order[begin:end]
        begin = end
