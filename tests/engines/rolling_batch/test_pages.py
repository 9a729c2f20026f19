"""The rolling batch over pages, on the CPU with torch's operators: it gives the tokens of transformers and of slots."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rolling_batch_helpers import EOS, Engine, GivenStepTimes, Received, prompts
from tiny_models import CONTEXT, FAMILIES, byte_tokenizer, tiny_model

from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.attention.decode_passes import close_row_counts, run_once
from handlers.rolling_batch.attention.kv_cache import LayerShape
from handlers.rolling_batch.engine_loading import LoadedModel, load_engine
from handlers.rolling_batch.pages import mixed_passes
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.pages.choice import page_size
from handlers.rolling_batch.runner.step_messages import Pass, decode, encode
from handlers.rolling_batch.schedule.page_table import PageCopy, PagesAdded, PageStep, PageTable
from handlers.rolling_batch.speculation.drafting import Speculation
from lmi_server.contract.errors import ModelMemoryError

PAGE = 8


def check(engine: Engine) -> None:
    table = engine.scheduler.slots
    assert isinstance(table, PageTable)
    table.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_generates_over_pages_what_transformers_does(family: str) -> None:
    engine = Engine(tiny_model(family), page=PAGE)
    asked = [(prompt, engine.add(prompt, max_new_tokens=10)[1]) for prompt in prompts(8)]
    engine.run(lambda: check(engine))
    for prompt, answer in asked:
        assert answer.tokens == engine.expected(prompt, 10), answer.error


def test_requests_share_pages_and_go_on_in_copies() -> None:
    engine = Engine(tiny_model("llama"), page=PAGE, kv_tokens=30 * PAGE)
    common = [place * 7 % 200 for place in range(45)]
    first = engine.generate(common, max_new_tokens=6)
    assert first.tokens == engine.expected(common, 6)
    asked = [([*common, number], engine.add([*common, number], max_new_tokens=12)[1]) for number in range(6)]
    engine.run(lambda: check(engine))
    for prompt, answer in asked:
        assert answer.tokens == engine.expected(prompt, 12)
    assert engine.engine.stats.cached_prompt_tokens == 6 * 45


@pytest.mark.slow
def test_a_full_cache_retracts_and_evicts_and_changes_no_token() -> None:
    engine = Engine(tiny_model("llama"), page=PAGE, kv_tokens=20 * PAGE, conservativeness=0.05)
    asked = [(prompt, engine.add(prompt, max_new_tokens=30)[1]) for prompt in prompts(12, seed=5)]
    engine.run(lambda: check(engine))
    for prompt, answer in asked:
        assert answer.tokens == engine.expected(prompt, 30)
    assert engine.engine.stats.retracted_requests


def test_drafts_over_pages_change_no_token() -> None:
    model = tiny_model("llama")
    with torch.no_grad():  # few tokens are left, so that outputs repeat themselves and drafts are right
        model.lm_head.weight[180:256] *= 0.2
    engine = Engine(model, page=PAGE)
    engine.engine.speculate(Speculation(4, GivenStepTimes(0.0)))
    asked = [(prompt, engine.add(prompt, max_new_tokens=40)[1]) for prompt in prompts(4, seed=2)]
    engine.run(lambda: check(engine))
    for prompt, answer in asked:
        assert answer.tokens == engine.expected(prompt, 40)
    assert engine.engine.stats.accepted_tokens


@pytest.mark.slow
def test_recorded_passes_take_no_columns_and_fill_up_with_the_idle_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_once` records nothing, so that each pass reads its buffers anew, as a graph does."""
    monkeypatch.setattr(mixed_passes, "MAX_ROWS", 64)  # a step has up to 23
    engine = Engine(tiny_model("llama"), page=PAGE)
    engine.runner.uncapturable = lambda: None  # type: ignore[method-assign]  # it would say that this is no GPU
    assert engine.runner.capture(8, lambda: run_once) == len(close_row_counts(8)) == 4
    idle = engine.runner.cache.keys[0][-1].fill_(77)
    asked = [(prompt, engine.add(prompt, max_new_tokens=30)[1]) for prompt in prompts(7)]
    engine.run(lambda: check(engine))
    for prompt, answer in asked:
        assert answer.tokens == engine.expected(prompt, 30)
    assert (idle[:, 0] != 77).all(), "seven rows in a pass of eight: one wrote there"
    assert (idle[:, PAGE - 1] != 77).all(), "passes with prompts fill up at another place"
    assert (idle[:, 1 : PAGE - 1] == 77).all()


@pytest.mark.slow
def test_decoding_over_pages_compiles_as_a_whole() -> None:
    """The launches of a layer are one operation to the compiler, whatever is compiled around it.

    In float16 no other kernels of this project are in the way.
    """
    engine, eager = (Engine(tiny_model("llama", torch.float16), page=PAGE) for _ in range(2))

    def compiler(step: Any) -> Any:
        return torch.compile(step.__call__, fullgraph=True, dynamic=True, backend="aot_eager")

    engine.runner._uncompilable = lambda: None  # type: ignore[method-assign]
    assert engine.runner.compile(4, compiler)
    for prompt in prompts(4):
        assert engine.generate(prompt, max_new_tokens=8).tokens == eager.generate(prompt, max_new_tokens=8).tokens


def test_row_counts_grow_in_steps() -> None:
    assert close_row_counts(1) == [1]
    assert close_row_counts(6) == [1, 2, 4, 6]
    assert close_row_counts(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert close_row_counts(200)[-4:] == [128, 160, 192, 200]


def test_a_step_travels_to_other_ranks_with_its_pages() -> None:
    pages = PageStep([PagesAdded(3, 1, [7, 9])], [PageCopy(1, 2)])
    step = Pass([1], [5], [3], [], [0], [], [], pages=pages)
    assert decode(encode(step)).pages == pages


def test_copies_of_a_step_are_made_at_once() -> None:
    """A page that is copied may itself be the target of another copy."""
    cache = PagedCache([LayerShape(1, 2, 2)], 2, 16, 4 * PAGE, PAGE, torch.float32)
    for page in range(4):
        cache.keys[0][page] = page
    cache.apply(PageStep([PagesAdded(1, 0, [2]), PagesAdded(0, 1, [3])], [PageCopy(0, 1), PageCopy(1, 2)]))
    assert [int(cache.keys[0][page, 0, 0, 0]) for page in range(4)] == [0, 0, 1, 3]
    idle = cache.pages
    assert cache.tables[torch.device("cpu")].tolist() == [[idle, 3], [2, idle], [idle, idle]]


def test_the_processor_keeps_slots() -> None:
    assert page_size([LayerShape(2, 64, 64)], torch.bfloat16) == 0
    assert page_size([LayerShape(2, 64, 64, torch.device("meta"))], torch.bfloat16) == 0


def load(**options: Any) -> Any:
    given = HuggingFaceOptions(dtype="fp32", **options)
    model = tiny_model("llama")
    return load_engine(
        lambda: LoadedModel(model, byte_tokenizer(), given.max_model_len or CONTEXT, {}, page=PAGE), given
    )


def test_the_capacity_of_an_engine_is_tokens_not_slots_of_whole_contexts() -> None:
    per_token = 2 * 2 * 2 * 16 * 4
    tokens = 3 * CONTEXT
    loaded = load(kv_cache_memory_gb=(tokens + 3) * per_token / 2**30, max_rolling_batch_size=16)
    assert loaded.kv_tokens == tokens // PAGE * PAGE
    assert loaded.max_model_len == CONTEXT
    assert loaded.details["kv_cache_page"] == PAGE


def test_a_context_that_pages_cannot_hold_is_refused_by_name() -> None:
    small = 40 * 2 * 2 * 2 * 16 * 4 / 2**30
    assert load(kv_cache_memory_gb=small).max_model_len == 40
    with pytest.raises(ModelMemoryError, match=r"room for 40 tokens, and a request may have 100; lower option\.m"):
        load(kv_cache_memory_gb=small, max_model_len=100)


ASKS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which prompt it begins with
        st.integers(0, 40),  # how many tokens of it
        st.integers(1, 6),  # tokens of its own
        st.integers(1, 14),  # tokens to generate
        st.integers(0, 6),  # steps before the next one comes
        st.booleans(),  # whether it is aborted then
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(asks=ASKS, kv_pages=st.integers(8, 24), chunk=st.sampled_from([3, 16, 64]), page=st.sampled_from([4, 8, 16]))
def test_slots_and_pages_give_the_same_tokens(
    asks: list[tuple[int, int, int, int, int, bool]], kv_pages: int, chunk: int, page: int
) -> None:
    chance = random.Random(0)
    bases = [[chance.randrange(EOS) for _ in range(40)] for _ in range(3)]
    model = tiny_model("llama")
    limits: dict[str, Any] = {"kv_tokens": kv_pages * 8, "chunk": chunk, "conservativeness": 0.1, "slots": 4}
    over_slots = answers(Engine(copy.deepcopy(model), reference=model, page=0, **limits), asks, bases)
    engine = Engine(copy.deepcopy(model), reference=model, page=page, **limits)
    over_pages = answers(engine, asks, bases)
    for ask, slots, pages in zip(asks, over_slots, over_pages, strict=True):
        aborted = ask[-1]
        common = min(len(slots.tokens), len(pages.tokens)) if aborted else None
        assert slots.tokens[:common] == pages.tokens[:common]
    table = engine.scheduler.slots
    table.forget(None)
    assert table.cached_tokens == 0
    assert table.room * page == table.kv_tokens


def answers(engine: Engine, asks: list[Any], bases: list[list[int]]) -> list[Received]:
    """Return what the requests get; some are aborted."""
    received = []
    for number, (base, shared, own, new, steps, aborted) in enumerate(asks):
        identity, answer = engine.add([*bases[base][:shared], *[number] * own], max_new_tokens=new)
        received.append(answer)
        for _ in range(steps):
            if engine.engine.has_work:
                engine.engine.step()
        if aborted:
            engine.engine.abort(identity)
    engine.run(lambda: check(engine) if engine.runner.page else None)
    return received
