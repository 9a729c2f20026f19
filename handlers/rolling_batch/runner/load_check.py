"""Compares a model under the rolling batch with the model as it was loaded."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch

from handlers.checkpoints.blocks.free_cores import only_free_cores
from handlers.checkpoints.placement import main_device
from handlers.logits import refuse_broken, relative_error
from handlers.rolling_batch.attention.probe import UnsupportedAttentionError
from handlers.rolling_batch.schedule.page_table import PageTable
from handlers.rolling_batch.schedule.plan import Chunk, Sequence, StepPlan
from handlers.rolling_batch.schedule.slots import Match, SlotCopy
from handlers.rolling_batch.schedule.state_table import RowCopy, StateStep

if TYPE_CHECKING:
    from handlers.rolling_batch.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_EXACT = 1e-3  # the error of sums in float32
_ROUNDED_LIMIT = 0.6
_NEAR = 10  # likeliest tokens


class LoadCheck:
    """Compares a model under the rolling batch with the model as it was loaded, on random tokens.

    An architecture that keeps more than keys and values from token to token (a recurrent state, a convolution), or does
    not fit a fused module, would generate nonsense without any error. So the logits of the untouched model are computed
    at load, and those of chunks, of a copied prefix and of decoding have to equal them.
    """

    _MIN = 16  # tokens
    _DECODED = 3  # of them; the others are the prompt

    def __init__(self, model: Any, max_len: int, rounds_activations: bool = False) -> None:
        """Compute the logits of the untouched model, beyond every window that is shorter than `max_len` tokens.

        `rounds_activations`: layers of the served model round their inputs to 8 bits or fewer. Then the slightest
        difference grows from layer to layer, and equal logits cannot be asked for; see `_judge_rounded`.
        """
        self._rounds_activations = rounds_activations
        self._name = type(model).__name__
        window = max((window for window in _windows(model.config) if window + self._MIN <= max_len), default=0)
        lengths = sorted({self._MIN, window + self._MIN})
        if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # transformers' other functions leave the soft cap out
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(vocabulary_of(model), (1, lengths[-1]), generator=generator)
        rows = torch.tensor([row for length in lengths for row in range(length - self._DECODED - 1, length)])
        with only_free_cores():
            logits = _logits(model, self._ids, rows).split(self._DECODED + 1)
        self._expected = dict(zip(lengths, logits, strict=True))

    def compare(self, runner: ModelRunner) -> None:
        """Compute a chunk in one slot, a second one that continues from it in another slot, and decode the rest there.

        Raises UnsupportedAttentionError if the logits differ by more than rounding, and ModelLoadError if one is
        NaN, or if all tokens have the same logit, which every wrong model would equal.
        """
        length = max((length for length in self._expected if length <= runner.cache.max_len), default=0)
        if not length:
            return
        ids, prompt = self._ids[0, :length].tolist(), length - self._DECODED
        sequence = Sequence(0, ids[:prompt], prompt, self._DECODED)
        half = prompt // 2
        first, other, second = _in_pages(runner.cache, ids, half) if runner.page else _in_slots(runner.cache, half)
        sequence.slot = 0
        runner.run(StepPlan([], [Chunk(sequence, 0, half)], states=StateStep({0: 0}), **first), set())
        sequence.slot = other
        copied, kept = StateStep({other: 1}, [RowCopy(0, 1)]), StateStep({other: 1})
        logits = [runner.run(StepPlan([], [Chunk(sequence, half, prompt)], states=copied, **second), set()).logits]
        for position in range(prompt, length):
            sequence.tokens.append(ids[position])
            sequence.computed = position
            logits.append(runner.run(StepPlan([sequence], [], states=kept), set()).logits)
        for slot in {0, other}:
            runner.cache.trim(slot, 0)
        refuse_broken(self._expected[length], self._name)
        judge = self._judge_rounded if self._rounds_activations else self._judge
        # Keys and values in 8 bits add up to what bfloat16 does elsewhere.
        dtype = runner.dtype if runner.kept_dtype == runner.dtype else torch.bfloat16
        judge(torch.cat(logits).float().cpu(), self._expected[length], dtype)

    def computes_together(self, runner: ModelRunner) -> bool:
        """Whether a step that decodes sequences of different lengths gives the same logits as each alone.

        The longer one is not padded, so that its logits show what rounding does: padding may do little more.
        """
        length = max((length for length in self._expected if length <= runner.cache.max_len), default=0)
        if not length or runner.cache.slots < 2:
            return False
        sequences = []
        for slot, end in enumerate((length, length // 2)):
            sequence = Sequence(slot, self._ids[0, :end].tolist(), end, 1)
            sequence.slot = slot
            runner.run(StepPlan([], [Chunk(sequence, 0, end - 1)]), set())
            sequence.computed = end - 1
            sequences.append(sequence)
        together = runner.run(StepPlan(sequences, []), set()).logits.float().cpu()
        alone = [runner.run(StepPlan([sequence], []), set()).logits.float().cpu() for sequence in sequences]
        for sequence in sequences:
            runner.cache.trim(sequence.slot, 0)
        rounding, padded = (relative_error(both, one) for both, one in zip(together.split(1), alone, strict=True))
        return padded <= min(_EXACT + 2 * rounding, _limit(runner.dtype))

    @staticmethod
    def _judge(logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
        error = relative_error(logits, expected)
        if not error <= _limit(dtype):  # NaN is an error too
            raise UnsupportedAttentionError(
                f"its logits over a KV cache differ from its own by {error:.2g} of their spread; it keeps more than"
                " keys and values from token to token"
            )

    @staticmethod
    def _judge_rounded(logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
        """Judge by the error, which is above 1 for a model without its state, and by the likeliest tokens."""
        error = relative_error(logits, expected)
        best = expected.argmax(dim=-1, keepdim=True)
        same = int((logits.argmax(dim=-1, keepdim=True) == best).sum())
        near = int((logits.topk(min(_NEAR, logits.shape[-1]), dim=-1).indices == best).any(dim=-1).sum())
        logger.info(
            "its layers round their inputs: on random tokens the logits differ by %.2g of their spread, and %d of %d"
            " likeliest tokens are the same",
            error, same, len(best),
        )  # fmt: skip
        if not error <= _ROUNDED_LIMIT or 2 * near < len(best):
            raise UnsupportedAttentionError(
                f"with rounded inputs of its layers its logits differ from its own by {error:.2g} of their spread, and"
                f" only {near} of {len(best)} likeliest tokens are among its {_NEAR} likeliest; serve it unquantised"
            )


def _limit(dtype: torch.dtype) -> float:
    """Return the error that rounding may cause.

    Rounding to bfloat16 in every layer adds up to several per cent. Without its state a model is off by about 1.
    """
    return _EXACT if dtype == torch.float32 else 0.25


def _in_slots(cache: Any, half: int) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """Return what two steps do before they compute, and the slot of the second: the last one, with a copied prefix."""
    other = cache.slots - 1
    return {}, other, {"copies": [SlotCopy(0, other, half)] if other else []}


def _in_pages(cache: Any, ids: list[int], half: int) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """The same with pages: a sequence in the second slot shares the full ones, and gets a copy of the last one.

    With a single slot, or no pages for both, the sequence goes on in the first one.
    """
    table = PageTable(min(cache.slots, 2), cache.pages * cache.page, cache.page)
    table.claim(None, ids[:half], Match(-1, 0, 0), table.kv_tokens)
    table.reserve(0, half)
    first = table.step_planned()
    table.set_computed(0, half)
    match = table.find(None, ids)
    claimed = table.claim(None, ids, match, table.kv_tokens - table.needed([half]))
    other, held = claimed or (0, half)
    if held < half:  # so few tokens that they are not copied
        table.discard(other)
        other = 0
    table.reserve(other, len(ids))
    return {"pages": first}, other, {"pages": table.step_planned()}


def _windows(config: Any) -> set[int]:
    """Return the numbers of tokens before its own that layers of the model see at most, where these are declared."""
    text_config = config.get_text_config()
    kinds = getattr(text_config, "layer_types", None)
    declared = getattr(text_config, "sliding_window", None)
    windows = {int(declared)} if declared and (kinds is None or "sliding_attention" in kinds) else set()
    chunk = getattr(text_config, "attention_chunk_size", None)
    windows |= {int(chunk)} if chunk and "chunked_attention" in (kinds or ()) else set()
    # How many tokens an index chooses; there have to be more.
    chosen = (getattr(text_config, name, None) for name in ("index_topk", "keep_window_size"))
    return windows | {int(count) for count in chosen if count}


def _logits(model: Any, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return, in main memory, the logits that the model as it is has for some rows of a sequence.

    The model may move to another device before others are compared with them. It gets positions where transformers'
    `generate` gives it some: those of RoBERTa are others without.
    """
    inputs = {"input_ids": ids.to(main_device(model)), "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters and not model.config.is_encoder_decoder:
        inputs["position_ids"] = torch.arange(ids.shape[1], device=main_device(model))[None]
    with torch.inference_mode():
        if keeps_rows(model):
            return model(**inputs, logits_to_keep=rows.numpy()).logits[0].float().cpu()
        return model(**inputs).logits[0, rows].float().cpu()


def keeps_rows(model: Any) -> bool:
    """Whether the model computes the logits of given rows alone."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def vocabulary_of(model: Any) -> int:
    """Return how many tokens the model knows."""
    embedded: int = model.get_input_embeddings().weight.shape[0]
    return min(embedded, int(model.config.get_text_config().vocab_size))
