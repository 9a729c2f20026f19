"""The language model behind the images of a model, with its head, as a causal language model of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class _Output:
    logits: torch.Tensor


class TextModel(nn.Module):
    """A causal language model of transformers for the rolling batch, made of the parts of a model that reads images.

    Its modules have the names of a Llama's. `former_name` returns a module's name in the whole model, by which adapters
    know it. `turns_by_axes`: rotary embeddings have several axes, and text behind an image goes on at a position of its
    own.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.get_decoder()
        self.lm_head = model.get_output_embeddings()
        self.config = model.config
        self.generation_config = model.generation_config
        self.hf_device_map = getattr(model, "hf_device_map", None)
        self._softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self.turns_by_axes = hasattr(model.base_model, "get_rope_index")
        self._prefix = next(name for name, module in model.named_modules() if module is self.model)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def beside_embeddings(self, ids: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arguments that stand beside embeddings: what each layer adds for token ids (1, rows).

        The given rows are those of images, in whose place Gemma 4 reads its padding there.
        """
        config = self.config.get_text_config()
        if not getattr(config, "hidden_size_per_layer_input", 0):
            return {}
        ids = ids.clone()
        ids[0, rows] = config.pad_token_id
        return {"per_layer_inputs": self.model.get_per_layer_inputs(ids, None)}

    def former_name(self, name: str) -> str:
        """Return the name of a module in the whole model."""
        return self._prefix + name.removeprefix("model") if name.startswith("model.") else name

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: Any = slice(None),
        **more: Any,
    ) -> _Output:
        """Token ids (1, rows) or embeddings (1, rows, width) -> logits of the rows to keep, (1, kept, vocabulary)."""
        hidden = self.model(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            use_cache=use_cache,
            **more,
        ).last_hidden_state
        logits = self.lm_head(hidden[:, logits_to_keep])
        if self._softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return _Output(logits)
