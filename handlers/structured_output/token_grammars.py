"""Grammars over the tokens of a model: which tokens may come next."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from handlers.structured_output import compiler
from handlers.structured_output.check_process import parser_limits
from lmi_server.contract.errors import RequestError


class TokenGrammars:
    """Compiles grammars for the tokenizer of a model."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: Collection[int]) -> None:
        """`vocabulary` counts the logits of a row, `end_ids` are the tokens that end a sequence."""
        self._tokenizer = tokenizer
        self._size = max(vocabulary, len(tokenizer))
        self._end_ids = sorted(end_ids)
        self._lock = threading.Lock()
        self._tokens: Any = None

    def compile(self, text: str) -> CompiledGrammar:
        """Return a grammar; each request follows its own copy. Any thread may call it. Raises RequestError."""
        from llguidance import LLMatcher

        with self._lock:
            if self._tokens is None:
                self._tokens = self._token_trie()
        matcher = LLMatcher(self._tokens, text, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise compiler.refusal("grammar", matcher.get_error())
        return CompiledGrammar(matcher, (self._size + 31) // 32)

    def _token_trie(self) -> Any:
        """Return the bytes of all tokens in llguidance's form. It takes half a second per 50,000 tokens.

        So the first request with a grammar makes it, not each start of a model.
        """
        from llguidance import LLTokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        problem = "it is not one of the library tokenizers (a tokenizer.json)"
        if backend is not None and self._end_ids:
            try:
                return LLTokenizer(backend.to_str(), n_vocab=self._size, eos_token=self._end_ids)
            # The border to the library: it raises the errors of its code for an unknown tokenizer.
            except Exception as error:  # noqa: BLE001
                problem = " ".join(str(error).split())[:200]
        elif backend is not None:
            problem = "it has no token that ends a sequence"
        raise RequestError(
            f"this model's tokenizer cannot be used for structured output: {problem}; leave the constraint out, or"
            " serve the model with a fast tokenizer"
        )


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar at its beginning. `words` of 32 bits are a mask."""

    matcher: Any
    words: int


class GrammarMatch:
    """How far the output of one request has come in its grammar, and the mask of the tokens that may come next.

    `mask` has one bit per token, the lowest first. `fill` may run in another thread than the other methods, but not at
    the same time.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._matcher = compiled.matcher.deep_copy()  # what its lexer learns is shared: each request warms it
        self.mask = np.zeros(compiled.words, np.uint32)
        self.is_stale = True

    def fill(self) -> None:
        """Compute the mask for the next token."""
        self._matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        self.is_stale = False

    def accept(self, token: int) -> None:
        """Go on by a token. Raises RequestError if the grammar does not allow it, or was too costly to follow."""
        failed = self._matcher.is_error()
        if failed or not self._matcher.consume_token(token):
            raise RequestError(self._failure())
        self.is_stale = True

    def _failure(self) -> str:
        reason = " ".join(self._matcher.get_error().split())
        if any(word in reason for word in ("limit", "fuel", "max is", "too complex", "Too many", "TooComplex")):
            return f"the grammar of the output is too complex to follow ({reason[:200]}); make it simpler"
        return (
            "no token is left that the grammar of the output allows; send no bad_words, allowed_token_ids or logit_bias"
            f" that exclude all that it may go on with ({reason[:200]})"
        )

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end of the sequence."""
        return bool(self._matcher.is_stopped())
