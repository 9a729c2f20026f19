"""Arguments and results of formatters: a parsed request, and the answer as far as it is generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Token:
    """One token. `log_prob` is a natural logarithm, None if it was not computed."""

    id: int
    text: str
    log_prob: float | None = None
    special_token: bool | None = None
    error_msg: str | None = None
    request_id: Any = None

    def as_dict(self) -> dict[str, Any]:
        """Return the token in the form of LMI's answers."""
        fields: dict[str, Any] = {"id": self.id, "text": self.text, "log_prob": self.log_prob}
        if self.special_token:
            fields["special_token"] = True
        if self.error_msg:
            fields["error_msg"] = self.error_msg
        return fields

    def as_tgi_dict(self) -> dict[str, Any]:
        """Return the token in the form of text-generation-inference."""
        fields: dict[str, Any] = {"id": self.id, "text": self.text, "logprob": self.log_prob}
        if self.special_token is not None:
            fields["special"] = self.special_token
        return fields


class Iterator:
    """Counts the positions of a sequence that were read."""

    def __init__(self) -> None:
        self._index = 0

    def get_index(self) -> int:
        """Return the position that `next_index` will return."""
        return self._index

    def next_index(self) -> int:
        self._index += 1
        return self._index - 1

    def __repr__(self) -> str:
        return f"Iterator(_index={self._index})"


@dataclass
class Sequence:
    """One generated sequence. `get_next_token` reads its tokens in order, while others are still generated."""

    tokens: list[Token] = field(default_factory=list)
    top_tokens: list[list[Token]] = field(default_factory=list)
    cumulative_log_prob: float = 0.0
    finish_reason: str | None = None
    _last_token_index: int | None = None
    stop_reason: str | None = None
    _read: int = field(default=0, init=False, repr=False)
    _top_read: int = field(default=0, init=False, repr=False)

    def set_next_token(self, token: Token, is_last_token: bool = False) -> None:
        """Append a token."""
        if is_last_token:
            self._last_token_index = len(self.tokens)
        self.tokens.append(token)

    def set_next_top_tokens(self, top_tokens: list[Token]) -> None:
        """Append the most probable tokens at the next position."""
        self.top_tokens.append(top_tokens)

    def has_next_token(self) -> bool:
        """Return whether there is a token that `get_next_token` has not returned yet."""
        return self._read < len(self.tokens)

    def get_next_token(self) -> tuple[Token | None, int, bool, bool]:
        """Return the next token, its index, and whether it is the first and the last of the sequence.

        Returns (None, 0, False, False) if there is no further token yet.
        """
        if not self.has_next_token():
            return None, 0, False, False
        index = self._read
        self._read += 1
        return self.tokens[index], index, index == 0, self._is_last(index)

    @property
    def position(self) -> int:
        """Return how many tokens `get_next_token` has returned."""
        return self._read

    def get_last_token(self) -> Token | None:
        """Return the last token of a finished sequence; None before its end."""
        if self._last_token_index is not None:
            return self.tokens[self._last_token_index]
        return self.tokens[-1] if self.finish_reason is not None and self.tokens else None

    def has_next_top_tokens(self) -> bool:
        return self._top_read < len(self.top_tokens)

    def get_next_top_tokens(self) -> list[Token] | None:
        """Return the most probable tokens at the next position; None if there are none yet."""
        if not self.has_next_top_tokens():
            return None
        self._top_read += 1
        return self.top_tokens[self._top_read - 1]

    def _is_last(self, index: int) -> bool:
        if self._last_token_index is not None:
            return index == self._last_token_index
        return self.finish_reason is not None and index == len(self.tokens) - 1


@dataclass
class RequestInput:
    """A parsed request. The input formatter may add attributes, because the output formatter gets the same object."""

    request_id: Any = None
    client_request_id: str | None = None
    output_formatter: str | Callable[..., Any] | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    server_parameters: dict[str, Any] = field(default_factory=dict)
    tgi_compat: bool = False


@dataclass
class TextInput(RequestInput):
    """A request for text: `input_text` is the prompt; `parameters` are those of the request, including `stream`."""

    input_text: str | list[str] | None = None
    adapters: Any = None
    tokenizer: Any = None

    def prompt_tokens_length(self) -> int:
        """Return the number of tokens of the prompt; 0 without a tokenizer."""
        return len(self.tokenizer.encode(self.input_text)) if self.tokenizer is not None else 0


@dataclass
class RequestOutput:
    """The answer to a request, as far as it is generated."""

    request_id: Any = None
    input: Any = None
    finished: bool = False


@dataclass
class TextGenerationOutput(RequestOutput):
    """The sequences of a request by index, as far as they are generated."""

    sequences: dict[int, Sequence] = field(default_factory=dict)
    best_sequence_index: int = 0
    prompt_tokens_details: list[Token] = field(default_factory=list)
    other_sequences_indices: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sequences.setdefault(self.best_sequence_index, Sequence())

    @property
    def best_sequence(self) -> Sequence:
        return self.sequences[self.best_sequence_index]

    def set_best_sequence_index(self, sequence_index: int) -> None:
        self.best_sequence_index = sequence_index

    def set_next_token(
        self, token: Token, sequence_index: int = 0, is_last_token: bool = False, finish_reason: str | None = None
    ) -> None:
        """Append a token to a sequence."""
        sequence = self.sequences.setdefault(sequence_index, Sequence())
        sequence.set_next_token(token, is_last_token)
        if finish_reason:
            sequence.finish_reason = finish_reason

    def set_next_top_tokens(self, top_tokens: list[Token], sequence_index: int) -> None:
        """Append the most probable tokens at the next position of a sequence."""
        self.sequences[sequence_index].set_next_top_tokens(top_tokens)

    def set_finish_reason(self, finish_reason: str, sequence_index: int = 0) -> None:
        self.sequences[sequence_index].finish_reason = finish_reason

    def get_tokens_as_dict(self, sequence_index: int = 0) -> list[dict[str, Any]]:
        """Return the tokens of a sequence in the form of the answers."""
        return [self._as_dict(token) for token in self.sequences[sequence_index].tokens]

    def get_prompt_tokens_as_dict(self) -> list[dict[str, Any]]:
        return [self._as_dict(token) for token in self.prompt_tokens_details]

    def get_top_tokens_as_dict(self, sequence_index: int = 0) -> list[list[dict[str, Any]]]:
        """Return the most probable tokens at each position of a sequence."""
        return [[self._as_dict(token) for token in tokens] for tokens in self.sequences[sequence_index].top_tokens]

    def _as_dict(self, token: Token) -> dict[str, Any]:
        return token.as_tgi_dict() if getattr(self.input, "tgi_compat", False) else token.as_dict()
