"""Encoders, which compute the hidden states of a text's tokens: the base of feature-extraction and text-embedding.

Texts of many requests run together, in batches of similar length. Padding changes no result but takes time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModel

from handlers.checkpoints.placement import main_device
from handlers.checkpoints.rotary import RotaryEmbeddings
from handlers.checkpoints.text_length import TextLength
from handlers.checkpoints.transformers_loading import load_model
from handlers.tasks.batches import even_batches
from handlers.tasks.options import PipelineOptions
from handlers.tasks.padding import load_padding_tokenizer
from handlers.tasks.task import Task, read_text, same_names
from lmi_server.contract.errors import ContextLengthError, RequestError
from lmi_server.dialects import fields

_MAX_TOKENS = 16384  # of one forward pass, padding included
_NO_LIMIT = 10**9  # tokenizers express "no limit" as 10**30


class Encoder:
    """A tokenizer and a model without a head. `max_length` is in tokens, special tokens included."""

    def __init__(self, path: str, options: PipelineOptions, max_length: int | None = None) -> None:
        self.tokenizer = load_padding_tokenizer(path, options)
        self._text_length = TextLength(self.tokenizer)
        model = load_model(AutoModel, path, options)
        self.model = model.get_encoder() if model.config.is_encoder_decoder else model
        self._rotary = RotaryEmbeddings(model)
        positions = getattr(model.config, "max_position_embeddings", None) or _NO_LIMIT
        longest = min(positions - _positions_lost(model), self.tokenizer.model_max_length)
        self.max_length = min(options.max_model_len or max_length or longest, longest)

    def tokenize_unless_too_long(self, texts: Sequence[str], are_cut: Sequence[bool]) -> list[Sequence[int]]:
        """Do the same as `tokenize` for texts that are not cut and too long for the model in any case.

        In place of the ids of such a text there is a range that is too long as well.
        """
        least = [0 if is_cut else self._min_tokens(text) for text, is_cut in zip(texts, are_cut, strict=True)]
        most = self._text_length.max_chars(self.max_length)  # the tokens that stay are in these characters
        fitting = [text[:most] for text, count in zip(texts, least, strict=True) if count <= self.max_length]
        tokenized = iter(self.tokenize(fitting) if fitting else ())
        return [next(tokenized) if count <= self.max_length else range(count) for count in least]

    def _min_tokens(self, text: str) -> int:
        too_long = len(text) > self._text_length.max_chars(self.max_length)
        return self.max_length + 1 if too_long else self._text_length.min_tokens(text)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text with special tokens, however long it is."""
        return self.tokenizer(list(texts), return_attention_mask=False, return_token_type_ids=False)["input_ids"]  # type: ignore[no-any-return]

    def cut(self, ids: Sequence[int], size: int) -> list[int]:
        """Return `ids` cut to `size` tokens. A special token at the end stays, because models are trained with it."""
        if len(ids) <= size:
            return list(ids)
        tail = self._special_tail(ids)
        return [*ids[: size - len(tail)], *tail] if len(tail) < size else list(ids[:size])

    def _special_tail(self, ids: Sequence[int]) -> list[int]:
        special = set(self.tokenizer.all_special_ids)
        tail: list[int] = []
        for token in reversed(ids):
            if token not in special or len(tail) == 1:
                break
            tail.insert(0, token)
        return tail

    def hidden_states(self, batch: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states of the last layer (sequences, tokens, width) and a mask (sequences, tokens).

        The mask is False at padding.
        """
        self._rotary.forget()
        lengths = torch.tensor([len(ids) for ids in batch])
        longest = int(lengths.max())
        ids = torch.full((len(batch), longest), self.tokenizer.pad_token_id or 0)
        for row, sequence in zip(ids, batch, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        mask = torch.arange(longest)[None, :] < lengths[:, None]
        device = main_device(self.model)
        mask, ids = mask.to(device), ids.to(device)
        # Without a mask, torch chooses a faster attention kernel.
        attention = {} if bool((lengths == longest).all()) else {"attention_mask": mask.long()}
        return self.model(input_ids=ids, **attention).last_hidden_state, mask

    def batches(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield the indices of sequences to run together, but for sequences too long for the model."""
        kinds: dict[int, list[int]] = {}
        for index, length in enumerate(map(len, sequences)):
            if 0 < length <= self.max_length:
                kinds.setdefault(0 if self._rotary.may_mix(length) else length, []).append(index)
        for fitting in kinds.values():
            lengths = [len(sequences[index]) for index in fitting]
            for batch in even_batches(lengths, _MAX_TOKENS, main_device(self.model).type):
                yield [fitting[index] for index in batch]

    def misfit_error(self, ids: Sequence[int]) -> RequestError:
        """Return the error of a sequence that `batches` leaves out."""
        if not ids:
            return RequestError(
                "an input has no tokens, not even the model's own around a text; send one that has some"
            )
        count = f"{len(ids)} tokens or more" if isinstance(ids, range) else f"{len(ids)} tokens"
        return ContextLengthError(
            f"an input has {count}, and the model takes at most {self.max_length}; send a shorter one, or have "
            'it cut: "truncate_prompt_tokens": -1 in an embeddings request, "truncate": true in parameters'
        )


def _positions_lost(model: Any) -> int:
    """Return how many positions the model cannot use: RoBERTa and its relatives count from the padding index on."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0


class FeatureExtraction(Task):
    """Returns the hidden states of a text's tokens, (1, tokens, width)."""

    parameters = same_names(truncate=fields.boolean)

    def __init__(self, path: str, options: PipelineOptions) -> None:
        self._encoder = Encoder(path, options)
        self.model, self.tokenizer = self._encoder.model, self._encoder.tokenizer
        self.max_length = self._encoder.max_length

    def read(self, value: Any, parameters: Mapping[str, Any]) -> str:
        return read_text(value)

    def run(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        encoder = self._encoder
        is_cut = parameters.get("truncate", False)
        sequences = encoder.tokenize_unless_too_long(inputs, [is_cut] * len(inputs))
        if is_cut:
            sequences = [encoder.cut(ids, self.max_length) for ids in sequences]
        results: list[Any] = [encoder.misfit_error(ids) for ids in sequences]
        with torch.inference_mode():
            for indices in encoder.batches(sequences):
                states, _ = encoder.hidden_states([sequences[index] for index in indices])
                for index, rows in zip(indices, states.float().cpu().numpy(), strict=True):
                    # The pipeline of transformers returns a leading axis of length 1, too.
                    results[index] = rows[None, : len(sequences[index])]
        return results

    def details(self) -> Mapping[str, Any]:
        return {**super().details(), "max_length": self.max_length}
