"""Which requests the engine takes: what does not fit the model is refused before it waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from handlers.generation.parameters import max_new_tokens
from handlers.generation.prompts import PromptEncoder
from handlers.rolling_batch.grammars import Grammar
from handlers.rolling_batch.sampling.state import BannedTokens
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import SamplingParameters

_MAX_STOPS = 64
_MAX_BAD_WORDS = 128
_LONGEST_STOP = 1000  # characters; every token's text is searched for every stop sequence


class Admission:
    """Checks requests for a model with `vocabulary` tokens; `end_ids` end a sequence.

    `max_len` is the number of tokens that prompt and output may have together. `scores_prompts`: the runner can.
    `forced_ends` are tokens; one of them has to end an output of full length.
    """

    forced_ends: Sequence[int] = ()

    def __init__(
        self, tokenizer: Any, vocabulary: int, end_ids: frozenset[int], max_len: int, scores_prompts: bool
    ) -> None:
        self._prompts = PromptEncoder(tokenizer)
        self._vocabulary = vocabulary
        self._end_ids = end_ids
        self._max_len = max_len
        self._scores_prompts = scores_prompts

    def max_new_tokens(self, prompt: list[int], parameters: SamplingParameters) -> int:
        """Return how many tokens the request may generate. Raises ContextLengthError or RequestError."""
        if not prompt:
            raise RequestError("the prompt has no tokens; send at least one character")
        granted = max_new_tokens(parameters, len(prompt), self._max_len)
        if len(parameters.stop) > _MAX_STOPS or any(len(stop) > _LONGEST_STOP for stop in parameters.stop):
            raise RequestError(
                f"stop takes up to {_MAX_STOPS} sequences of up to {_LONGEST_STOP} characters each;"
                " send fewer or shorter ones"
            )
        if parameters.prompt_logprobs is not None and not self._scores_prompts:
            raise RequestError(
                "the compiled graphs of this model give no log probabilities of prompt tokens; leave out"
                " decoder_input_details, prompt_logprobs, and echo with logprobs"
            )
        named = (
            min(prompt),
            max(prompt),
            *parameters.logit_bias,
            *parameters.stop_token_ids,
            *(parameters.allowed_token_ids or ()),
        )
        unknown = [token for token in named if not 0 <= token < self._vocabulary]
        if unknown:
            raise RequestError(f"token id {unknown[0]} is not in the vocabulary of {self._vocabulary} tokens")
        return granted

    def banned(
        self, parameters: SamplingParameters, grammar: Grammar | None, max_new_tokens: int
    ) -> BannedTokens | None:
        """Return what a request must not generate; None, as for nearly every request, if it may generate anything.

        With `ignore_eos` a grammar goes on for as long as it can. Raises RequestError if nothing is left to generate.
        """
        allowed = parameters.allowed_token_ids
        if grammar is not None and parameters.ignore_eos:
            parameters = replace(parameters, ignore_eos=False, min_tokens=self._max_len)
        forces = bool(self.forced_ends) and grammar is None and not parameters.ignore_eos
        if allowed is None and not parameters.bad_words and not parameters.min_tokens and not forces:
            return None
        if allowed == ():
            raise RequestError("allowed_token_ids: a list of 0 is not allowed; send the ids of at least one token")
        if len(parameters.bad_words) > _MAX_BAD_WORDS:
            raise RequestError(f"bad_words takes up to {_MAX_BAD_WORDS} words; send fewer")
        words = [ids for word in parameters.bad_words for ids in self._spellings(word)]
        ends = parameters.stop_token_ids if parameters.ignore_eos else (*self._end_ids, *parameters.stop_token_ids)
        forced = (max_new_tokens - 1, self.forced_ends) if forces else None
        return BannedTokens(allowed, words, ends, parameters.min_tokens, forced)

    def _spellings(self, word: str) -> list[list[int]]:
        """Return the token ids of a word at the beginning and in the middle of a text, where they differ."""
        bare = word.lstrip()
        ids = [self._prompts.tokenize(text, add_special_tokens=False) for text in (bare, f" {bare}")]
        return [spelling for place, spelling in enumerate(ids) if spelling and spelling not in ids[:place]]
