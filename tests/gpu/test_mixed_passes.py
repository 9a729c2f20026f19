"""Attention of recorded steps with prompts: the kernels over fixed grids compute what torch's operators do.

On a GPU by NVIDIA real graphs are recorded; with TRITON_INTERPRET=1 the same launches run in Triton's interpreter.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = False
if not torch.cuda.is_available():
    knobs = pytest.importorskip("triton", reason="needs Triton").knobs
    INTERPRETED = bool(knobs.runtime.interpret)
    if not INTERPRETED:
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from adapter_helpers import read_adapter, save_adapter, with_adapter  # noqa: E402
from rolling_batch_helpers import Engine, generated, prompts  # noqa: E402
from tiny_models import tiny_model  # noqa: E402

from handlers.rolling_batch.attention.decode_passes import CudaCapture, run_once  # noqa: E402
from handlers.rolling_batch.attention.kv_cache import LayerShape  # noqa: E402
from handlers.rolling_batch.attention.rows import ChunkRows, StepRows  # noqa: E402
from handlers.rolling_batch.attention.terms import AttentionTerms, States  # noqa: E402
from handlers.rolling_batch.pages import mixed_passes  # noqa: E402
from handlers.rolling_batch.pages.cache import PagedCache  # noqa: E402
from handlers.rolling_batch.pages.mixed_passes import MixedPasses  # noqa: E402
from handlers.rolling_batch.pages.rows import PageRows  # noqa: E402
from handlers.rolling_batch.pages.torch_pages import TorchPages  # noqa: E402
from handlers.rolling_batch.pages.triton_pages import TritonPages  # noqa: E402
from handlers.rolling_batch.schedule.page_table import PagesAdded, PageStep  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda", None if INTERPRETED else 0)
SEQUENCES, PAGE = 4, 16
MAX_LEN = 96 if INTERPRETED else 1024
LONG = 20 if INTERPRETED else 150  # tokens of a chunk
TOKENS = 50
TERMS = {
    "plain": AttentionTerms(0.2),
    "window": AttentionTerms(0.2, window=21),
    "chunk": AttentionTerms(0.2, chunk=24),
    "soft_cap_and_sinks": AttentionTerms(0.2, softcap=5.0, sinks=torch.linspace(-1, 1, 4, device=DEVICE)),
}


class OneLayer:
    """Attention alone over a cache of its own: queries, keys and values follow from a token and its position."""

    def __init__(self, kind: Any, terms: AttentionTerms) -> None:
        pages = SEQUENCES * MAX_LEN // PAGE
        self.cache = PagedCache([LayerShape(2, 32, 32, DEVICE)], SEQUENCES, MAX_LEN, pages * PAGE, PAGE, torch.float32)
        each = MAX_LEN // PAGE
        self.cache.apply(
            PageStep([PagesAdded(slot, 0, list(range(slot * each, (slot + 1) * each))) for slot in range(SEQUENCES)])
        )
        self._operators, self._terms = kind(self.cache), terms
        self.attended: dict[int, torch.Tensor] = {}  # by number of rows
        chance = torch.Generator().manual_seed(0)
        self._states = torch.randn(TOKENS, 8, 32, generator=chance).to(DEVICE)

    def __call__(self, ids: torch.Tensor, places: torch.Tensor, rows: PageRows, keep: torch.Tensor) -> torch.Tensor:
        states = (self._states[ids] * torch.cos(places * 0.1)[:, None, None]).transpose(0, 1)
        parts = States(*states.split((4, 2, 2)))
        out = rows.empty_or_zero(states, (states.shape[1], 4, 32))
        self._operators.attend(0, parts, rows, out, self._terms)
        self.attended[len(ids)] = out
        return out[keep].flatten(1)


def steps() -> list[tuple[list[int], list[ChunkRows], dict[int, int]]]:
    """Return the slots that decode and the chunks of some steps, with how many tokens each slot has before."""
    plans = [
        ([], [(0, LONG)]),
        ([0], [(1, 3)]),
        ([0, 1], [(2, LONG), (3, 17)]),
        ([1, 0], [(2, 5)]),
        ([0, 1, 2, 3], []),
        ([3], [(2, 2), (0, 16), (1, 1)]),
    ]
    lengths = dict.fromkeys(range(SEQUENCES), 0)
    found = []
    for slots, chunks in plans:
        before, first, rows = dict(lengths), len(slots), []
        for slot in slots:
            lengths[slot] += 1
        for slot, count in chunks:
            rows.append(ChunkRows(slot, lengths[slot], lengths[slot] + count, first, first + count, slot))
            lengths[slot] += count
            first += count
        found.append((slots, rows, before))
    return found


@pytest.mark.parametrize("name", TERMS)
def test_rows_of_both_kinds_attend_in_passes_of_fixed_shape(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_passes, "MAX_ROWS", 64 if INTERPRETED else 256)
    if INTERPRETED:
        monkeypatch.setattr(mixed_passes, "_PIECE", 16)
    recorded, eager = OneLayer(TritonPages, TERMS[name]), OneLayer(TorchPages, TERMS[name])
    capture = run_once if INTERPRETED else CudaCapture()
    passes = MixedPasses(recorded, recorded.cache, SEQUENCES, mixed_passes.row_counts(), DEVICE, capture)
    chance = random.Random(0)
    for slots, chunks, before in steps():
        positions = [before[slot] for slot in slots]
        rows = StepRows(np.array(slots, np.int64), np.array(positions, np.int64), chunks)
        places = [*positions, *(place for chunk in chunks for place in range(chunk.start, chunk.end))]
        ids = [chance.randrange(TOKENS) for _ in places]
        keep = list(range(len(places)))[-SEQUENCES:][::-1]
        assert passes.takes(len(slots), chunks, len(keep))
        computed = passes.logits(ids, places, slots, chunks, keep, None)
        attended = recorded.attended[next(rows for rows in mixed_passes.row_counts() if rows >= len(places))]
        assert not attended[len(places) :].any(), "rows that fill up a pass attend to nothing"
        numbers = [torch.tensor(part, device=DEVICE) for part in (ids, places, keep)]
        with torch.inference_mode():
            expected = eager(*numbers[:2], PageRows.from_step(rows, DEVICE), numbers[2])
        torch.testing.assert_close(computed, expected, rtol=5e-5, atol=5e-5)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "gemma2_with_soft_caps", "mistral_with_window"])
@pytest.mark.parametrize("adapted", [False, True])
def test_prompts_that_keep_arriving_get_the_tokens_of_the_cpu(family: str, adapted: bool, tmp_path: Path) -> None:
    reference = tiny_model(family)
    engine = Engine(copy.deepcopy(reference).to("cuda"), slots=6, reference=reference, chunk=64)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        assert engine.runner.capture(6, CudaCapture) == 4
        assert engine.runner._recorded.mixed is not None  # type: ignore[union-attr]
        engine.engine.run_ahead()
        models, adapters, asked = [reference], [None], []
        if adapted:
            directory = save_adapter(reference, tmp_path / "adapter", 1)
            adapters.append(engine.engine.load_adapter(read_adapter(str(directory))))
            models.append(with_adapter(reference, directory))
        for number, prompt in enumerate(prompts(9, seed=3)):
            own = number % len(models)
            asked.append((models[own], prompt, engine.add(prompt, adapter=adapters[own], max_new_tokens=8)[1]))
            engine.engine.step()
            engine.engine.step()
        engine.run()
    finally:
        torch.set_float32_matmul_precision(before)
    for model, prompt, answer in asked:
        assert answer.tokens == generated(model, prompt, 8), answer.error
