"""What is asked: random prompts of given lengths, or recorded ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

# Common words that most tokenizers have as one token each, with the space before it.
_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information back parent face others
level office door health person art war history party result change morning reason
"""
_WORDS = _COMMON.split()


class Tokenizer(Protocol):
    """What random prompts need of the package tokenizers."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Any:
        """Return an object with the `ids`."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The later turns of a user in a chat, and the longest answer to each."""

    text: str
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: a text, or a chat in the form of OpenAI's messages; `later` are the user's next turns.

    `output_tokens` is the most that may be generated; None leaves it to the server. `exact` asks for exactly as many.
    `at` is the time of a recorded request in seconds.
    """

    text: str
    messages: tuple[Mapping[str, Any], ...] = ()
    output_tokens: int | None = None
    exact: bool = False
    adapter: str | None = None
    at: float | None = None
    later: tuple[Turn, ...] = ()

    def with_answer(self, answer: str) -> Prompt:
        """Return the request of the next turn, with all earlier turns."""
        turn, *rest = self.later
        said = ({"role": "assistant", "content": answer}, {"role": "user", "content": turn.text})
        messages = (*self.chat, *said)
        return replace(self, text="", messages=messages, output_tokens=turn.output_tokens, later=tuple(rest))

    @property
    def chat(self) -> list[Mapping[str, Any]]:
        """Return the prompt as messages."""
        return list(self.messages) or [{"role": "user", "content": self.text}]


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Prompts of `input_tokens` random words; the share `shared_prefix` is the same in all.

    The length is in tokens with a tokenizer, otherwise in words, and holds for each of the `turns` of a chat. No two
    prompts are the same, so that a prefix cache finds the shared part alone.
    """

    input_tokens: int
    output_tokens: int
    shared_prefix: float = 0.0
    tokenizer: Tokenizer | None = None
    turns: int = 1

    def prompts(self, seed: int) -> Iterator[Prompt]:
        """Yield prompts without end; the same for the same seed."""
        numbers = random.Random(seed)
        shared = round(self.input_tokens * self.shared_prefix)
        prefix = self._text(numbers, shared, "")
        while True:
            text = self._text(numbers, self.input_tokens, prefix)
            later = tuple(
                Turn(self._text(numbers, self.input_tokens, ""), self.output_tokens) for _ in range(self.turns - 1)
            )
            yield Prompt(text, output_tokens=self.output_tokens, exact=True, later=later)

    def _text(self, numbers: random.Random, tokens: int, start: str) -> str:
        words = start.split()
        words += numbers.choices(_WORDS, k=max(tokens - len(words), 0))
        text = " ".join(words[:tokens])
        if self.tokenizer is None:
            return text
        # A word may be more than one token: drop words until the number fits, which takes a few rounds.
        while len(words) > 1 and (length := _length(self.tokenizer, text)) > tokens:
            words = words[: max(min(len(words) * tokens // length, len(words) - 1), 1)]
            text = " ".join(words)
        return text


def _length(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The prompts of a file, in their order, again and again; of each chat `turns` at most."""

    recorded: Sequence[Prompt]
    output_tokens: int | None = None
    turns: int | None = None

    def prompts(self, seed: int) -> Iterator[Prompt]:
        """Yield the prompts without end."""
        return itertools.cycle([self._with_lengths(prompt) for prompt in self.recorded])

    def _with_lengths(self, prompt: Prompt) -> Prompt:
        later = prompt.later[: None if self.turns is None else self.turns - 1]
        if self.output_tokens is None:
            return replace(prompt, later=later)
        later = tuple(replace(turn, output_tokens=self.output_tokens) for turn in later)
        return replace(prompt, output_tokens=self.output_tokens, exact=True, later=later)


Workload = RandomPrompts | Recorded


def with_adapters(prompts: Iterator[Prompt], weights: Mapping[str, float], seed: int) -> Iterator[Prompt]:
    """Return the prompts with adapters drawn by their weights; the name "base" is the model without an adapter."""
    if not weights:
        return prompts
    numbers = random.Random(seed)
    names, shares = list(weights), list(weights.values())
    return (replace(prompt, adapter=_adapter(numbers.choices(names, shares)[0])) for prompt in prompts)


def _adapter(name: str) -> str | None:
    return None if name == "base" else name
