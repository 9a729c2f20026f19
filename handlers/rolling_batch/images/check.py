"""Compares a prompt with an image under the rolling batch with the model as it was loaded."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from handlers.logits import relative_error
from handlers.rolling_batch.images.encoder import ImageEncoder
from handlers.rolling_batch.images.prompt import EncodedImages, ImagePlace, blocks_of, keys_of
from handlers.rolling_batch.images.reader import ImageReader
from handlers.rolling_batch.schedule.page_table import PagesAdded, PageStep
from handlers.rolling_batch.schedule.plan import Chunk, Sequence, StepPlan
from handlers.rolling_batch.schedule.state_table import StateStep

_SIZE = (72, 48)  # pixels
_TEXT = 6  # tokens before and behind the image
_DECODED = 2  # of them
_TYPES = ("token_type_ids", "mm_token_type_ids")


class ImageCheck:
    """Computes the logits of a prompt with an image before any module of the model is replaced.

    The parts of a model before its language model are not known to this project. That it is given the same embeddings,
    positions and masks as in the model's own code follows from equal logits alone.
    """

    def __init__(self, model: Any, reader: ImageReader, encoder: ImageEncoder, vocabulary: int) -> None:
        """Encode an image of noise, and compute the logits of a prompt with it. Raises what the model's code raises."""
        from PIL import Image

        chance = random.Random(0)
        noise = Image.frombytes("RGB", _SIZE, chance.randbytes(_SIZE[0] * _SIZE[1] * 3))
        image = reader.process(noise, alone=True)
        token = encoder.token
        text = [chance.randrange(vocabulary) for _ in range(2 * _TEXT)]
        text = [number if number != token else 0 for number in text]
        self._ids = [*text[:_TEXT], *[token] * image.count, *text[_TEXT:]]
        (rows,) = reader.rows(self._ids, [image.count])
        self.both_ways = encoder.attends_both_ways(image.count, image.inputs)
        self._images = EncodedImages(
            keys_of(self._ids, [(rows, 0)]),
            blocks_of(rows) if self.both_ways != "none" else (),
            self.both_ways == "windows",
            (ImagePlace(rows, encoder.encode(image.count, image.inputs)),),
            reader.positions(self._ids, [image.grid]),
        )
        types = torch.tensor([[int(number == token) for number in self._ids]])
        self._expected = encoder.logits(self._ids, image.inputs, dict.fromkeys(_TYPES, types))

    def difference(self, run: Callable[[StepPlan, set[int]], Any], max_len: int, page: int) -> float | None:
        """Return how far the logits are off under the rolling batch, as a share of their spread.

        `run` computes steps over slots of `max_len` tokens; the first is used. None if the prompt is longer. It gets
        the first pages, if there are pages of `page` tokens.
        """
        prompt = len(self._ids) - _DECODED
        if len(self._ids) > max_len:
            return None
        sequence = Sequence(0, self._ids[:prompt], prompt, _DECODED, images=self._images)
        sequence.slot = 0
        cut = self._images.chunk_end(0, prompt // 2, prompt)
        states = StateStep({0: 0})  # if layers keep some
        pages = PageStep([PagesAdded(0, 0, list(range(-(-len(self._ids) // page))))] if page else [])
        logits = [run(StepPlan([], [Chunk(sequence, 0, cut)], states=states, pages=pages), set()).logits[:0]]
        # Recorded passes have the same place for the logits of each.
        logits.append(run(StepPlan([], [Chunk(sequence, cut, prompt)], states=states), set()).logits.clone())
        for number in self._ids[prompt:]:
            sequence.tokens.append(number)
            sequence.computed = len(sequence.tokens) - 1
            logits.append(run(StepPlan([sequence], [], states=states), set()).logits.clone())
        computed, expected = torch.cat(logits).float().cpu(), self._expected[prompt - 1 :]
        return relative_error(computed, expected)
