"""From pixels to the embeddings that stand in a prompt, by the model's own code.

Families differ in how they tile an image, pool its patches and mix in tokens of line ends. All of them end with a call
of their language model with embeddings in place of token ids. So the whole model is called with an image, and the call
ends with the inputs of the language model. Nothing of a family has to be known.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

_LAYERS = "deepstack_visual_embeds"  # added behind the first layers (DeepStack, Meng et al., 2024)
_EXPECTED = {"inputs_embeds", "position_ids", "attention_mask", _LAYERS, "visual_pos_masks", "per_layer_inputs"}
_WINDOWED = "sliding_attention"  # a kind of layers, as transformers names it
BothWays = Literal["none", "windows", "all"]
"""The layers in which the tokens of an image attend to each other in both directions."""


class UnsupportedImagesError(Exception):
    """The model's images need what the rolling batch does not provide. The message says what."""


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """An encoded image: `embeddings` (tokens, width), and what is added behind each of the first `layers`, alike."""

    embeddings: torch.Tensor
    layers: tuple[torch.Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.layers))

    def first(self, count: int) -> ImageFeatures:
        """Return a copy of the first `count` tokens."""
        return ImageFeatures(self.embeddings[:count].clone(), tuple(layer[:count].clone() for layer in self.layers))


class _Reached(Exception):  # noqa: N818 - the normal end of a call
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def _stop(module: Any, positional: Any, arguments: Mapping[str, Any]) -> None:
    raise _Reached(arguments)


class ImageEncoder:
    """Encodes images with the vision part of `model`, a model of transformers for images and text."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._core = model.base_model
        self._decoder = model.get_decoder()
        self.token: int = model.config.image_token_id
        """Stands for a part of an image in a prompt."""
        self._accepted = frozenset(inspect.signature(self._core.forward).parameters)

    def encode(self, count: int, inputs: Mapping[str, Any]) -> ImageFeatures:
        """Return what stands for an image of `count` tokens; `inputs` are the processor's.

        Raises UnsupportedImagesError, or whatever the code of the model raises.
        """
        found = self._call([self.token] * count, inputs)
        more = [name for name, value in found.items() if torch.is_tensor(value) and name not in _EXPECTED]
        if more:
            raise UnsupportedImagesError(f"its language model takes {', '.join(more)} beside embeddings")
        layers = found.get(_LAYERS) or ()
        return ImageFeatures(found["inputs_embeds"][0], tuple(layers))

    def attends_both_ways(self, count: int, inputs: Mapping[str, Any]) -> BothWays:
        """Return where the tokens of an image see later ones of it.

        The attention of the language model is left as "eager", for which transformers makes readable masks.
        """
        self._decoder.set_attn_implementation("eager")
        types = torch.ones(1, count, dtype=torch.long, device=self._model.device)
        named = dict.fromkeys(("token_type_ids", "mm_token_type_ids"), types)
        mask = self._call([self.token] * count, {**inputs, **named}).get("attention_mask")
        masks = mask if isinstance(mask, Mapping) else {"": mask}
        seen = {kind for kind, each in masks.items() if _sees_later(each)}
        return "windows" if seen == {_WINDOWED} and len(masks) > 1 else "all" if seen else "none"

    def logits(self, ids: list[int], inputs: Mapping[str, Any], more: Mapping[str, Any]) -> torch.Tensor:
        """Return the logits that the whole model has for a prompt with an image, (tokens, vocabulary)."""
        accepted = inspect.signature(self._model.forward).parameters
        given = {name: self._placed(value) for name, value in {**inputs, **more}.items() if name in accepted}
        with torch.inference_mode():
            out = self._model(input_ids=torch.tensor([ids], device=self._model.device), use_cache=False, **given)
        return out.logits[0].float().cpu()

    def _call(self, ids: list[int], inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments with which the model calls its language model."""
        device = self._model.device
        given = {name: value for name, value in inputs.items() if name in self._accepted}
        given = {name: self._placed(value) for name, value in given.items()}
        tokens = torch.tensor([ids], device=device)
        places = torch.arange(len(ids), device=device)[None]
        hook = self._decoder.register_forward_pre_hook(_stop, with_kwargs=True)
        try:
            with torch.inference_mode():
                self._core(input_ids=tokens, position_ids=places, use_cache=False, **given)
        except _Reached as reached:
            return reached.arguments
        finally:
            hook.remove()
        raise UnsupportedImagesError("its language model is not called with embeddings")

    def _placed(self, value: Any) -> Any:
        if not torch.is_tensor(value):
            return value
        return value.to(self._model.device, self._model.dtype if value.is_floating_point() else value.dtype)


def _sees_later(mask: Any) -> bool:
    """Return whether a mask (..., rows, columns) lets the first row see the last column."""
    if not torch.is_tensor(mask) or mask.ndim < 3 or mask.shape[-1] < 2:
        return False
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return bool(seen[..., 0, -1].any())
