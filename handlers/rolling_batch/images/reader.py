"""From the file of an image to what the encoder takes and to its tokens, by the processor of the checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from handlers.rolling_batch.images.prompt import Positions
from lmi_server.contract.errors import LmiServerError, RequestError, first_line
from lmi_server.media.budget import MediaBudget
from lmi_server.media.images import read_image, upright

_NOT_OF_IMAGES = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
_GRIDS = "image_grid_thw"


@dataclass(frozen=True, eq=False)
class ReadImage:
    """An image as the processor made it: its `text` in the prompt, which has `count` image tokens.

    `inputs` are the encoder's: for `copies` copies of the image; the first counts.
    """

    text: str
    count: int
    copies: int
    inputs: Mapping[str, Any]

    @property
    def grid(self) -> torch.Tensor | None:
        """Patches of the image in time, height and width, where the processor says it, (1, 3)."""
        grid = self.inputs.get(_GRIDS)
        return None if grid is None else grid[:1]

    def without_pixels(self) -> ReadImage:
        """Return what a prompt needs of the image once it is encoded."""
        grid = self.grid
        return replace(self, inputs={} if grid is None else {_GRIDS: grid})


@dataclass(frozen=True)
class ImageKey:
    """By what an encoded image is found again: its file, and whether it was read as the only one of its prompt."""

    digest: bytes
    alone: bool

    @property
    def number(self) -> int:
        """A number that tells images apart in the prefix tree."""
        return int.from_bytes(self.digest[:16]) << 1 | self.alone


class ImageReader:
    """Reads images with a `processor` of transformers; `token` is the id of the tokens that stand for an image.

    `rope_index` is the model's function for positions of several axes, None if it has none.
    """

    def __init__(self, processor: Any, token: int, rope_index: Callable[..., Any] | None) -> None:
        self._processor = processor
        self._token = token
        self._rope_index = rope_index
        self._counts_images = False  # known once an image was processed, as for the check at load
        self.placeholder: str = processor.image_token
        """What the chat template writes for an image."""

    def key(self, data: bytes, images: int) -> ImageKey:
        """Return the key of the file of an image in a prompt with so many images."""
        return ImageKey(hashlib.sha256(data).digest(), images == 1 or not self._counts_images)

    def read(self, name: str, data: bytes, budget: MediaBudget, alone: bool) -> ReadImage:
        """Return an image as the model takes it. `name` is the field of the request.

        Raises RequestError or PayloadTooLargeError.
        """
        image = read_image(name, data, budget)
        try:
            return self.process(_as_loaded(image), alone)
        except LmiServerError:
            raise
        # The border to Pillow, which reads EXIF only now, and to the processor of any model: they may raise anything
        # for an image that they do not take.
        except Exception as error:
            raise RequestError(f"{name}: the image cannot be read for the model: {first_line(error)}") from error

    def process(self, image: Any, alone: bool) -> ReadImage:
        """Return a decoded image (PIL, RGB) as the model takes it.

        Some processors divide an image into tiles only if it is the only one of its prompt; they say how many there
        are. To these an image beside others is given twice.
        """
        out = self._run([image])
        self._counts_images = "batch_num_images" in out
        copies = 1 if alone or not self._counts_images else 2
        if copies > 1:
            out = self._run([image] * copies)
        count = int((out["input_ids"] == self._token).sum()) // copies
        inputs = {name: value for name, value in out.items() if name not in _NOT_OF_IMAGES}
        return ReadImage(out["text_replacement_offsets"][0][0]["replacement"], count, copies, inputs)

    def _run(self, images: list[Any]) -> Any:
        return self._processor(
            images=[images],
            text=[self.placeholder * len(images)],
            return_tensors="pt",
            add_special_tokens=False,
            return_text_replacement_offsets=True,
        )

    def fill(self, text: str, images: Sequence[str]) -> str:
        """Return a rendered chat with the texts of its images in their places. Raises RequestError."""
        pieces = text.split(self.placeholder)
        if len(pieces) != len(images) + 1:
            raise RequestError(
                f"messages: {len(images)} images were sent, and the rendered chat has {len(pieces) - 1} places for them"
                f" ({self.placeholder}); leave that text out of messages, or set option.chat_template to a template"
                " that renders images"
            )
        filled = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            filled += [image, piece]
        return "".join(filled)

    def rows(self, ids: list[int], counts: Sequence[int]) -> list[np.ndarray]:
        """Return the places of each image's tokens in a prompt. Raises RequestError if the numbers differ."""
        found = np.flatnonzero(np.array(ids) == self._token)
        if len(found) != sum(counts):
            raise RequestError(
                f"messages: the prompt has {len(found)} tokens of images, and the images have {sum(counts)}; leave the"
                " model's special tokens out of the text"
            )
        return np.split(found, np.cumsum(counts)[:-1])

    def positions(self, ids: list[int], grids: Sequence[torch.Tensor | None]) -> Positions | None:
        """Return the positions of a prompt with images, None if a position is a token's place."""
        known = [grid for grid in grids if grid is not None]
        if self._rope_index is None or not known:
            return None
        tokens = torch.tensor([ids])
        axes, delta = self._rope_index(
            tokens, mm_token_type_ids=(tokens == self._token).int(), image_grid_thw=torch.cat(known)
        )
        return Positions(axes[:, 0].numpy(), int(delta))


def _as_loaded(image: Any) -> Any:
    """Return an image as its camera was held, in RGB, as transformers loads images."""
    turned = upright(image)
    if turned.mode == "P" and "transparency" in turned.info:
        turned = turned.convert("RGBA")
    return turned.convert("RGB")
