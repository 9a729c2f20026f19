"""Compiled shapes (padded batches and prompts) give the tokens that transformers generates for each prompt alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from rolling_batch_helpers import EOS, Received, generated_like
from static_graphs import Graphs
from tiny_models import byte_tokenizer, tiny_model

from handlers.rolling_batch.engine import RollingBatchEngine
from handlers.rolling_batch.runner.bucket_runner import AlignedRunner, LineRunner
from handlers.rolling_batch.schedule.scheduler import Scheduler, SchedulerLimits
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import SamplingParameters

LENGTH = 64
ROWS = 3


class Lines:
    """A Llama whose graphs take these shapes and no other."""

    vocabulary = 259
    lines = ROWS

    def __init__(self, model: Any, prompt_buckets: tuple[int, ...]) -> None:
        self.prompt_buckets = prompt_buckets
        self._graphs = Graphs(model, ROWS, LENGTH)

    def prefill(self, token_ids: torch.Tensor, length: int, line: int) -> torch.Tensor:
        assert token_ids.shape[0] == 1
        assert token_ids.shape[1] in self.prompt_buckets
        positions = torch.arange(token_ids.shape[1]).unsqueeze(0)
        return self._graphs.compute(token_ids, positions, torch.tensor([line]))[0, length - 1]

    def decode(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert token_ids.shape == positions.shape == (ROWS, 1)
        return self._graphs.compute(token_ids, positions, torch.arange(ROWS))[:, -1]


class Rows:
    """A GPT-2 whose rows are all at one column."""

    vocabulary = 259
    rows = ROWS
    max_len = LENGTH

    def __init__(self, model: Any) -> None:
        self._graphs = Graphs(model, ROWS, LENGTH)

    def prefill(self, token_ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(token_ids.shape[1]).expand(ROWS, -1)
        return self._graphs.compute(token_ids, columns, torch.arange(ROWS), starts)[:, -1]

    def decode(self, token_ids: torch.Tensor, column: int, starts: torch.Tensor) -> torch.Tensor:
        return self._graphs.compute(token_ids, torch.full((ROWS, 1), column), torch.arange(ROWS), starts)[:, -1]


def engine_of(runner: LineRunner | AlignedRunner, bucket: int) -> RollingBatchEngine:
    room = ROWS * LENGTH
    scheduler = Scheduler(SchedulerLimits(ROWS, room, room, room, policy="fcfs", prompt_bucket=bucket))
    return RollingBatchEngine(runner, scheduler, byte_tokenizer(), frozenset({EOS}), LENGTH)


def requests() -> list[tuple[list[int], int]]:
    """Return prompts of 1 token up to more than the longest bucket, with output up to the last position."""
    chance = random.Random(3)
    lengths = [1, 2, 8, 9, 16, 17, 23, 40, 1, 63, 5, 30]
    return [
        ([chance.randrange(256) for _ in range(length)], min(chance.choice([1, 4, 12, 60]), LENGTH - length))
        for length in lengths
    ]


def run(engine: RollingBatchEngine, model: Any) -> None:
    """Add requests one by one between steps, abort one, and compare every output with that of transformers."""
    waiting = [(index, *request) for index, request in enumerate(requests())]
    answers = {index: Received() for index, *_ in waiting}
    pending = list(waiting)
    gone = engine.add("label", [1, 2, 3], SamplingParameters(max_new_tokens=50), "", 3, lambda output: None)
    while pending or engine.has_work:
        if pending:
            index, prompt, count = pending.pop(0)
            engine.add("label", prompt, SamplingParameters(max_new_tokens=count), "", 3, answers[index].take)
        engine.step()
        if len(pending) == 9:
            engine.abort(gone)
    for index, prompt, count in waiting:
        tokens = answers[index].tokens
        assert tokens == generated_like(model, prompt, tokens, count), index


@pytest.mark.parametrize("buckets", [(8, 16, LENGTH), (8, 16)])
def test_padded_lines_generate_what_transformers_does(buckets: tuple[int, ...]) -> None:
    """Without a bucket for the longest prompts, their ends are computed token by token beside the others."""
    model = tiny_model("llama")
    run(engine_of(LineRunner(Lines(model, buckets)), buckets[-1]), model)


@pytest.mark.slow
def test_rows_at_one_column_generate_what_transformers_does() -> None:
    model = tiny_model("gpt2")
    run(engine_of(AlignedRunner(Rows(model)), LENGTH), model)


def test_an_abort_frees_its_line_for_the_next_step() -> None:
    engine = engine_of(LineRunner(Lines(tiny_model("llama"), (8,))), 8)
    answers = [Received() for _ in range(ROWS + 1)]
    parameters = SamplingParameters(max_new_tokens=20, ignore_eos=True)
    numbers = [
        engine.add("label", [place, 1, 2], parameters, "", 3, answer.take) for place, answer in enumerate(answers)
    ]
    engine.step()
    assert [len(answer.tokens) for answer in answers] == [1, 1, 1, 0]
    engine.abort(numbers[1])
    engine.step()
    assert [len(answer.tokens) for answer in answers] == [2, 1, 2, 1]


def test_what_graphs_do_not_return_is_refused() -> None:
    engine = engine_of(LineRunner(Lines(tiny_model("llama"), (8,))), 8)
    with pytest.raises(RequestError, match="decoder_input_details"):
        engine.add("1", [1, 2], SamplingParameters(prompt_logprobs=0), "", 3, lambda output: None)
    with pytest.raises(RequestError, match="merge the adapter"):
        engine.check_adapter({})
    assert not engine.has_work
