"""Streams the tokens of a transformers model, for code that loads such a model itself. Needs torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

_END = object()


class HFStreamer:
    """A streamer for `generate(streamer=...)` of transformers. Iterating over it gives the texts as they come."""

    def __init__(self, tokenizer: Any, **decode_kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.decode_kwargs = decode_kwargs
        self._texts: SimpleQueue[Any] = SimpleQueue()
        self._ids: list[int] = []
        self._sent = 0

    def put(self, value: Any) -> None:
        """Take the ids of new tokens, as transformers calls it."""
        self._ids += value.flatten().tolist()
        text = self.tokenizer.decode(self._ids, **self.decode_kwargs)
        if not text.endswith("\ufffd"):  # otherwise a character is incomplete
            self.put_text(text[self._sent :])
            self._sent = len(text)

    def put_text(self, value: str) -> None:
        self._texts.put([value])

    def end(self) -> None:
        self._texts.put(_END)

    def __iter__(self) -> Iterator[list[str]]:
        return self

    def __next__(self) -> list[str]:
        value = self._texts.get()
        if value is _END:
            raise StopIteration
        if isinstance(value, BaseException):
            raise value
        return list(value)


class StreamingUtils:
    """Ways to stream."""

    DEFAULT_MAX_NEW_TOKENS = 50
    BUILTIN_ENGINES = frozenset({"Accelerate"})

    @staticmethod
    def get_stream_generator(execution_engine: str) -> Callable[..., Iterator[list[str]]]:
        """Return `generator(model, tokenizer, inputs, device, **parameters)`, which yields a list of texts per step.

        Raises ValueError for an engine other than Accelerate.
        """
        if execution_engine not in StreamingUtils.BUILTIN_ENGINES:
            raise ValueError(f"{execution_engine} is not allowed; allowed: {', '.join(StreamingUtils.BUILTIN_ENGINES)}")
        return _steps

    @staticmethod
    def use_hf_default_streamer(
        model: Any, tokenizer: Any, inputs: list[str], device: Any, **kwargs: Any
    ) -> Iterator[list[str]]:
        """Generate with transformers in another thread; yield the texts, the prompt first. Takes one input."""
        if len(inputs) != 1:
            raise ValueError(f"{len(inputs)} inputs cannot be streamed with transformers' streamer; send one")
        streamer = HFStreamer(tokenizer, skip_special_tokens=True)
        tokens = tokenizer(inputs, return_tensors="pt").to(device)
        kwargs.setdefault("max_new_tokens", StreamingUtils.DEFAULT_MAX_NEW_TOKENS)

        def generate() -> None:
            try:
                model.generate(**tokens, streamer=streamer, **kwargs)
            except Exception as error:  # noqa: BLE001 - another thread waits for it
                streamer._texts.put(error)

        threading.Thread(target=generate, daemon=True).start()
        return iter(streamer)


def _steps(model: Any, tokenizer: Any, inputs: list[str], device: Any, **kwargs: Any) -> Iterator[list[str]]:
    """Yield the new texts of all inputs, step by step."""
    import torch

    if not inputs:
        raise ValueError("there are no inputs; send at least one")
    if kwargs.get("beam_size", 1) > 1:
        raise NotImplementedError("beam search cannot be streamed")
    choose = _chooser(torch, kwargs)
    encoded = tokenizer(inputs, return_tensors="pt", padding=len(inputs) > 1).to(device)
    ids, mask, past = encoded["input_ids"], encoded["attention_mask"], None
    seen = [list[int]() for _ in inputs]
    texts, ended = [""] * len(inputs), [False] * len(inputs)
    for _ in range(kwargs.get("max_new_tokens", StreamingUtils.DEFAULT_MAX_NEW_TOKENS)):
        with torch.inference_mode():
            out = model(input_ids=ids, attention_mask=mask, past_key_values=past, use_cache=True)
        past, ids = out.past_key_values, choose(out.logits[:, -1])
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        step = []
        for index, token in enumerate(ids.flatten().tolist()):
            if not ended[index]:
                seen[index].append(token)
            text = tokenizer.decode(seen[index])
            step.append("" if ended[index] or text.endswith("\ufffd") else text[len(texts[index]) :])
            texts[index] += step[-1]
            ended[index] = ended[index] or token == tokenizer.eos_token_id
        yield step
        if all(ended):
            return


def _chooser(torch: Any, kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    """Return what chooses the next token of each row: the most likely one, unless a parameter asks for samples."""
    sampled = kwargs.get("do_sample") or any(name in kwargs for name in ("temperature", "top_k", "top_p"))
    if not sampled:
        return lambda logits: logits.argmax(-1, keepdim=True)

    def sample(logits: Any) -> Any:
        ordered, order = (logits.float() / kwargs.get("temperature", 1.0)).sort(-1, descending=True)
        likely = ordered.softmax(-1)
        likely[likely.cumsum(-1) - likely > kwargs.get("top_p", 1.0)] = 0
        likely[:, kwargs.get("top_k") or likely.shape[-1] :] = 0
        return order.gather(-1, torch.multinomial(likely, 1))

    return sample
