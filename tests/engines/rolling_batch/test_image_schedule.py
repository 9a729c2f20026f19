"""The scheduler over prompts with images: no image is divided that must not be, and every sequence ends."""

from __future__ import annotations

import random

import numpy as np
import pytest

from handlers.rolling_batch.attention.rows import ChunkGroup, ChunkRows
from handlers.rolling_batch.images.prompt import Positions, blocks_of, keys_of
from handlers.rolling_batch.schedule.images import PromptImages
from handlers.rolling_batch.schedule.plan import Chunk, Sequence
from handlers.rolling_batch.schedule.scheduler import Scheduler, SchedulerLimits

_IMAGE = 7  # the token id of every image


def prompt_with_blocks(chance: random.Random) -> tuple[list[int], PromptImages]:
    """Return a prompt in which some images stand, each all in one block."""
    tokens: list[int] = []
    images: list[tuple[np.ndarray, int]] = []
    for _ in range(chance.randrange(4)):
        tokens += [1] * chance.randrange(12)
        length = chance.randrange(1, 40)
        images.append((np.arange(len(tokens), len(tokens) + length), chance.randrange(3)))
        tokens += [_IMAGE] * length + [2]
    tokens += [3] * chance.randrange(1, 12)
    rows = [row for row, _ in images]
    return tokens, PromptImages(keys_of(tokens, images), blocks_of(np.concatenate(rows)) if rows else ())


def check_undivided(chunk: Chunk) -> None:
    assert chunk.end > chunk.start
    assert chunk.sequence.images is not None
    assert not any(begin < chunk.end < end for begin, end in chunk.sequence.images.blocks)


@pytest.mark.parametrize("seed", range(60))
def test_every_sequence_ends_and_no_block_is_divided(seed: int) -> None:
    chance = random.Random(seed)
    chunk = chance.choice([1, 3, 16, 64])
    scheduler = Scheduler(
        SchedulerLimits(chance.randrange(1, 6), 220, chunk, chunk, 12, conservativeness=chance.choice([0.01, 1.0]))
    )
    left = {}
    for number in range(20):
        tokens, images = prompt_with_blocks(chance)
        sequence = Sequence(number, tokens, len(tokens), chance.randrange(1, 40), images=images)
        left[number] = sequence
    waiting = list(left.values())
    for _ in range(5000):
        if waiting and chance.random() < 0.3:
            scheduler.add(waiting.pop())
        if not scheduler.running and not scheduler.waiting:
            if not waiting:
                break
            continue
        plan = scheduler.plan()
        assert plan.decode or plan.prefill
        written = len(plan.decode) + sum(each.end - each.start for each in plan.prefill)
        assert sum(each.computed for each in scheduler.running) + written <= 220
        for each in plan.prefill:
            check_undivided(each)
        scheduler.advance(plan)
        for sequence in [*plan.decode, *(each.sequence for each in plan.prefill if each.completes_prompt)]:
            sequence.tokens.append(4)
            if sequence.generated >= sequence.max_new_tokens or chance.random() < 0.02:
                scheduler.remove(sequence)
                del left[sequence.number]
    assert not left


def test_images_of_the_same_tokens_have_other_keys() -> None:
    tokens = [1, _IMAGE, _IMAGE, 2]
    one, other = (keys_of(tokens, [(np.array([1, 2]), number)]) for number in (5, 6))
    assert one[0] == other[0] == 1
    assert len({*one, *other}) == 6
    assert keys_of(tokens, [(np.array([1, 2]), 5)]) == one


def test_keys_go_on_with_the_output() -> None:
    images = PromptImages([1, -9, 2])
    assert images.keys_of([1, _IMAGE, 2, 40, 41]) == [1, -9, 2, 40, 41]


def test_blocks_are_stretches_of_neighbours() -> None:
    assert blocks_of(np.array([2, 3, 4, 9, 11, 12])) == ((2, 5), (9, 10), (11, 13))
    assert blocks_of(np.array([0])) == ((0, 1),)


def test_the_output_goes_on_behind_the_largest_position() -> None:
    positions = Positions(np.array([[0, 1, 1, 2], [0, 1, 2, 3], [0, 1, 1, 4]]), 1)
    assert positions.of(0, 2).tolist() == [[0, 1]] * 3
    assert positions.of(2, 6).tolist() == [[1, 2, 5, 6], [2, 3, 5, 6], [1, 4, 5, 6]]
    assert positions.of(5, 7).tolist() == [[6, 7]] * 3


def test_rows_of_a_block_see_to_its_end() -> None:
    chunks = [ChunkRows(0, 4, 8, 2, 6, 0, ((5, 7),)), ChunkRows(1, 4, 6, 6, 8, 0)]
    group = ChunkGroup(chunks)
    ends = group.ends(0, group.columns(0))
    assert ends is not None
    assert (ends - 4).tolist() == [1, 3, 3, 4, 5, 6]
    assert ChunkGroup(chunks[1:]).ends(0, group.columns(0)) is None


def test_blocks_of_windows_are_none_without_a_window() -> None:
    group = ChunkGroup([ChunkRows(0, 4, 8, 2, 6, 0, ((5, 7),), in_windows=True), ChunkRows(1, 4, 6, 6, 8, 0)])
    assert group.ends(0, group.columns(0)) is None
    ends = group.ends(9, group.columns(9))
    assert ends is not None
    assert (ends - 4).tolist() == [1, 3, 3, 4, 5, 6]
