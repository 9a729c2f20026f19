"""The architectures that vLLM generates text with, for the choice of a handler before any engine is imported."""

from __future__ import annotations

import ast
import functools

from handlers.vllm.engine_fields import source

_REGISTRY = "model_executor/models/registry.py"
_TEXT, _TEXT_AND_MORE = "_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"  # the latter read images or sounds, too


def can_generate(architectures: tuple[str, ...], device_kind: str) -> bool:
    """Return whether the installed vLLM generates text with one of `architectures` on devices of this kind."""
    able = registered(_TEXT)
    if device_kind == "cpu":
        able &= SERVED_ON_CPU
    return not (able | registered(_TEXT_AND_MORE)).isdisjoint(architectures)


@functools.cache
def registered(table: str = _TEXT) -> frozenset[str]:
    """Return the architectures of a table of vLLM's registry; none if it is not installed."""
    for statement in source(_REGISTRY).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name == table:
                return frozenset(str(key.value) for key in keys if isinstance(key, ast.Constant))
    return frozenset()


SERVED_ON_CPU = frozenset({"FalconForCausalLM", "GPTJForCausalLM"})
"""Those of text that the rolling batch cannot serve, and whose tokens on the CPU are those of transformers.

`python -m benchmarks.zoo --vllm` finds them out: vLLM registers more, for which it has no kernel there.
"""
