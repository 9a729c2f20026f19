"""The KV cache in pages, on GPUs. `schedule/page_table.py` decides which sequence has which pages."""

from __future__ import annotations

import numpy as np
import torch

from handlers.rolling_batch.attention.kv_cache import LayerShape, bytes_per_token
from handlers.rolling_batch.device_arrays import upload
from handlers.rolling_batch.schedule.page_table import PageStep


class PagedCache:
    """`keys[layer]` and `values[layer]` are (pages + 1, kv_heads, page, dim) tensors on the layer's device.

    `tables` has for each device, (slots + 1, pages of `max_len` tokens) int32, the page of every `page` tokens of the
    sequence in a slot. The last page is of no sequence: rows that only fill up a pass are written there, by way of
    `idle_slot`, and so are the rows of a slot without a sequence.
    """

    def __init__(
        self, layers: list[LayerShape], slots: int, max_len: int, kv_tokens: int, page: int, dtype: torch.dtype
    ) -> None:
        self.slots = self.idle_slot = slots
        self.max_len = max_len
        self.page = page
        self.pages = kv_tokens // page
        self.bytes_per_token = bytes_per_token(layers, dtype)
        shapes = [(self.pages + 1, layer.kv_heads, page) for layer in layers]
        self.keys, self.values = (
            [
                torch.zeros((*shape, dim), dtype=dtype, device=layer.device)
                for shape, layer, dim in zip(shapes, layers, dims, strict=True)
            ]
            for dims in ([layer.head_dim for layer in layers], [layer.value_dim for layer in layers])
        )
        self.tables = {
            device: torch.full((slots + 1, -(-max_len // page)), self.pages, dtype=torch.int32, device=device)
            for device in {layer.device for layer in layers}
        }

    def apply(self, step: PageStep) -> None:
        """Do what a step has to do with pages before it computes."""
        if step.added:
            self._list(step)
        if step.copies:
            self._copy(step)

    def free(self) -> None:
        """Give all memory back."""
        self.keys.clear()
        self.values.clear()

    def trim(self, slot: int, keep: int) -> None:
        """Give nothing back: pages are allocated for good, and their table says who has them."""

    def _list(self, step: PageStep) -> None:
        columns = next(iter(self.tables.values())).shape[1]
        places = [np.arange(len(added.pages)) + added.slot * columns + added.first for added in step.added]
        pages = [np.array(added.pages) for added in step.added]
        both = np.stack((np.concatenate(places), np.concatenate(pages)))
        for device, table in self.tables.items():
            place, page = upload(both, device)
            table.view(-1)[place] = page.int()

    def _copy(self, step: PageStep) -> None:
        """Copy whole pages. All are read before one is written: a source may be the target of another copy."""
        both = np.array([(copy.source, copy.target) for copy in step.copies]).T
        for device in self.tables:
            source, target = upload(both, device)
            for area in (*self.keys, *self.values):
                if area.device == device:
                    area[target] = area[source]
