"""Chats with images: to a model under the rolling batch, and to the untouched one of transformers."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rolling_batch_helpers import may_be_generated
from tiny_image_models import EOS
from transformers import AutoModelForImageTextToText, AutoTokenizer

from handlers.huggingface.handler import HuggingFaceHandler
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.engine_loading import LoadedModel
from handlers.rolling_batch.images.processors import load_processor
from lmi_server.contract.generation import Delta, GenerationRequest, SamplingParameters

PENALTY = 2.0  # random models repeat themselves without it, whatever is in their prompt
Part = str | Image.Image


def noise(seed: int, width: int = 60, height: int = 40) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def data_url(image: Image.Image, form: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def openai_parts(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return the content of a message in OpenAI's form."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]


@dataclass
class Answer:
    deltas: list[Delta]

    @property
    def tokens(self) -> list[int]:
        return [token.id for delta in self.deltas for token in delta.tokens]

    @property
    def prompt(self) -> list[int]:
        return list(self.deltas[0].prompt_token_ids or ())

    @property
    def cached(self) -> int:
        usage = self.deltas[-1].usage
        assert usage is not None
        return usage.cached_tokens


class _OverPages(HuggingFaceHandler):
    """The handler with its KV cache in pages of `page` tokens, on any device."""

    def __init__(self, page: int) -> None:
        super().__init__()
        self._page = page

    def load_model(self, model_dir: str, options: HuggingFaceOptions) -> LoadedModel:
        return replace(super().load_model(model_dir, options), page=self._page)


class ServedImages:
    """The huggingface handler over a checkpoint."""

    def __init__(self, handler: HuggingFaceHandler) -> None:
        self.handler = handler

    @classmethod
    async def start(cls, directory: Path, page: int | None = None, **options: Any) -> ServedImages:
        """Load the checkpoint. `page` is that of LoadedModel."""
        handler = HuggingFaceHandler() if page is None else _OverPages(page)
        info = await handler.start(str(directory), HuggingFaceOptions.model_validate({"dtype": "fp32", **options}))
        assert "media" in info.features, info.details
        return cls(handler)

    async def ask(self, parts: Sequence[Part], adapter: str | None = None, **sampling: Any) -> Answer:
        content = openai_parts(parts) if any(not isinstance(part, str) for part in parts) else "".join(map(str, parts))
        parameters = SamplingParameters(**{"max_new_tokens": 6, "repetition_penalty": PENALTY, **sampling})
        messages = [{"role": "user", "content": content}]
        request = GenerationRequest(
            request_id="same", prompt=None, messages=messages, sampling=parameters, adapter=adapter
        )
        return Answer([delta async for delta in self.handler.generate(request)])

    def stat(self, name: str) -> float:
        return self.handler.stats()[name]


class Reference:
    """The model as transformers computes it, with one call of the processor for all images of a prompt."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.processor = load_processor(str(directory), self.model.config.model_type, self.tokenizer)

    def inputs(self, parts: Sequence[Part]) -> dict[str, Any]:
        images = [part for part in parts if not isinstance(part, str)]
        content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
        chat = [{"role": "user", "content": content if images else "".join(map(str, parts))}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        if not images:
            inputs = dict(self.tokenizer([text], return_tensors="pt", add_special_tokens=False))
            inputs.pop("token_type_ids", None)
            return inputs
        return dict(self.processor(images=[images], text=[text], return_tensors="pt", add_special_tokens=False))

    def generate(self, parts: Sequence[Part], tokens: int = 6) -> list[int]:
        inputs = self.inputs(parts)
        out = self.model.generate(
            **inputs,
            max_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=PENALTY,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        return out[0, inputs["input_ids"].shape[1] :].tolist()

    def generated_like(self, parts: Sequence[Part], tokens: list[int], limit: int = 6) -> list[int]:
        """Return what `generate` does, by one pass of the model if it is `tokens`: `generate` takes one for each."""
        return tokens if self._generates(parts, tokens, limit) else self.generate(parts, limit)

    @torch.inference_mode()
    def _generates(self, parts: Sequence[Part], tokens: list[int], limit: int) -> bool:
        """Return whether each token is the likeliest one behind those before it; False if that is not known."""
        if not may_be_generated(self.model, tokens, limit):
            return False
        inputs = self.inputs(parts)
        prompt = inputs["input_ids"]
        for name, value in inputs.items():
            if value.shape == prompt.shape:
                more = tokens[:-1] if name == "input_ids" else [int(name == "attention_mask")] * (len(tokens) - 1)
                inputs[name] = torch.cat((value, torch.tensor([more], dtype=value.dtype)), 1)
        rows = self.model(**inputs, use_cache=False).logits[0, prompt.shape[1] - 1 :]
        seen = prompt[0].tolist()
        for row, token in zip(rows, tokens, strict=True):
            row[seen] = torch.where(row[seen] < 0, row[seen] * PENALTY, row[seen] / PENALTY)
            if int(row.argmax()) != token:
                return False
            seen.append(token)
        return True

    def prompt_logprobs(self, parts: Sequence[Part]) -> list[float]:
        """Return the log probability of each token of a prompt but the first."""
        inputs = self.inputs(parts)
        with torch.inference_mode():
            rows = self.model(**inputs, use_cache=False).logits[0].log_softmax(-1)
        ids = inputs["input_ids"][0]
        return rows[:-1].gather(1, ids[1:, None])[:, 0].tolist()


def all_generated_like(
    reference: Reference, asked: Sequence[Sequence[Part]], answers: Sequence[Answer], limit: int = 6
) -> list[list[int]]:
    """Return what `generate` does for each prompt, which is quick if its answer has these tokens."""
    pairs = zip(asked, answers, strict=True)
    return [reference.generated_like(parts, answer.tokens, limit) for parts, answer in pairs]
