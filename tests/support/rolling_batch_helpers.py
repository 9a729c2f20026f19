"""A rolling batch over a tiny model, and the untouched model to compare with."""

from __future__ import annotations

import copy
import functools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny_models import CONTEXT, byte_tokenizer

from handlers.checkpoints.blocks.int8_activations import Int8BlockLinear
from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.rolling_batch.cpu.kernel_choice import Crossovers
from handlers.rolling_batch.engine import RollingBatchEngine
from handlers.rolling_batch.lora.layers import LoraWeights
from handlers.rolling_batch.runner.load_check import LoadCheck
from handlers.rolling_batch.runner.model_runner import ModelRunner
from handlers.rolling_batch.schedule.scheduler import Scheduler, SchedulerLimits
from handlers.rolling_batch.speculation.step_times import StepTimes
from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.generation import Delta, SamplingParameters

EOS = 258


def tiles_for_any_rows() -> Crossovers:
    """Return crossovers of a machine on which the project's kernels are the fastest for any number of rows."""
    return Crossovers(seconds=lambda work: 0.0)


def round_any_rows(model: Any) -> None:
    """Have all layers of blocks round the inputs of any number of rows: a load measures the border of its processor."""
    layers = [module for module in model.modules() if isinstance(module, BlockLinear)]
    assert layers
    for layer in layers:
        assert isinstance(layer, Int8BlockLinear)
        layer.limit_exact_rows(1000)


@dataclass
class Received:
    """What one request received: its deltas, or the error that ended it."""

    deltas: list[Delta] = field(default_factory=list)
    error: LmiServerError | None = None

    def take(self, output: Delta | LmiServerError) -> None:
        assert self.error is None, "nothing follows an error"
        assert self.finish_reason is None, "nothing follows the end"
        if isinstance(output, Delta):
            self.deltas.append(output)
        else:
            self.error = output

    @property
    def finish_reason(self) -> str | None:
        return self.deltas[-1].finish_reason if self.deltas else None

    @property
    def tokens(self) -> list[int]:
        return [token.id for delta in self.deltas for token in delta.tokens]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


class GivenStepTimes(StepTimes):
    """Times of steps in which each row takes `row_share` of the time of the first one, whatever is measured."""

    def knows(self, rows: int) -> bool:
        return True

    def observe(self, rows: int, seconds: float) -> None:
        pass


class Engine:
    """A rolling batch engine, and `reference`: the model as transformers computes it."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int = 8,
        kv_tokens: int = 8 * CONTEXT,
        chunk: int = 16,
        reference: Any = None,
        context: int = CONTEXT,
        page: int | None = None,
        kv_dtype: str | None = None,
        check: LoadCheck | None = None,
        **limits: Any,
    ) -> None:
        self.model = model
        self.reference = reference or copy.deepcopy(model)
        self.tokenizer = byte_tokenizer()
        self.runner = runner = ModelRunner(model, context, check=check, page=page, kv_dtype=kv_dtype)
        rows = 0 if runner.states is None else limits.pop("state_rows", 2 * slots)
        kv_tokens -= kv_tokens % (runner.page or 1)
        runner.prepare(2 * slots, context, state_rows=rows, kv_tokens=kv_tokens)
        self.fused = runner.fused
        more = {"state_rows": rows, "page": runner.page, **limits}
        self.scheduler = Scheduler(SchedulerLimits(slots, kv_tokens, chunk, chunk, 2 * slots, **more))
        self.engine = RollingBatchEngine(runner, self.scheduler, self.tokenizer, frozenset({EOS}), context)

    @functools.cached_property
    def _answers(self) -> defaultdict[tuple[int, ...], list[Received]]:
        """What came for each prompt."""
        return defaultdict(list)

    def add(self, prompt: list[int], adapter: LoraWeights | None = None, **parameters: Any) -> tuple[int, Received]:
        """Add a request, whose label is that of every other one; return its number, and what it receives."""
        answer = Received()
        number = self.engine.add("label", prompt, SamplingParameters(**parameters), "", 3, answer.take, adapter)
        self._answers[tuple(prompt)].append(answer)
        return number, answer

    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        while self.engine.has_work:
            self.engine.step()
            after_step()

    def generate(self, prompt: list[int], **parameters: Any) -> Received:
        _, answer = self.add(prompt, **parameters)
        self.run()
        return answer

    def expected(self, prompt: list[int], max_new_tokens: int, **parameters: Any) -> list[int]:
        """Return what transformers generates for the prompt alone."""
        if not parameters:
            for answer in self._answers[tuple(prompt)]:
                if is_generated(self.reference, prompt, answer.tokens, max_new_tokens):
                    return answer.tokens
        return generated(self.reference, prompt, max_new_tokens, **parameters)


# What `generate` reads in a configuration without changing a logit, if it does not sample.
_NEUTRAL = {
    *("_from_model_config", "transformers_version", "use_cache", "do_sample", "temperature", "top_k", "top_p"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "output_attentions"),
    "output_hidden_states",
}


def is_generated(
    model: Any, prompt: list[int], tokens: list[int], max_new_tokens: int, eos: int = EOS, **arguments: Any
) -> bool:
    """Return whether `generated` would return these tokens, by one pass over all of them; False if that is not known.

    `generate` takes a pass for each token, which is most of what a test takes. `arguments` are more of the pass.
    """
    if not may_be_generated(model, tokens, max_new_tokens, eos):
        return False
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False, **arguments).logits[0, -len(tokens) :]
    return bool(logits.argmax(-1).tolist() == tokens)


def may_be_generated(model: Any, tokens: list[int], max_new_tokens: int, eos: int = EOS) -> bool:
    """Return whether the tokens end where `generate` ends, and each is the likeliest one if `generate` returns them."""
    is_whole = len(tokens) == max_new_tokens or (0 < len(tokens) < max_new_tokens and tokens[-1] == eos)
    return is_whole and eos not in tokens[:-1] and model.generation_config.to_diff_dict().keys() <= _NEUTRAL


def generated_like(model: Any, prompt: list[int], tokens: list[int], max_new_tokens: int) -> list[int]:
    """Return what `generated` does, which is quick if it is `tokens`."""
    if is_generated(model, prompt, tokens, max_new_tokens):
        return tokens
    return generated(model, prompt, max_new_tokens)


def generated(model: Any, prompt: list[int], max_new_tokens: int, **parameters: Any) -> list[int]:
    """Return what `model.generate` of transformers adds to the prompt."""
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=0,
        **parameters,
    )
    return out[0, len(prompt) :].tolist()


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(256) for _ in range(chance.choice([1, 2, 7, 16, 17, 40, 90]))] for _ in range(count)]


def check_log_probabilities(exact: Any, asked: Iterable[tuple[list[int], Received]]) -> None:
    """Compare the log probability of each output token with that of the model in float32.

    They are compared along the tokens that came, because rounding may flip a near tie.
    """
    for prompt, answer in asked:
        with torch.inference_mode():
            rows = exact(torch.tensor([[*prompt, *answer.tokens]])).logits[0].log_softmax(-1)
        expected = [float(rows[len(prompt) - 1 + i, token]) for i, token in enumerate(answer.tokens)]
        found = [token.logprob for delta in answer.deltas for token in delta.tokens]
        assert found == pytest.approx(expected, abs=0.25)
