"""Runs requests before the model is ready, so that no request waits for a kernel to be compiled."""

from __future__ import annotations

import numpy as np

from handlers.generation.prompts import PromptEncoder
from handlers.rolling_batch.engine import RollingBatchEngine
from lmi_server.contract.generation import SamplingParameters


class _AnyToken:
    """A grammar that allows every token: it runs the kernels that other grammars need."""

    is_stale = False
    is_complete = False

    def __init__(self, vocabulary: int) -> None:
        self.mask = np.full((vocabulary + 31) // 32, 2**32 - 1, np.uint32)

    def fill(self) -> None:
        return

    def accept(self, token: int) -> None:
        return


def warm_up(engine: RollingBatchEngine, prompts: PromptEncoder, tokens: int = 4) -> None:
    """Run requests that need all kernels and buffers of a step.

    The prompt of the first has up to `tokens` tokens, more than four where a large step might lack memory. The others
    draw their token in the three ways that have kernels, and choose it by the mask of a grammar.
    """
    prompt = (prompts.tokenize("a b c") or [0])[:4]
    long = (prompt * tokens)[: max(tokens, len(prompt))]
    parameters = SamplingParameters(max_new_tokens=2, ignore_eos=True, logprobs=0)
    engine.add("warm-up", long, parameters, "", 0, lambda output: None)
    for more in ({}, {"repetition_penalty": 1.5}, {"top_k": 2}):
        drawn = SamplingParameters(max_new_tokens=1, ignore_eos=True, do_sample=True, **more)
        engine.add(f"warm-up, drawn, {more}", prompt[:1], drawn, "", 0, lambda output: None)
    for biases in ({}, {0: 0.0}):
        masked = SamplingParameters(max_new_tokens=1, logit_bias=biases)
        anything = _AnyToken(engine.vocabulary)
        engine.add(f"warm-up, masked, {biases}", prompt[:1], masked, "", 0, lambda output: None, grammar=anything)
    _run(engine)
    engine.add("warm-up, short", prompt[:1], SamplingParameters(max_new_tokens=1), "", 0, lambda output: None)
    _run(engine)  # alone: pages have a kernel of their own for chunks of few rows
    engine.reset_stats()


def _run(engine: RollingBatchEngine) -> None:
    while engine.has_work:
        engine.step()
