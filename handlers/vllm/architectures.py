"""The architectures that vLLM generates text with, for the choice of a handler before any engine is imported."""

from __future__ import annotations

import ast
import functools

from handlers.vllm.engine_fields import source

_REGISTRY = "model_executor/models/registry.py"
_TABLE = "_TEXT_GENERATION_MODELS"


def can_generate(architectures: tuple[str, ...], device_kind: str) -> bool:
    """Return whether the installed vLLM generates text with one of `architectures` on devices of this kind."""
    able = registered() & SERVED_ON_CPU if device_kind == "cpu" else registered()
    return not able.isdisjoint(architectures)


@functools.cache
def registered() -> frozenset[str]:
    """Return the architectures in vLLM's registry; none if it is not installed."""
    for statement in source(_REGISTRY).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name == _TABLE:
                return frozenset(str(key.value) for key in keys if isinstance(key, ast.Constant))
    return frozenset()


SERVED_ON_CPU = frozenset({"FalconForCausalLM", "GPTJForCausalLM"})
"""Those that the rolling batch of transformers cannot serve, and whose tokens on the CPU are those of transformers.

`python -m benchmarks.zoo --vllm` finds them out: vLLM registers more, for which it has no kernel there.
"""
