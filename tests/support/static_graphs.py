"""A transformers model over a KV cache of fixed shape, computed on the CPU: what compiled graphs compute."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache


class LineCache(Cache):
    """Keys and values of `lines` x `length` positions; a pass writes some lines at positions of their own."""

    def __init__(self, lines: int, length: int) -> None:
        super().__init__(layers=[])
        self._shape = lines, length
        self._stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.lines = self.positions = torch.empty(0, dtype=torch.long)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx not in self._stored:
            lines, length = self._shape
            empty = torch.zeros(lines, length, key_states.shape[1], key_states.shape[3], dtype=key_states.dtype)
            self._stored[layer_idx] = empty, empty.clone()
        stored = self._stored[layer_idx]
        for held, new in zip(stored, (key_states, value_states), strict=True):
            held[self.lines.unsqueeze(1), self.positions] = new.transpose(1, 2)
        return stored[0][self.lines].transpose(1, 2), stored[1][self.lines].transpose(1, 2)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0


class Graphs:
    def __init__(self, model: Any, lines: int, length: int) -> None:
        self.model = model
        self._length = length
        self._cache = LineCache(lines, length)

    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, lines: torch.Tensor, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute tokens at `positions` of `lines`, none of which sees what is before `starts`; return all logits."""
        assert int(positions.max()) < self._length, "beyond the compiled length"
        begin = torch.zeros(len(lines), dtype=torch.long) if starts is None else starts.long()
        columns = torch.arange(self._length)
        seen = (columns <= positions.unsqueeze(-1)) & (columns >= begin[:, None, None])
        seen |= columns == positions.unsqueeze(-1)  # padding sees itself
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min).unsqueeze(1)
        self._cache.lines, self._cache.positions = lines.long(), positions.long()
        with torch.inference_mode():
            return self.model(
                input_ids=token_ids,
                attention_mask=mask,
                position_ids=(positions - begin.unsqueeze(1)).clamp(min=0),
                past_key_values=self._cache,
                use_cache=True,
            ).logits
