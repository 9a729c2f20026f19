"""The Triton kernels over a KV cache in pages compute what torch's operators do in float32.

They run on a GPU by NVIDIA, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU, fewer and smaller cases;
tests/engines/rolling_batch/test_interpreted_kernels.py does the latter.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn import functional

INTERPRETED = False
if not torch.cuda.is_available():
    knobs = pytest.importorskip("triton", reason="needs Triton").knobs
    INTERPRETED = bool(knobs.runtime.interpret)
    if not INTERPRETED:
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from handlers.rolling_batch.attention.terms import AttentionTerms, States  # noqa: E402
from handlers.rolling_batch.pages import cudnn, launch  # noqa: E402
from handlers.rolling_batch.pages.launch import PageLayer, Tuning  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
TUNING = Tuning(4, 2**17) if INTERPRETED else Tuning.from_torch(torch.device("cuda"))
LENGTHS = [1, 17, 70] if INTERPRETED else [1, 16, 17, 33, 400, 1023, 3000]
DTYPES = [torch.float32, torch.bfloat16] + [torch.float16] * (not INTERPRETED)
SCALING = 0.2
LAYERS = {
    "grouped": PageLayer(4, 2, 64, 64, 16),
    "window": PageLayer(3, 1, 80, 80, 16, window=20),
    "soft_cap_and_sinks": PageLayer(2, 1, 128, 96, 32, softcap=5.0, sinks=True),
    "chunked": PageLayer(2, 2, 16, 16, 16, chunk=24),
    "sinks_and_window": PageLayer(2, 1, 64, 64, 32, window=40, sinks=True),
    "wide": PageLayer(2, 1, 256, 256, 16, softcap=50.0),
}
if not INTERPRETED:
    LAYERS |= {
        "llama_8b": PageLayer(32, 8, 128, 128, 32),
        "one_group_of_many": PageLayer(71, 1, 64, 64, 32),
        "different_widths": PageLayer(16, 16, 192, 128, 32),
        "window_of_thousands": PageLayer(32, 4, 96, 96, 32, window=1024),
    }


@dataclass
class Filled:
    """Sequences of LENGTHS tokens that were written to pages in a random order; all else in the pages is NaN."""

    layer: PageLayer
    keys: list[torch.Tensor]  # (length, kv_heads, dim)
    values: list[torch.Tensor]
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    tables: torch.Tensor
    sinks: torch.Tensor | None
    dtype: torch.dtype

    @classmethod
    @functools.cache  # a test reads them only
    def fill(cls, layer: PageLayer, dtype: torch.dtype) -> Filled:
        torch.manual_seed(0)
        count, most = len(LENGTHS), max(LENGTHS) // layer.page + 2
        tables = torch.randperm(count * most + 3)[: count * most].view(count, most).int().to(DEVICE)
        keys, values = (
            [torch.randn(length, layer.kv_heads, dim).to(DEVICE, dtype) for length in LENGTHS]
            for dim in (layer.dim, layer.value_dim)
        )
        pages = [
            torch.full((count * most + 3, layer.kv_heads, layer.page, dim), torch.nan, dtype=dtype, device=DEVICE)
            for dim in (layer.dim, layer.value_dim)
        ]
        sinks = torch.randn(layer.heads).to(DEVICE, dtype) if layer.sinks else None
        self = cls(layer, keys, values, *pages, tables, sinks, dtype)
        slots = torch.tensor([slot for slot, length in enumerate(LENGTHS) for _ in range(length)])
        positions = torch.tensor([place for length in LENGTHS for place in range(length)])
        rows = (torch.cat(keys), torch.cat(values))
        launch.write(*rows, *pages, tables, self.numbers(slots), self.numbers(positions), layer)
        return self

    @staticmethod
    def numbers(numbers: object) -> torch.Tensor:
        return torch.as_tensor(numbers).to(DEVICE, torch.int32)

    def queries(self, rows: int) -> torch.Tensor:
        chance = torch.Generator().manual_seed(1)
        return torch.randn(rows, self.layer.heads, self.layer.dim, generator=chance).to(DEVICE, self.dtype)

    def empty(self, rows: int) -> torch.Tensor:
        return torch.full((rows, self.layer.heads, self.layer.value_dim), torch.nan, dtype=self.dtype, device=DEVICE)

    def expected(
        self, query: torch.Tensor, slot: int, positions: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return what rows of `query`, (rows, heads, dim), get at `positions` of a sequence, by plain operations.

        They see the tokens up to `ends`, if these are not their own.
        """
        layer = self.layer
        last = (positions if ends is None else ends).to(DEVICE)[:, None]
        positions = positions.to(DEVICE)[:, None]
        kept = [
            states[slot].float().repeat_interleave(layer.heads // layer.kv_heads, 1)
            for states in (self.keys, self.values)
        ]
        scores = torch.einsum("rhd,nhd->hrn", query.double(), kept[0].double()) * SCALING
        if layer.softcap:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        column = torch.arange(LENGTHS[slot], device=DEVICE)
        seen = column <= last
        if layer.window:
            seen &= column > positions - layer.window
        if layer.chunk:
            seen &= column >= positions // layer.chunk * layer.chunk
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(-1, len(query), 1)], 2)
        weights = torch.softmax(scores, 2)[..., : LENGTHS[slot]]
        return torch.einsum("hrn,nhd->rhd", weights, kept[1].double()).float()

    def check(self, computed: torch.Tensor, expected: torch.Tensor) -> None:
        limit = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[self.dtype]
        torch.testing.assert_close(computed.float(), expected, rtol=limit, atol=limit)


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> PageLayer:
    return LAYERS[request.param]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("programs", [1, 16] if INTERPRETED else [1, 8, 256])  # one and several splits of the context
def test_rows_that_decode(layer: PageLayer, dtype: torch.dtype, programs: int) -> None:
    """The last tokens of all sequences, and two earlier ones of the longest, as drafts are verified."""
    filled = Filled.fill(layer, dtype)
    longest = len(LENGTHS) - 1
    rows = [(slot, length - 1) for slot, length in enumerate(LENGTHS)]
    rows += [(longest, LENGTHS[longest] - 2), (longest, LENGTHS[longest] // 2)]
    slots, positions = (filled.numbers(column) for column in zip(*rows, strict=True))
    query, out = filled.queries(len(rows)), filled.empty(len(rows))
    tuning = Tuning(TUNING.processors, TUNING.shared, programs=programs)
    launch.decode(
        query, filled.key_pages, filled.value_pages, filled.tables, slots, positions, len(rows), out, SCALING, layer,
        tuning, filled.sinks,
    )  # fmt: skip
    for row, (slot, place) in enumerate(rows):
        filled.check(out[row : row + 1], filled.expected(query[row : row + 1], slot, torch.tensor([place])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("before", [0, 30])
def test_chunks_of_prompts(layer: PageLayer, dtype: torch.dtype, before: int) -> None:
    """All sequences have a chunk behind their first tokens, in one launch; rows in front of the chunks stay."""
    filled = Filled.fill(layer, dtype)
    spans = [(min(before, length - 1), length) for length in LENGTHS]
    described, first = [], 2
    for slot, (start, end) in enumerate(spans):
        described.append((first, end - start, start, slot))
        first += end - start
    query, out = filled.queries(first), filled.empty(first)
    most = max(end - start for start, end in spans)
    launch.chunks(
        query, filled.key_pages, filled.value_pages, filled.tables, filled.numbers(described), most, out, SCALING,
        layer, TUNING, filled.sinks,
    )  # fmt: skip
    assert out[:2].isnan().all()
    for row, count, start, slot in described:
        rows = slice(row, row + count)
        filled.check(out[rows], filled.expected(query[rows], slot, torch.arange(start, start + count)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_of_an_image_see_each_other(layer: PageLayer, dtype: torch.dtype) -> None:
    """Blocks of all lengths: within a tile, across several, next to each other, and up to the end of the chunk."""
    filled = Filled.fill(layer, dtype)
    slot = len(LENGTHS) - 1
    start, end = 3, LENGTHS[slot]
    positions = torch.arange(start, end)
    ends = positions.clone()
    for begin, after in ((5, 6), (9, 40), (40, 47), (end - 20 if INTERPRETED else 300, end)):
        ends[begin - start : after - start] = after - 1
    count = end - start
    query, out = filled.queries(count), filled.empty(count)
    launch.chunks(
        query, filled.key_pages, filled.value_pages, filled.tables, filled.numbers([(0, count, start, slot)]), count,
        out, SCALING, layer, TUNING, filled.sinks, filled.numbers(ends),
    )  # fmt: skip
    filled.check(out, filled.expected(query, slot, positions, ends))


def test_short_chunks_have_tiles_of_few_rows(layer: PageLayer) -> None:
    filled = Filled.fill(layer, torch.float32)
    slot = len(LENGTHS) - 1
    end = LENGTHS[slot]
    query, out = filled.queries(3), filled.empty(3)
    launch.chunks(
        query, filled.key_pages, filled.value_pages, filled.tables, filled.numbers([(0, 3, end - 3, slot)]), 3, out,
        SCALING, layer, TUNING, filled.sinks,
    )  # fmt: skip
    filled.check(out, filled.expected(query, slot, torch.arange(end - 3, end)))


def test_what_is_written_is_in_its_place_and_nothing_else_changes(layer: PageLayer) -> None:
    filled = Filled.fill(layer, torch.float32)
    written = 0
    for slot, length in enumerate(LENGTHS):
        for place in range(length):
            page, line = int(filled.tables[slot, place // layer.page]), place % layer.page
            assert torch.equal(filled.key_pages[page, :, line], filled.keys[slot][place])
            assert torch.equal(filled.value_pages[page, :, line], filled.values[slot][place])
            written += filled.keys[slot][place].numel()
    assert int((~filled.key_pages.isnan()).sum()) == written


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_a_graph_reads_tables_and_lengths_anew() -> None:
    """The context is no shape of a recorded launch: it is recorded for one token and replayed for thousands."""
    filled = Filled.fill(LAYERS["llama_8b"], torch.bfloat16)
    count = len(LENGTHS)
    query, out = filled.queries(count), filled.empty(count)
    slots, positions = filled.numbers([0] * count), filled.numbers([0] * count)
    arguments = (
        query, filled.key_pages, filled.value_pages, filled.tables, slots, positions, count, out, SCALING,
        filled.layer, TUNING,
    )  # fmt: skip
    launch.decode(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.decode(*arguments)
    slots.copy_(torch.arange(count))
    positions.copy_(torch.tensor(LENGTHS) - 1)
    graph.replay()
    for slot, length in enumerate(LENGTHS):
        row = slice(slot, slot + 1)
        filled.check(out[row], filled.expected(query[row], slot, torch.tensor([length - 1])))


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("lengths", [[1024], [1500, 2048]])
def test_cudnn_attends_for_prompts_from_their_first_tokens(lengths: list[int]) -> None:
    layer, dtype = LAYERS["llama_8b"], torch.bfloat16
    terms, total = AttentionTerms(SCALING), sum(lengths) + 3
    projected = torch.randn(total, layer.heads + 2 * layer.kv_heads, layer.dim, device=DEVICE).to(dtype)
    query, key, value = projected.split((layer.heads, layer.kv_heads, layer.kv_heads), 1)
    ends = np.cumsum([3, *lengths]).tolist()
    spans = list(itertools.pairwise(ends))
    assert cudnn.takes(layer, terms, dtype, min(lengths), max(lengths))
    out = torch.full_like(query, torch.nan)
    cudnn.attend(States(query, key, value), spans, terms, out)
    assert out[:3].isnan().all()
    for begin, end in spans:
        states = (part[begin:end].double().transpose(0, 1)[None] for part in (query, key, value))
        exact = functional.scaled_dot_product_attention(*states, is_causal=True, scale=SCALING, enable_gqa=True)
        torch.testing.assert_close(out[begin:end].double(), exact[0].transpose(0, 1), rtol=3e-2, atol=3e-2)
