"""The images of a prompt with their features, and the rows of a pass that have embeddings in place of token ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from handlers.rolling_batch.images.encoder import ImageFeatures
from handlers.rolling_batch.schedule.images import PromptImages
from handlers.rolling_batch.schedule.plan import Sequence as Scheduled
from handlers.rolling_batch.schedule.plan import StepPlan

_PLACES = 20  # bits for the place of a token in its image


@dataclass(frozen=True, eq=False)
class ImagePlace:
    """An image in a prompt: `rows` are the places of its tokens in the prompt, ascending.

    `known` is under what the image is found for other prompts, as long as this one has it.
    """

    rows: np.ndarray
    features: ImageFeatures
    known: object = None

    def part(self, start: int, end: int) -> slice:
        """Return which of the image's tokens are in `start` to `end` - 1 of the prompt."""
        first, last = np.searchsorted(self.rows, (start, end))
        return slice(int(first), int(last))


@dataclass(frozen=True, eq=False)
class Positions:
    """Where the tokens of a prompt are for rotary embeddings of several axes, (axes, prompt).

    The output continues with the same number on each axis: its place plus `delta`.
    """

    axes: np.ndarray
    delta: int

    def of(self, start: int, end: int) -> np.ndarray:
        """Return the positions of tokens `start` to `end` - 1 of the sequence, (axes, tokens)."""
        length = self.axes.shape[1]
        later = np.arange(max(start, length), max(end, length)) + self.delta
        return np.concatenate([self.axes[:, start:end], np.tile(later, (len(self.axes), 1))], axis=1)


@dataclass(frozen=True, eq=False)
class EncodedImages(PromptImages):
    """The images of a prompt with their features; `positions` is None where a position is a token's place."""

    places: tuple[ImagePlace, ...] = ()
    positions: Positions | None = None


def keys_of(tokens: list[int], images: Sequence[tuple[np.ndarray, int]]) -> list[int]:
    """Return the keys of a prompt: each image is the places of its tokens and a number that follows from its file."""
    keys = list(tokens)
    for rows, number in images:
        for place, row in enumerate(rows.tolist()):
            keys[row] = -1 - ((number << _PLACES) + place)
    return keys


def blocks_of(rows: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return the stretches of neighbouring places, as begin and end."""
    cuts = np.flatnonzero(np.diff(rows) > 1) + 1
    bounds = [0, *cuts.tolist(), len(rows)]
    return tuple((int(rows[first]), int(rows[last - 1]) + 1) for first, last in pairwise(bounds) if last > first)


@dataclass
class EmbeddedRows:
    """What differs in a pass because sequences have images.

    `rows` of the pass have `embeddings` (rows, width), and `layers` of that shape are added behind the first layers.
    `positions` (axes, rows of the pass) are the rotary ones; None: they are those of the KV cache.
    """

    positions: np.ndarray | None = None
    rows: list[int] = field(default_factory=list)
    embeddings: list[torch.Tensor] = field(default_factory=list)
    layers: list[tuple[torch.Tensor, ...]] = field(default_factory=list)

    @property
    def is_text(self) -> bool:
        """Whether no row is that of an image, and each row has the same position on all axes."""
        return not self.rows and (self.positions is None or bool((self.positions == self.positions[0]).all()))

    def add(self, first: int, start: int, end: int, images: EncodedImages) -> None:
        """Add the tokens of images among `start` to `end` - 1 of a prompt, whose first row in the pass is `first`."""
        for place in images.places:
            part = place.part(start, end)
            if part.stop > part.start:
                self.rows += (place.rows[part] + (first - start)).tolist()
                self.embeddings.append(place.features.embeddings[part])
                self.layers.append(tuple(layer[part] for layer in place.features.layers))

    def inputs(self, ids: torch.Tensor, model: Any) -> dict[str, Any]:
        """Return the arguments of `model`, a TextModel: token ids (1, rows) with images in their places."""
        if not self.rows:
            return {"input_ids": ids}
        embeddings = model.get_input_embeddings()(ids).clone()
        rows = torch.tensor(self.rows, device=ids.device)
        embeddings[0, rows] = torch.cat(self.embeddings).to(embeddings.device, embeddings.dtype)
        inputs: dict[str, Any] = {"inputs_embeds": embeddings, **model.beside_embeddings(ids, rows)}
        if self.layers[0]:
            # Added by a mask, in the order of the pass.
            order = torch.argsort(rows)
            mask = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
            mask[0, rows] = True
            inputs["visual_pos_masks"] = mask
            inputs["deepstack_visual_embeds"] = [torch.cat(each)[order] for each in zip(*self.layers, strict=True)]
        return inputs


def embedded_rows(plan: StepPlan, rows: int) -> EmbeddedRows | None:
    """Return what differs in the pass of an arranged plan, padded to `rows` rows; None if nothing does."""
    sequences = itertools.chain(plan.decode, (chunk.sequence for chunk in plan.prefill))
    if all(sequence.images is None for sequence in sequences):
        return None
    parts = [part for part in _parts(plan) if part[3] is not None]
    found = EmbeddedRows()
    if any(images.positions is not None for *_, images in parts):
        found.positions = _positions(plan, rows)
    for first, start, end, images in parts:
        found.add(first, start, end, images)
    return found if found.rows or found.positions is not None else None


def _positions(plan: StepPlan, rows: int) -> np.ndarray:
    """Return the rotary positions of all rows of a pass, (axes, rows)."""
    parts = list(_parts(plan))
    axes = next(len(images.positions.axes) for *_, images in parts if images is not None and images.positions)
    positions = np.zeros((axes, rows), np.int64)
    for first, start, end, images in parts:
        known = None if images is None else images.positions
        positions[:, first : first + end - start] = np.arange(start, end) if known is None else known.of(start, end)
    return positions


def _parts(plan: StepPlan) -> Iterator[tuple[int, int, int, Any]]:
    """Yield, for each stretch of rows of a pass, its first row, its tokens from start to end, and their images."""
    first = 0
    for sequence, start, end in plan.stretches():
        yield first, start, end, _images(sequence)
        first += end - start


def _images(sequence: Scheduled) -> EncodedImages | None:
    images = sequence.images
    assert images is None or isinstance(images, EncodedImages)
    return images
