"""The penalties of all rows at once, from the tokens that each request has seen and generated.

The tokens of a row are a list with repetitions, which stays on the device (histories.py). Where one token is written
several times, all writes are equal.
"""

from __future__ import annotations

import numpy as np
import torch

from handlers.rolling_batch.device_arrays import upload
from handlers.rolling_batch.sampling.histories import DeviceHistories
from handlers.rolling_batch.sampling.state import SamplingState

_LARGEST = float(np.finfo(np.float32).max)


def penalise(
    logits: torch.Tensor, states: list[SamplingState], before: torch.Tensor | None, histories: DeviceHistories
) -> None:
    """Apply repetition, presence and frequency penalties to float32 logits (rows, vocabulary), in place.

    `before` (rows of the step before,) has the tokens that the host does not know yet.
    """
    rows = [row for row, state in enumerate(states) if state.has_penalties]
    if not rows:
        return
    penalised = [states[row] for row in rows]
    part = logits if len(rows) == len(states) else logits[(own := upload(rows, logits.device))]
    ids = histories.tokens([state.history for state in penalised], logits.device, before)
    numbers = np.array([_numbers(state) for state in penalised]).clip(-_LARGEST, _LARGEST).astype(np.float32)
    repetition, presence, frequency, first, length = upload(numbers, logits.device).T[:, :, None]
    place = torch.arange(ids.shape[1], device=logits.device)
    values = part.gather(1, ids)
    part.scatter_(1, ids, torch.where(values < 0, values * repetition, values / repetition))
    generated = (place >= first) & (place < length)
    # Every entry without a generated token stands for the last one: all writes to a token are equal.
    last = ids.gather(1, (length.long() - 1).clamp_min(0))
    of_output = torch.where(generated, ids, last)
    part.scatter_(1, of_output, part.gather(1, of_output) - presence * (length > first))
    part.scatter_add_(1, ids, -frequency * generated)
    if part is not logits:
        logits[own] = part


def _numbers(state: SamplingState) -> tuple[float, ...]:
    own = state.parameters
    penalties = own.repetition_penalty, own.presence_penalty, own.frequency_penalty
    return *penalties, state.history.first_generated, state.history.length
