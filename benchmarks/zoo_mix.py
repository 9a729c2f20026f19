"""Serves one model of the zoo under the rolling batch as a busy server would: a part of `benchmarks.zoo`.

`mixed` is for float32: eight requests at a time, twice, in chunks of 16 tokens, with a KV cache that is too small for
all of them and with every third one asked of a LoRA adapter. Every answer has to be that of `generate` alone.

`alike` is for bfloat16, in which sums depend on how many rows are computed together: each text alone, and all in one
batch, greedy and with a seed. A difference counts as a tie where it is within the model's rounding: the logits of the
two tokens move no farther against each other than they do if each module rounds its results to neighbouring numbers.
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.zoo_serving import (
    EXACT,
    NEW_TOKENS,
    RAW,
    SETTINGS,
    WRONG,
    Answer,
    Outcome,
    prompts,
    token_ids,
    until_the_end,
)
from handlers.rolling_batch.attention.kv_cache import bytes_per_token
from handlers.rolling_batch.lora.targets import lora_targets
from handlers.rolling_batch.runner.model_runner import ModelRunner
from lmi_server.configuration.handlers import load
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import LmiServerError, describe
from lmi_server.contract.generation import GenerationRequest, SamplingParameters, Token
from lmi_server.contract.protocol import Adapter
from tests.support.adapter_helpers import save_adapter, with_adapter
from tests.support.tiny_models import CONTEXT

TIES, DIFFERENT = "ties", "different"
_BUSY = {"chunked_prefill_size": "16", "max_rolling_batch_size": "8", "schedule_conservativeness": "0.05"}
_TOKENS = 300  # of the KV cache; the requests have about 600
_GIB = 2**30
_ADAPTER = "adapter"
_ALTERNATIVES, _TOP_K = 256, 10  # a token that rounding moves out of the likeliest ones is still told with them
_TIE = 2.0  # ulps: one for each of the two logits
_DRAWS = 24  # of the model's rounding
_NOT_OF_TEXT = ("model.vision", "model.audio")  # no adapter of the rolling batch changes these
# Linear layers that adapters change, as the families call them; the first names that a model has are taken.
_TARGETS = (
    ("q_proj", "v_proj"), ("query", "value"), ("query_key_value",), ("qkv_proj",), ("Wqkv",), ("c_attn",),
    ("q_b_proj",), ("q_lin",), ("qkv",), ("in_proj",), ("out_proj",), ("o_proj",), ("fc1",), ("up_proj",), ("key",),
)  # fmt: skip


@dataclass(frozen=True)
class _Asked:
    text: str
    sampling: SamplingParameters
    adapter: str | None = None


class _Served:
    """A model under the rolling batch, until the end of the block."""

    def __init__(self, directory: Path, options: Mapping[str, str]) -> None:
        asked = {f"option.{name}": value for name, value in {**SETTINGS, **_BUSY, **options}.items()}
        self._model = inspect_model(directory, {}, {**asked, "option.rolling_batch": "scheduler"}).resolved()
        os.environ.update(self._model.worker_environment)
        handler: Any = load(self._model.handler)
        self._handler = handler()
        self.retracted = self.reused = 0

    async def __aenter__(self) -> _Served:
        await self._handler.start(self._model.model_dir, self._model.options)
        return self

    async def __aexit__(self, *error: object) -> None:
        stats = self._handler.stats()
        self.retracted = int(stats["retracted_requests_total"])
        self.reused = int(stats["cached_prompt_tokens_total"])
        await self._handler.stop()

    async def add_adapter(self, directory: Path) -> None:
        await self._handler.add_adapter(Adapter(name=_ADAPTER, directory=str(directory)))

    async def together(self, asked: list[_Asked]) -> list[list[Token]]:
        return list(await asyncio.gather(*(self.one(number, each) for number, each in enumerate(asked))))

    async def one(self, number: int, asked: _Asked) -> list[Token]:
        request = GenerationRequest(
            request_id=str(number), prompt=asked.text, sampling=asked.sampling, adapter=asked.adapter
        )
        return [token async for delta in self._handler.generate(request) for token in delta.tokens]


# --- float32: among others, retracted, in chunks, from prefixes, with adapters ---


def mixed(directory: Path, model: Any, right: Sequence[Answer], generated: Callable[[Any, str], Answer]) -> Outcome:
    """Compare the answers of a busy server with `right`, and with what `generated` returns for a model with an adapter.

    Some models keep the state of their last text, and begin a text of one token with it: `right` is of a new model.
    """

    async def compared() -> Outcome:
        saved = _saved_adapter(copy.deepcopy(model), directory / _ADAPTER)
        adapted = None if saved is None else with_adapter(model, saved)
        expected = [
            generated(adapted, text) if adapted is not None and number % 3 == 2 else right[number]
            for number, text in enumerate(prompts())
        ]
        return await _mixed(directory, model, saved, expected)

    return _outcome(compared())


def _outcome(compared: Coroutine[Any, Any, Outcome]) -> Outcome:
    try:
        return asyncio.run(compared)
    except LmiServerError as error:
        return Outcome("scheduler", RAW, error.message)
    except Exception as error:  # noqa: BLE001 - the border to the code of any model
        return Outcome("scheduler", RAW, describe(error))


def _saved_adapter(model: Any, directory: Path) -> Path | None:
    """Save an adapter for the first known layers of the model; None if it has none of them."""
    layers = [name for name in lora_targets(model) if not name.startswith(_NOT_OF_TEXT)]
    found = {name.rpartition(".")[2] for name in layers}
    targets = next((names for names in _TARGETS if found.issuperset(names)), None)
    if targets is None:
        return None
    return save_adapter(model, directory, target_modules=[name for name in layers if name.endswith(targets)])


async def _mixed(directory: Path, model: Any, adapter: Path | None, right: list[Answer]) -> Outcome:
    runner = ModelRunner(copy.deepcopy(model), CONTEXT)
    small = _TOKENS * bytes_per_token(runner.layers, torch.float32)
    states = 0 if runner.states is None else runner.states.bytes_per_sequence
    # With room for no snapshots of states, and then with some.
    memory = [small + 8 * states] + ([] if not states else [2 * small + 64 * states])
    retracted = reused = 0
    wrong: set[int] = set()
    for size in memory:
        served = _Served(directory, {"kv_cache_memory_gb": repr(max(size, 1) / _GIB), "enable_lora": "true"})
        async with served:
            if adapter is not None:
                await served.add_adapter(adapter)
            sampling = SamplingParameters(max_new_tokens=NEW_TOKENS, logprobs=0)
            asked = [
                _Asked(text, sampling, None if adapter is None or number % 3 != 2 else _ADAPTER)
                for number, text in enumerate(prompts())
            ]
            for _ in range(2):
                answers = await served.together(asked)
                wrong.update(place for place, got in enumerate(answers) if not _answer(got).same_as(right[place]))
        retracted, reused = retracted + served.retracted, reused + served.reused
    done = f"{retracted} retracted, {reused} tokens reused, {'an' if adapter else 'no'} adapter"
    return Outcome("scheduler", WRONG if wrong else EXACT, f"prompts {sorted(wrong)}; {done}" if wrong else done)


def _answer(tokens: list[Token]) -> Answer:
    return until_the_end([token.id for token in tokens], [token.logprob or 0.0 for token in tokens])


# --- bfloat16: alone and in a batch ---


@dataclass(frozen=True)
class _Difference:
    """Where two answers to the same request part: the tokens, and how far their logits moved against each other."""

    place: int
    tokens: tuple[int, int]
    moved: float | None  # None: a token is not among the likeliest ones of both


def alike(directory: Path, model: Any) -> Outcome:
    """Compare the answers to each text alone with those in a batch, in bfloat16."""
    return _outcome(_alike(directory, model))


async def _alike(directory: Path, model: Any) -> Outcome:
    seeded = {"do_sample": True, "temperature": 0.8, "top_k": _TOP_K, "seed": 7}
    common = {"max_new_tokens": NEW_TOKENS, "logprobs": _ALTERNATIVES}
    ways: list[dict[str, Any]] = [common, {**common, **seeded}]
    asked = [_Asked(text, SamplingParameters(**way)) for text in prompts() for way in ways]
    options = {"dtype": "bf16", "max_rolling_batch_size": "16"}
    async with _Served(directory, options) as served:
        together = await served.together(asked)
    async with _Served(directory, options) as served:
        alone = [await served.one(number, each) for number, each in enumerate(asked)]
    reference = copy.deepcopy(model).bfloat16()
    said = []
    ties = True
    for each, one, other in zip(asked, alone, together, strict=True):
        difference = _difference(one, other)
        if difference is None:
            continue
        kind = "seeded" if each.sampling.do_sample else "greedy"
        distance = "unknown"
        tie = False
        if difference.moved is not None:
            ulp, rounding = _rounding(reference, each.text, one, difference)
            tie = difference.moved <= max(_TIE * ulp, rounding)
            distance = f"{difference.moved / ulp:.1f} of {rounding / ulp:.1f} ulps"
        ties = ties and tie
        said.append(f"{kind}, prompt of {len(each.text)}, token {difference.place}: {distance}")
    if not said:
        return Outcome("scheduler", EXACT)
    return Outcome("scheduler", TIES if ties else DIFFERENT, f"{len(said)} of {len(asked)}: " + "; ".join(said))


def _difference(one: list[Token], other: list[Token]) -> _Difference | None:
    """Return where two answers part; None if they are the same."""
    for place, (first, second) in enumerate(zip(one, other, strict=False)):
        if first.id != second.id:
            moved = list(_distances(first, second))
            return _Difference(place, (first.id, second.id), abs(moved[0] - moved[1]) if len(moved) == 2 else None)
    return None if len(one) == len(other) else _Difference(min(len(one), len(other)), (-1, -1), None)


def _distances(first: Token, second: Token) -> Iterator[float]:
    """Yield, for each of two runs, the distance of the logits of both tokens."""
    for token in (first, second):
        known = {top.id: top.logprob for top in token.top} | {token.id: token.logprob}
        one, other = known.get(first.id), known.get(second.id)
        if one is not None and other is not None:
            yield one - other


def _rounding(model: Any, text: str, tokens: list[Token], difference: _Difference) -> tuple[float, float]:
    """Return the distance of neighbouring numbers in bfloat16 about the larger logit of two tokens, and their rounding.

    The rounding is how far both logits lie apart against each other, at most, in two of some runs in which every module
    with parameters moves each of its results to a neighbouring number or leaves it: what another order of a sum may do.
    """
    ids = torch.tensor([[*token_ids(text), *(token.id for token in tokens[: difference.place])]])
    chance = torch.Generator().manual_seed(1)
    moved = False

    def move(_module: Any, _inputs: Any, output: Any) -> Any:
        if not moved:
            return output
        if isinstance(output, tuple):
            return (_to_neighbours(output[0], chance), *output[1:])
        return _to_neighbours(output, chance)

    hooks = [module.register_forward_hook(move) for module in model.modules() if _computes(module)]
    try:
        with torch.inference_mode():
            first, second = (float(logit) for logit in _logits(model, ids, difference.tokens))
            moved = True
            runs = [_logits(model, ids, difference.tokens) for _ in range(_DRAWS)]
    finally:
        for hook in hooks:
            hook.remove()
    largest = max(abs(first), abs(second), 2.0**-60)
    distances = [first - second, *(float(one - other) for one, other in runs)]
    return 2.0 ** (math.floor(math.log2(largest)) - 7), max(distances) - min(distances)


def _computes(module: torch.nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False)) and not isinstance(module, torch.nn.Embedding)


def _logits(model: Any, ids: torch.Tensor, tokens: tuple[int, int]) -> torch.Tensor:
    return torch.as_tensor(model(ids, use_cache=False).logits[0, -1, list(tokens)]).float()


def _to_neighbours(values: Any, chance: torch.Generator) -> Any:
    if not isinstance(values, torch.Tensor) or values.dtype is not torch.bfloat16:
        return values
    steps = torch.randint(-1, 2, values.shape, generator=chance, dtype=torch.int16)
    stepped = (values.contiguous().view(torch.int16) + steps).view(torch.bfloat16)
    return torch.where((values == 0) | ~stepped.isfinite(), values, stepped)
