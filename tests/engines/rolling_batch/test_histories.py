"""Penalties from histories that stay on the device: as from scratch, also in a row that another request had."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from handlers.rolling_batch.device_arrays import unknown_token
from handlers.rolling_batch.sampling import histories as histories_module
from handlers.rolling_batch.sampling.histories import DeviceHistories
from handlers.rolling_batch.sampling.penalties import penalise
from handlers.rolling_batch.sampling.state import SamplingState
from lmi_server.contract.generation import SamplingParameters

VOCABULARY = 50
KINDS: tuple[dict[str, float], ...] = (
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.8},
    {"frequency_penalty": -0.3},
    {"repetition_penalty": 0.7, "presence_penalty": -0.5, "frequency_penalty": 0.25},
    {},
)


class Request:
    """A request with its own count of what it has seen: `prompt` and `output` are known at once."""

    def __init__(self, chance: random.Random) -> None:
        self.prompt = [chance.randrange(VOCABULARY) for _ in range(chance.choice((1, 3, 40, 90)))]
        self.output: list[int] = []
        self.state = SamplingState(SamplingParameters(**chance.choice(KINDS)), self.prompt)
        self._untold: list[int] = []  # tokens that the state does not know yet

    def draw(self, row: int, token: int) -> None:
        self.state.advance(unknown_token(row))
        self.output.append(token)
        self._untold.append(token)

    def tell(self, but: int = 0) -> None:
        """Tell the state its tokens, but for the last ones."""
        while len(self._untold) > but:
            self.state.settle(self._untold.pop(0))

    def expected(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the penalties by their definition, token by token."""
        own, row = self.state.parameters, logits.tolist()
        for token in {*self.prompt, *self.output}:
            row[token] = row[token] * own.repetition_penalty if row[token] < 0 else row[token] / own.repetition_penalty
        for token, count in Counter(self.output).items():
            row[token] -= own.presence_penalty + count * own.frequency_penalty
        return torch.tensor(row)


def step(requests: list[Request], histories: DeviceHistories, chance: random.Random, before: Any) -> torch.Tensor:
    """Check the penalties of a step, and draw a token for each request; return the tokens as the device has them."""
    logits = torch.randn(len(requests), VOCABULARY, generator=torch.Generator().manual_seed(chance.randrange(2**30)))
    expected = torch.stack([request.expected(row) for request, row in zip(requests, logits, strict=True)])
    penalise(logits, [request.state for request in requests], before, histories)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    tokens = [chance.randrange(VOCABULARY) for _ in requests]
    for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
        request.draw(row, token)
    return torch.tensor(tokens)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ahead", [False, True])
def test_requests_that_come_pause_and_end_are_penalised_by_their_own_tokens(seed: int, ahead: bool) -> None:
    """A request that pauses was retracted. One that ends may have had a step behind its end."""
    chance, histories = random.Random(seed), DeviceHistories()
    running: list[Request] = []
    paused: list[Request] = []
    flight: tuple[list[Request], torch.Tensor] | None = None
    for _ in range(60):
        if chance.random() < 0.3 and len(running) < 6:
            running.append(Request(chance))
        if paused and chance.random() < 0.3:
            running.append(paused.pop())
        if not running:
            for request in flight[0] if flight else ():
                request.tell()
            flight = None
            continue
        chance.shuffle(running)
        before, launched = flight, list(running)
        tokens = step(launched, histories, chance, None if before is None else before[1])
        if before is not None:  # what it had is told behind the launch of the next step
            for request in before[0]:
                request.tell(but=int(request in launched))
        if not ahead:
            for request in launched:
                request.tell()
        flight = (launched, tokens) if ahead else None
        if running and chance.random() < 0.2:
            running.pop()
        if running and chance.random() < 0.2:
            paused.append(running.pop())


def known(chance: random.Random, **parameters: float) -> Request:
    request = Request(chance)
    request.prompt = [1, 2, 3]
    request.state = SamplingState(SamplingParameters(**parameters), request.prompt)
    return request


def test_a_token_behind_the_end_of_a_request_does_not_count_for_the_next_one() -> None:
    """The first request ends while its next step runs: that one's token is in the row that the second gets."""
    chance, histories = random.Random(1), DeviceHistories()
    first = known(chance, frequency_penalty=1.0, repetition_penalty=2.0)
    tokens = step([first], histories, chance, None)
    late = step([first], histories, chance, tokens)
    step([first], histories, chance, late)
    room = histories.shape
    del first
    seconds = [known(chance, frequency_penalty=0.5) for _ in range(room[0])]
    tokens = step(seconds, histories, chance, None)
    step(seconds, histories, chance, tokens)
    assert histories.shape == room, "rows are used again"


def test_tokens_that_an_error_kept_from_being_written_are_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, histories = random.Random(1), DeviceHistories()
    requests = [known(chance, repetition_penalty=1.2) for _ in range(2)]
    tokens = step(requests, histories, chance, None)

    def failing(ids: torch.Tensor, before: Any) -> torch.Tensor:
        raise RuntimeError("there is no memory")

    with monkeypatch.context() as patched:
        patched.setattr(histories_module, "known_tokens", failing)
        with pytest.raises(RuntimeError):
            step(requests, histories, chance, tokens)
    step(requests, histories, chance, tokens)


def test_a_step_copies_the_newest_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, histories = random.Random(1), DeviceHistories()
    copied: list[int] = []

    def upload(numbers: Any, device: torch.device) -> torch.Tensor:
        copied.append(np.size(numbers))
        return torch.as_tensor(np.asarray(numbers))

    monkeypatch.setattr(histories_module, "upload", upload)
    requests = [known(chance, repetition_penalty=1.2) for _ in range(3)]
    for request in requests:
        request.prompt[:] = range(40)
        request.state = SamplingState(request.state.parameters, request.prompt)
    tokens = step(requests, histories, chance, None)
    assert max(copied) == 2 * 3 * 40
    for _ in range(30):
        copied.clear()
        tokens = step(requests, histories, chance, tokens)
        assert max(copied) == 2 * 3
        for request in requests:
            request.tell(but=1)
