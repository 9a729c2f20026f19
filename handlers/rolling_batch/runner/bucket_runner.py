"""Runs step plans on a model that was compiled ahead of time for a few shapes, as Neuron's compiler does.

A graph takes exactly the shape that it was compiled for: batch and lengths are padded to it. There are two
kinds of such models. One writes every row of a batch to a line of the KV cache of its own (continuous batching): new
prompts are computed by themselves, and the other lines stay as they are. The other kind has one position for the whole
batch, and new prompts make it compute all sequences again, padded on the left to one length.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

import torch

from handlers.rolling_batch.runner.step_runner import StepLogits
from handlers.rolling_batch.schedule.plan import Sequence, StepPlan
from lmi_server.contract.errors import RequestError

if TYPE_CHECKING:
    from handlers.rolling_batch.lora.layers import LoraLayers


class LineModel(Protocol):
    """A compiled model with a line of the KV cache for each sequence, lines 0 to `lines` - 1.

    `prompt_buckets` are the lengths, in ascending order, that graphs for prompts were compiled for.
    """

    vocabulary: int
    lines: int
    prompt_buckets: tuple[int, ...]

    def prefill(self, token_ids: torch.Tensor, length: int, line: int) -> torch.Tensor:
        """Compute a prompt from position 0 in `line`; return the logits behind its last token, (vocabulary,).

        `token_ids` is (1, bucket): the first `length` are the prompt.
        """
        ...

    def decode(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute a token in every line; return logits (lines, vocabulary). Both arguments are (lines, 1)."""
        ...


class AlignedModel(Protocol):
    """A compiled model whose rows 0 to `rows` - 1 are aligned: all are at one column of up to `max_len`."""

    vocabulary: int
    rows: int
    max_len: int

    def prefill(self, token_ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Compute all rows from column 0; return the logits behind the last column, (rows, vocabulary).

        `token_ids` is (rows, columns); row i begins at column `starts[i]`, behind padding.
        """
        ...

    def decode(self, token_ids: torch.Tensor, column: int, starts: torch.Tensor) -> torch.Tensor:
        """Compute the tokens (rows, 1) at `column`; return logits (rows, vocabulary)."""
        ...


class _CompiledRunner:
    """What runners of both kinds have in common: they serve no adapters and score no prompts."""

    scores_prompts = False

    @property
    def lora(self) -> LoraLayers:
        raise RequestError("a model with compiled graphs takes no LoRA adapters; merge the adapter into the model")

    def stop(self) -> None:
        """Nothing is left to stop."""


class LineRunner(_CompiledRunner):
    """Runs a `LineModel`; the slots of the scheduler are its lines.

    The scheduler's limits must have `longest_prompt` as `prompt_bucket`, and room for every line at full length.
    """

    def __init__(self, model: LineModel) -> None:
        self._model = model
        self.vocabulary = model.vocabulary
        self.longest_prompt = model.prompt_buckets[-1]

    def run(self, plan: StepPlan, prompt_scored: set[int], before: torch.Tensor | None = None) -> StepLogits:
        """Compute a step: first a token of every running sequence, then the prompts that begin.

        The decode graph computes every line. In lines without a sequence it writes a padding token to position 0,
        so that a sequence must never be left out: all but those of new prompts are in a plan, because the limits leave
        room for all. A prompt that began in an earlier step overwrote its line, and one of this step will.
        """
        rows = [(sequence, sequence.computed) for sequence in plan.decode]
        # A prompt longer than the longest bucket goes on token by token, beside the sequences that decode.
        rows += [(chunk.sequence, chunk.start) for chunk in plan.prefill if chunk.start]
        begun = [chunk for chunk in plan.prefill if not chunk.start]
        sampled = [*plan.decode, *(chunk.sequence for chunk in plan.prefill if chunk.start and chunk.completes_prompt)]
        logits = list(self._decode(rows)[[sequence.slot for sequence in sampled]]) if rows else []
        for chunk in begun:
            last = self._prefill(chunk.sequence, chunk.end)
            if chunk.completes_prompt:
                sampled.append(chunk.sequence)
                logits.append(last)
        return StepLogits(torch.stack(logits) if logits else torch.empty(0, self.vocabulary), sampled, [])

    def _decode(self, rows: SequenceOf[tuple[Sequence, int]]) -> torch.Tensor:
        token_ids = torch.zeros(self._model.lines, 1, dtype=torch.long)
        positions = torch.zeros(self._model.lines, 1, dtype=torch.long)
        for sequence, position in rows:
            token_ids[sequence.slot] = sequence.tokens[position]
            positions[sequence.slot] = position
        return self._model.decode(token_ids, positions)

    def _prefill(self, sequence: Sequence, length: int) -> torch.Tensor:
        bucket = next(size for size in self._model.prompt_buckets if size >= length)
        token_ids = torch.zeros(1, bucket, dtype=torch.long)
        token_ids[0, :length] = torch.tensor(sequence.tokens[:length])
        return self._model.prefill(token_ids, length, sequence.slot)


class AlignedRunner(_CompiledRunner):
    """Runs a `AlignedModel`; the slots of the scheduler are its rows.

    The scheduler's limits must have `longest_prompt` as `prompt_bucket`, and room for every row at full length.
    """

    def __init__(self, model: AlignedModel) -> None:
        self._model = model
        self.vocabulary = model.vocabulary
        self.longest_prompt = model.max_len
        self._columns = 0  # that hold the tokens of the batch, or padding
        self._starts = torch.zeros(model.rows, dtype=torch.long)

    def run(self, plan: StepPlan, prompt_scored: set[int], before: torch.Tensor | None = None) -> StepLogits:
        """Compute a step: one token of each sequence, or all tokens of all of them if some begin."""
        sequences = [*plan.decode, *(chunk.sequence for chunk in plan.prefill)]
        begins = any(not sequence.computed for sequence in sequences)
        if begins or self._columns == self._model.max_len:
            logits = self._compute_again(sequences)
        else:
            logits = self._decode(sequences)
        return StepLogits(logits[[sequence.slot for sequence in sequences]], sequences, [])

    def _decode(self, sequences: SequenceOf[Sequence]) -> torch.Tensor:
        token_ids = torch.zeros(self._model.rows, 1, dtype=torch.long)
        for sequence in sequences:
            token_ids[sequence.slot] = sequence.tokens[-1]
        logits = self._model.decode(token_ids, self._columns, self._starts)
        self._columns += 1
        return logits

    def _compute_again(self, sequences: SequenceOf[Sequence]) -> torch.Tensor:
        self._columns = max(len(sequence.tokens) for sequence in sequences)
        token_ids = torch.zeros(self._model.rows, self._columns, dtype=torch.long)
        self._starts = torch.zeros(self._model.rows, dtype=torch.long)
        for sequence in sequences:
            start = self._columns - len(sequence.tokens)
            token_ids[sequence.slot, start:] = torch.tensor(sequence.tokens)
            self._starts[sequence.slot] = start
        return self._model.prefill(token_ids, self._starts)
