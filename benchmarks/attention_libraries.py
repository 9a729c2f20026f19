"""Attention over pages by the project's kernels, and by FlashInfer and FlashAttention where these are installed.

    python -m benchmarks.attention_libraries           # the shapes of the demo model and of Llama 3 8B, under 60 s

The launches are recorded and timed as in `gpu_attention`, which times torch's attention and the write of keys and
values as well. The libraries plan outside of the recording, for exactly these lengths. FlashInfer reads the same pages;
FlashAttention, which takes pages of 256 tokens, reads keys and values in a row. Each result is compared with the
project's. FlashInfer compiles what it needs at the first call; FLASHINFER_DISABLE_JIT=1 leaves out what is not
compiled.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu_attention import DTYPE, Pages, layers_for, require_gpu, seconds
from handlers.rolling_batch.pages import launch
from handlers.rolling_batch.pages.launch import PageLayer, Tuning
from lmi_server.contract.errors import first_line

SHAPES = {
    "demo": PageLayer(heads=9, kv_heads=3, dim=64, value_dim=64, page=32),
    "8b": PageLayer(heads=32, kv_heads=8, dim=128, value_dim=128, page=32),
}
BATCHES, CONTEXTS = (1, 8, 64), (512, 4096)
PROMPTS = ((2048, 0), (2048, 8192))  # rows of a chunk, tokens before it
_SCALE = 0.1
_WORKSPACE = 2**27  # bytes
_LIMIT = 2e-2  # of the largest value, for bfloat16

Attend = Callable[[int], torch.Tensor]
"""Attends in the layer of a number."""


def library(name: str) -> Any:
    """Return an installed package."""
    return importlib.import_module(name)


class Sequences:
    """`batch` sequences of `context` tokens in pages, whose last `rows` tokens attend."""

    def __init__(self, layer: PageLayer, batch: int, context: int, rows: int = 1) -> None:
        self.layer, self.batch, self.context, self.rows = layer, batch, context, rows
        self.pages = Pages(batch, context, layers_for(batch, context, layer) if rows == 1 else 2, layer)
        self.query = torch.randn(batch * rows, layer.heads, layer.dim, dtype=DTYPE, device="cuda")
        self.out = torch.empty_like(self.query)
        self.tuning = Tuning.from_torch(torch.device("cuda"))
        self.chunk = torch.tensor([[0, rows, context - rows, 0]], dtype=torch.int32, device="cuda")

    def kept(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pages.keys[index], self.pages.values[index]

    def ours(self, index: int) -> torch.Tensor:
        tables, slots, places = self.pages.tables, self.pages.slots, self.pages.positions
        if self.rows > 1:
            described = (tables, self.chunk, self.rows, self.out, _SCALE, self.layer, self.tuning)
            launch.chunks(self.query, *self.kept(index), *described)
            return self.out
        rows = (*self.kept(index), tables, slots, places)
        launch.decode(self.query, *rows, self.batch, self.out, _SCALE, self.layer, self.tuning)
        return self.out


def _indices(pages: Pages, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where the pages of each sequence begin, the pages, and the tokens in the last one of each."""
    batch, each = pages.tables.shape
    begins = torch.arange(0, batch * each + 1, each, dtype=torch.int32, device="cuda")
    last = torch.full((batch,), (context - 1) % pages.layer.page + 1, dtype=torch.int32, device="cuda")
    return begins, pages.tables.flatten(), last


def flashinfer_decode(sequences: Sequences, by_tensor_cores: bool) -> Attend:
    """Return FlashInfer's decoding, planned for the sequences."""
    layer = sequences.layer
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device="cuda")
    wrapper = library("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", use_tensor_cores=by_tensor_cores
    )
    shape = (layer.heads, layer.kv_heads, layer.dim, layer.page)
    types = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
    wrapper.plan(*_indices(sequences.pages, sequences.context), *shape, sm_scale=_SCALE, **types)
    out = torch.empty_like(sequences.query)
    return lambda index: wrapper.run(sequences.query, sequences.kept(index), out=out)


def flashinfer_prompt(sequences: Sequences, backend: str) -> Attend:
    """Return FlashInfer's attention of a chunk by "fa2" or "fa3", planned for it."""
    layer = sequences.layer
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device="cuda")
    wrapper = library("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=backend)
    rows = torch.tensor([0, sequences.rows], dtype=torch.int32, device="cuda")
    shape = (layer.heads, layer.kv_heads, layer.dim, layer.page)
    types = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
    wrapper.plan(rows, *_indices(sequences.pages, sequences.context), *shape, causal=True, sm_scale=_SCALE, **types)
    out = torch.empty_like(sequences.query)
    return lambda index: wrapper.run(sequences.query, sequences.kept(index), out=out)


def flash_attn(sequences: Sequences) -> Attend:
    """Return FlashAttention over keys and values in a row, copied from the pages."""
    attend = library("flash_attn").flash_attn_with_kvcache
    batch, layer = sequences.batch, sequences.layer

    def in_a_row(kept: torch.Tensor) -> torch.Tensor:
        listed = kept[sequences.pages.tables.long()]  # (batch, pages, kv_heads, page, dim)
        return listed.transpose(2, 3).flatten(1, 2)[:, : sequences.context].contiguous()

    copied = [tuple(map(in_a_row, sequences.kept(index))) for index in range(sequences.pages.layers)]
    query = sequences.query.view(batch, sequences.rows, layer.heads, layer.dim)
    lengths = torch.full((batch,), sequences.context, dtype=torch.int32, device="cuda")

    def run(index: int) -> torch.Tensor:
        out: torch.Tensor = attend(query, *copied[index], cache_seqlens=lengths, softmax_scale=_SCALE, causal=True)
        return out.flatten(0, 1)

    return run


def others(sequences: Sequences) -> Iterator[tuple[str, Callable[[], Attend]]]:
    """Yield the ways of installed libraries to attend, by name."""
    if find_spec("flashinfer") is not None:
        if sequences.rows == 1:
            yield "flashinfer", lambda: flashinfer_decode(sequences, by_tensor_cores=False)
            yield "flashinfer, tensor cores", lambda: flashinfer_decode(sequences, by_tensor_cores=True)
        else:
            yield "flashinfer fa2", lambda: flashinfer_prompt(sequences, "fa2")
            yield "flashinfer fa3", lambda: flashinfer_prompt(sequences, "fa3")
    if find_spec("flash_attn") is not None:
        yield "flash_attn", lambda: flash_attn(sequences)


def measured(sequences: Sequences, attend: Attend) -> float:
    return seconds([lambda index=index: attend(index) for index in range(sequences.pages.layers)])  # type: ignore[misc]


def described(sequences: Sequences, make: Callable[[], Attend], took: float) -> str:
    """Return the time of a library, and how it compares with ours; or why it has none."""
    try:
        attend = make()
        error = float((attend(0) - sequences.ours(0)).abs().max() / sequences.out.abs().max())
        other = measured(sequences, attend)
    # A shape that it does not take, a compiler or another package that is not there.
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError, OSError) as failure:
        return f"none: {first_line(failure)[:100]}"
    note = "" if error <= _LIMIT else f", off by {error:.2g}"
    return f"{other * 1e6:.1f} us, {other / took:.2f} of ours{note}"


def main() -> None:
    """Print a line for each shape."""
    require_gpu("attention_libraries")
    for name in ("flashinfer", "flash_attn"):
        if find_spec(name) is None:
            print(f"{name} is not installed")
    for name, layer in SHAPES.items():
        cases = [(batch, context, 1) for batch, context in itertools.product(BATCHES, CONTEXTS)]
        cases += [(1, before + rows, rows) for rows, before in PROMPTS]
        for batch, context, rows in cases:
            sequences = Sequences(layer, batch, context, rows)
            took = measured(sequences, sequences.ours)
            print(f"{name}: {batch} x {rows} rows, context {context}: ours {took * 1e6:.1f} us")
            for library_name, make in others(sequences):
                print(f"    {library_name}: {described(sequences, make, took)}", flush=True)


if __name__ == "__main__":
    main()
