"""The images of a prompt, as far as the scheduler knows them: plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Tokens of a prompt that stand for images.

    `keys` has, for each token of the prompt, what identifies it in the prefix tree: a token id, or a negative number
    that follows from the image and the place in it. Two images have the same token ids, and different keys.

    `blocks` are the tokens `begin` to `end` - 1 that attend to each other in both directions; if `in_windows`, under a
    window alone. A step computes all that is left of such a block.
    """

    keys: list[int]
    blocks: tuple[tuple[int, int], ...] = ()
    in_windows: bool = False

    def keys_of(self, tokens: list[int]) -> list[int]:
        """Return the keys of a sequence that begins with the prompt."""
        return self.keys + tokens[len(self.keys) :]

    def chunk_end(self, start: int, end: int, most: int) -> int:
        """Return the end of a chunk from `start` to at most `end`, moved so that it divides no block.

        It is `start` if the block there has more tokens than a step may have, which end at `most`.
        """
        for begin, after in self.blocks:
            if begin < end < after:
                if begin > start:
                    return begin
                return after if after <= most else start
        return end

    def next_tokens(self, start: int) -> int:
        """Return how many tokens a chunk has at least that begins at `start`."""
        return next((after - start for begin, after in self.blocks if begin <= start < after), 1)
