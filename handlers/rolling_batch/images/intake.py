"""A request with images on its way to the engine.

Files are fetched, decoded and processed in threads beside the engine's. The engine's thread encodes them, one image
between two steps, so that the streams of others never wait for more than one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from handlers.abandoned_work import to_its_end
from handlers.generation.prompts import PromptEncoder
from handlers.rolling_batch.images.encoder import BothWays, ImageEncoder
from handlers.rolling_batch.images.features import FeatureCache, KnownImage
from handlers.rolling_batch.images.files import (
    FileRoom,
    ImageFiles,
    ImagePart,
    decoded,
    holds_images,
    image_parts,
    with_placeholders,
)
from handlers.rolling_batch.images.options import ImageOptions
from handlers.rolling_batch.images.prompt import EncodedImages, ImagePlace, blocks_of, keys_of
from handlers.rolling_batch.images.reader import ImageKey, ImageReader, ReadImage
from handlers.step_loop import StepLoop
from lmi_server.contract.errors import ContextLengthError, RequestError
from lmi_server.contract.generation import GenerationRequest
from lmi_server.media.budget import MediaBudget
from lmi_server.media.fetching import MAX_BYTES

_GIB = 2**30
_FETCHES = 4  # at a time; each waits for another server
_MAX_FETCHED = _FETCHES * MAX_BYTES  # of all requests; further ones wait
_Image = ReadImage | KnownImage
_File = tuple[ImagePart, bytes | None]  # None: the part itself has the file


@dataclass(frozen=True)
class ImageModel:
    """What a loaded model has for images. `both_ways`: where the tokens of an image attend to each other."""

    reader: ImageReader
    encoder: ImageEncoder
    both_ways: BothWays


class ImageIntake:
    """Encodes prompts with images of a model under `loop`; `limit` are the tokens of a context."""

    def __init__(
        self, model: ImageModel, prompts: PromptEncoder, loop: StepLoop[Any], options: ImageOptions, limit: int
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._loop = loop
        self._files = ImageFiles(options)
        self._room = FileRoom(_MAX_FETCHED)
        self._max_images = options.max_images
        self._limit = limit
        self._cache = FeatureCache(int(options.image_cache_gb * _GIB))
        self._fetching = ThreadPoolExecutor(_FETCHES, "image-files")
        self._reading = ThreadPoolExecutor(1, "images")
        # One request after the other: decoded images of waiting requests would take any amount of memory.
        self._turn = asyncio.Lock()

    def concerns(self, request: GenerationRequest) -> bool:
        """Return whether a request has anything but text."""
        return holds_images(request.messages)

    async def encode(self, request: GenerationRequest) -> tuple[list[int], str, EncodedImages]:
        """Return the token ids, the text and the images of a prompt.

        Raises RequestError, ContextLengthError or PayloadTooLargeError.
        """
        text, parts = await self._render(request)
        async with self._fetched(parts) as files, self._turn:
            keys, found = await self._read(files)
            read = [_as_read(found[key]) for key in keys]
            filled = self._model.reader.fill(text, [image.text for image in read])
            ids = await self._prompts.tokenize_rendered(filled, self._limit)
            if len(ids) >= self._limit:
                raise ContextLengthError.from_counts(len(ids), 0, self._limit)
            rows = self._model.reader.rows(ids, [image.count for image in read])
            known = await self._encode(keys, found)
        both_ways = self._model.both_ways
        blocks = blocks_of(np.concatenate(rows)) if both_ways != "none" else ()
        numbers = [key.number for key in keys]
        images = EncodedImages(
            keys_of(ids, list(zip(rows, numbers, strict=True))),
            blocks,
            both_ways == "windows",
            tuple(ImagePlace(row, each.features, each) for row, each in zip(rows, known, strict=True)),
            self._model.reader.positions(ids, [image.grid for image in read]),
        )
        return ids, filled, images

    async def count(self, request: GenerationRequest) -> list[int]:
        """Return the token ids of a prompt, without encoding its images. Raises as `encode`."""
        text, parts = await self._render(request)
        async with self._fetched(parts) as files, self._turn:
            keys, found = await self._read(files)
        filled = self._model.reader.fill(text, [_as_read(found[key]).text for key in keys])
        return await self._prompts.tokenize_rendered(filled, 0)

    def stats(self) -> Mapping[str, float]:
        """Return gauges and counters."""
        return {
            "image_cache_bytes": self._cache.held,
            "image_file_bytes": self._room.held,
            "encoded_images_total": self._cache.encoded,
            "cached_images_total": self._cache.found,
        }

    async def _render(self, request: GenerationRequest) -> tuple[str, list[ImagePart]]:
        """Return the rendered chat and its images."""
        messages = request.messages or ()
        parts = image_parts(messages, self._max_images)
        if request.sampling.truncate:
            raise RequestError("truncate is not allowed with images; leave it out")
        placed = msgspec.structs.replace(request, messages=with_placeholders(messages))
        return await self._prompts.render(placed, self._limit), parts

    @contextlib.asynccontextmanager
    async def _fetched(self, parts: Sequence[ImagePart]) -> AsyncIterator[list[_File]]:
        """Have the files of images that are elsewhere, for the block. What a request brings itself waits for none."""
        files: list[_File] = [(part, None) for part in parts]
        remote = [place for place, part in enumerate(parts) if not part.is_inline]
        if not remote:
            yield files
            return
        async with self._room.reserve(MAX_BYTES) as room:
            left = MAX_BYTES
            try:
                for place in remote:
                    data = await room.fetched(self._fetching.submit(self._files.fetch, parts[place], left))
                    left -= len(data)
                    files[place] = parts[place], data
                room.shrink(MAX_BYTES - left)
                yield files
            finally:  # the traceback of a request that failed has the list
                files.clear()

    async def _read(self, files: Sequence[_File]) -> tuple[Sequence[ImageKey], dict[ImageKey, _Image]]:
        """Return the key of each file, and the images as the processor makes them; a known one is not decoded again.

        Raises ContextLengthError as soon as the images have too many tokens: what is made of each grows with them.
        """
        budget, count = MediaBudget(), 0
        keys, found = [], dict[ImageKey, _Image]()
        for part, data in files:
            key, image = await self._read_one(part, data, len(files), found, budget)
            keys.append(key)
            found[key] = image
            count += _as_read(image).count
            if count >= self._limit:
                raise ContextLengthError.from_counts(count, 0, self._limit)
        return keys, found

    async def _read_one(
        self, part: ImagePart, data: bytes | None, images: int, found: Mapping[ImageKey, _Image], budget: MediaBudget
    ) -> tuple[ImageKey, _Image]:
        """Return the key of one of so many images, and the image, which the cache may have."""
        run, reader = asyncio.get_running_loop().run_in_executor, self._model.reader
        data = await to_its_end(run(self._reading, decoded, part)) if data is None else data
        key = await to_its_end(run(self._reading, reader.key, data, images))  # the loop would stall for 64 MiB
        known = found.get(key) or self._cache.find(key)
        if known is not None:
            return key, known
        return key, await to_its_end(run(self._reading, reader.read, part.name, data, budget, key.alone))

    async def _encode(self, keys: Sequence[ImageKey], found: dict[ImageKey, _Image]) -> list[KnownImage]:
        """Return the encoded image of each key."""
        known = {key: image for key, image in found.items() if isinstance(image, KnownImage)}
        try:
            for key, image in found.items():
                if isinstance(image, ReadImage):
                    await self._cache.wait_for_room(sum(each.features.nbytes for each in known.values()))
                    known[key] = await to_its_end(self._loop.call(_encoding(self._model.encoder, image)))
                    self._cache.add(key, known[key])
            return [known[key] for key in keys]
        finally:  # a traceback holds what a frame has
            known.clear()
            found.clear()


def _as_read(image: _Image) -> ReadImage:
    return image.image if isinstance(image, KnownImage) else image


def _encoding(encoder: ImageEncoder, image: ReadImage) -> Callable[[], KnownImage]:
    def encode() -> KnownImage:
        features = encoder.encode(image.count * image.copies, image.inputs).first(image.count)
        return KnownImage(image.without_pixels(), features)

    return encode
