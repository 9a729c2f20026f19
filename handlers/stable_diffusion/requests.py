"""Turns requests into a pipeline's drawings, and refuses impossible ones before they take memory."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from handlers.stable_diffusion.classes import OnStep
from handlers.stable_diffusion.images import read_image, transparent_parts
from handlers.stable_diffusion.options import IMAGE_TO_IMAGE, INPAINTING, TEXT_TO_IMAGE, StableDiffusionOptions
from handlers.tasks.task import read_parameters
from lmi_server.contract.errors import RequestError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects import fields
from lmi_server.dialects.fields import Field
from lmi_server.dialects.openai.images import ImagesRequest

if TYPE_CHECKING:
    from PIL.Image import Image

_SEEDS = 2**64


@dataclass(frozen=True)
class Mode:
    """One thing that the pipeline can do: the names of its arguments, with their defaults; `name` is the class."""

    name: str
    defaults: Mapping[str, Any]


class ImageModel(Protocol):
    """A loaded pipeline.

    `modes` says what it can do, by task. Width and height are multiples of `multiple`; `size` is the only (width,
    height) that its images have, None for any. `details` are facts for the log and `explain`.
    """

    @property
    def modes(self) -> Mapping[str, Mode]: ...

    @property
    def multiple(self) -> int: ...

    @property
    def size(self) -> tuple[int, int] | None: ...

    @property
    def details(self) -> Mapping[str, Any]: ...

    def draw(self, drawings: Sequence[Drawing], on_step: OnStep) -> Sequence[Sequence[Any]]:
        """Return the images of each drawing; they are of one group and run together."""
        ...

    def add_adapter(self, name: str, directory: str) -> None:
        """Load a LoRA adapter, or replace the one of that name. Raises RequestError; nothing has changed then."""
        ...

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter; nothing happens if there is none of that name."""
        ...


@dataclass(frozen=True)
class Drawing:
    """The images that one request asks for.

    `texts` has for each argument (prompt, negative_prompt, ...) a text per image, `seeds` a seed per image. `arguments`
    are the other ones of the pipeline. `size` is (width, height), None for the pipeline's own.
    """

    task: str
    texts: Mapping[str, Sequence[str]]
    seeds: Sequence[int]
    arguments: Mapping[str, Any]
    size: tuple[int, int] | None = None
    image: Image | None = None
    mask: Image | None = None
    adapter: str | None = None

    def group(self) -> Hashable:
        """Return a key that is equal for drawings of one run of the pipeline."""
        return (self.task, self.size, self.adapter, frozenset(self.texts), frozenset(self.arguments.items()))


def _texts(name: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items or not all(isinstance(item, str) for item in items):
        raise fields.not_allowed(name, value, "send a string, or a list of them")
    return tuple(items)


_TEXTS = {
    name: Field(name, _texts)
    for name in ("prompt", "prompt_2", "prompt_3", "negative_prompt", "negative_prompt_2", "negative_prompt_3")
}
_SCALE = fields.number(lambda value: 0 <= value <= 1000, "a number from 0 to 1000")
_SHARE = fields.number(lambda value: 0 <= value <= 1, "a number from 0 to 1")
_STRENGTH = fields.number(lambda value: 0 < value <= 1, "a number above 0 and up to 1")
PARAMETERS: Mapping[str, Field] = {
    **_TEXTS,
    "num_inference_steps": Field("num_inference_steps", fields.integer(1)),
    "num_images_per_prompt": Field("num_images_per_prompt", fields.integer(1)),
    "seed": Field("seed", fields.SEED),
    "width": Field("width", fields.integer(1)),
    "height": Field("height", fields.integer(1)),
    "guidance_scale": Field("guidance_scale", _SCALE),
    "true_cfg_scale": Field("true_cfg_scale", _SCALE),
    "guidance_rescale": Field("guidance_rescale", _SHARE),
    "strength": Field("strength", _STRENGTH),
    "eta": Field("eta", _SHARE),
    "clip_skip": Field("clip_skip", fields.integer(1, 100)),
    "max_sequence_length": Field("max_sequence_length", fields.integer(1, 4096)),
}
"""The parameters of a request by name. All but the seed are diffusers' own."""
_OWN = frozenset({"seed", "width", "height", "num_images_per_prompt", *_TEXTS})


class DrawingReader:
    """Reads requests for a pipeline."""

    def __init__(self, options: StableDiffusionOptions, model: ImageModel) -> None:
        self._options = options
        self._modes = model.modes
        self._multiple = model.multiple
        self._only_size = model.size

    def lmi(self, body: Mapping[str, Any], adapter: str | None) -> Drawing:
        """Read LMI's body: `prompt` or `inputs`, `parameters`, and for images `image` and `mask_image`.

        If `parameters` has a prompt, `inputs` is the image, as Hugging Face's clients send it. Raises RequestError.
        """
        values = read_parameters(body.get("parameters"), PARAMETERS)
        image, prompt = body.get("image"), body.get("prompt")
        if prompt is None and "prompt" in values and image is None:
            image = body.get("inputs")
        elif "prompt" not in values:
            prompt = body.get("inputs") if prompt is None else prompt
        if prompt is not None:
            values["prompt"] = _texts("prompt", prompt)
        return self._drawing(
            values,
            None if image is None else read_image("image", image),
            None if body.get("mask_image") is None else read_image("mask_image", body["mask_image"]).convert("L"),
            adapter,
        )

    def openai(self, asked: ImagesRequest, adapter: str | None) -> Drawing:
        """Read a request of OpenAI's API, whose masks are transparent where the image changes. Raises RequestError."""
        values = {**asked.parameters, "prompt": (asked.prompt,), "num_images_per_prompt": asked.n}
        if asked.size is not None:
            values["width"], values["height"] = asked.size
        image = None if asked.image is None else read_image("image", asked.image)
        masked = image if asked.mask is None else read_image("mask", asked.mask)
        mask = None if masked is None else transparent_parts(masked)
        if mask is None and asked.mask is not None:
            raise RequestError("mask has no transparent parts, and only these are drawn anew; make some transparent")
        return self._drawing(values, image, mask, adapter)

    def _drawing(
        self, values: Mapping[str, Any], image: Image | None, mask: Image | None, adapter: str | None
    ) -> Drawing:
        if "prompt" not in values:
            raise RequestError('prompt is missing; send {"prompt": "a text", "parameters": {...}}')
        task = self._task(image, mask)
        count = values.get("num_images_per_prompt", self._options.num_images_per_prompt)
        prompts = len(values["prompt"])
        self._check_count(prompts * count)
        size = self._size(values, image)
        arguments = {name: value for name, value in values.items() if name not in _OWN}
        texts = {name: _repeat(name, values[name], prompts, count) for name in _TEXTS if name in values}
        self._check_arguments(self._modes[task], {**arguments, **texts})
        seed = values.get("seed", random.SystemRandom().getrandbits(32))
        return Drawing(
            task=task,
            texts=texts,
            seeds=[(seed + index) % _SEEDS for index in range(prompts * count)],
            arguments=arguments,
            size=size,
            image=_fit(image, size),
            mask=_fit(mask, size),
            adapter=adapter,
        )

    def _task(self, image: Image | None, mask: Image | None) -> str:
        if mask is not None and image is None:
            raise RequestError("mask_image needs an image; send it as image")
        task = INPAINTING if mask is not None else IMAGE_TO_IMAGE if image is not None else TEXT_TO_IMAGE
        if task not in self._modes:
            needs = {TEXT_TO_IMAGE: "an image", IMAGE_TO_IMAGE: "no image", INPAINTING: "no mask"}[task]
            served = ", ".join(self._modes)
            raise RequestError(f"the model serves {served}, and the request asks for {task}; send {needs} with it")
        return task

    def _check_count(self, images: int) -> None:
        limit = self._options.max_images
        if images > limit:
            raise RequestError(f"the request asks for {images} images, and option.max_images is {limit}; ask for fewer")

    def _check_arguments(self, mode: Mode, arguments: Mapping[str, Any]) -> None:
        unknown = [name for name in arguments if name not in mode.defaults]
        if unknown:
            allowed = ", ".join(name for name in PARAMETERS if name in mode.defaults or name in _OWN - _TEXTS.keys())
            raise RequestError(f"parameters.{excerpt(unknown[0])} is not known to {mode.name}; allowed: {allowed}")
        steps = arguments.get("num_inference_steps", mode.defaults.get("num_inference_steps") or 1)
        limit = self._options.max_inference_steps
        if steps > limit:
            raise RequestError(
                f"parameters.num_inference_steps: {steps} is more than option.max_inference_steps={limit};"
                " ask for fewer"
            )
        strength = arguments.get("strength", mode.defaults.get("strength") or 1)
        if int(steps * strength) < 1:
            raise RequestError(
                f"parameters.strength: {strength} of {steps} steps is less than one step; send a higher strength or"
                " more steps"
            )

    def _size(self, values: Mapping[str, Any], image: Image | None) -> tuple[int, int] | None:
        """Return width and height, which the request, its image or the options name. Raises RequestError."""
        options = self._options
        if self._only_size is not None:
            return self._compiled_size(values, self._only_size)
        if image is None:
            default = (options.width, options.height)
        else:
            default = (image.width - image.width % self._multiple, image.height - image.height % self._multiple)
        width, height = values.get("width", default[0]), values.get("height", default[1])
        if width is None and height is None:
            return None
        width, height = width or height, height or width
        if width % self._multiple or height % self._multiple or not width or not height:
            raise RequestError(
                f"width and height: {width} x {height} is not allowed; send multiples of {self._multiple}"
            )
        if width * height > options.max_image_pixels:
            raise RequestError(
                f"width and height: {width} x {height} pixels are more than option.max_image_pixels="
                f"{options.max_image_pixels}; send a smaller width and height"
            )
        return width, height

    @staticmethod
    def _compiled_size(values: Mapping[str, Any], size: tuple[int, int]) -> tuple[int, int]:
        """Return the only size that the graphs make; images are fitted to it. Raises RequestError for another size."""
        asked = (values.get("width", size[0]), values.get("height", size[1]))
        if asked != size:
            raise RequestError(
                f"width and height: {asked[0]} x {asked[1]} is not allowed; the model was compiled for"
                f" {size[0]} x {size[1]}, leave them out"
            )
        return size


def _repeat(name: str, texts: Sequence[str], prompts: int, count: int) -> list[str]:
    """Return a text per image. One text is for all prompts; otherwise there is one for each."""
    if len(texts) not in (1, prompts):
        raise RequestError(f"{name}: {len(texts)} texts for {prompts} prompts are not allowed; send one, or {prompts}")
    each = texts if len(texts) == prompts else [texts[0]] * prompts
    return [text for text in each for _ in range(count)]


def _fit(image: Image | None, size: tuple[int, int] | None) -> Image | None:
    if image is None or size is None:
        return image
    color = image if image.mode == "L" else image.convert("RGB")
    return color if color.size == size else color.resize(size)
