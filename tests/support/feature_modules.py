"""The modules of each optional feature, which its entry in lmi_server/features.py attaches."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

FEATURE_MODULES: Mapping[str, Sequence[str]] = {
    "capture": ("frontend.capture",),
    "sagemaker": ("frontend.sagemaker",),
    "batches": ("frontend.batches", "lmi_server.batches"),
    "stored_responses": ("frontend.stored_responses",),
    "kserve": ("frontend.kserve", "lmi_server.dialects.kserve"),
    "tgi": ("frontend.tgi", "lmi_server.dialects.tgi"),
    "anthropic": ("lmi_server.dialects.anthropic",),
    "speech": ("lmi_server.dialects.speech",),
    "vllm_calls": ("frontend.vllm_calls",),
    "console": ("frontend.console",),
    "traces": ("frontend.observability.traces",),
    "emf": ("frontend.emf",),
    "ray": ("frontend.ray", "lmi_server.ray"),
    "route": ("frontend.route", "lmi_server.route"),
    "bench": ("lmi_server.bench",),
    "verify": ("lmi_server.verify",),
    "canary": ("frontend.canary", "lmi_server.canary"),
    "tune": ("lmi_server.tune",),
    "advise": ("lmi_server.advise",),
    "schema": ("lmi_server.schema",),
    "lsp": ("lmi_server.lsp",),
    "migrate": ("lmi_server.migrate",),
}

BUILT_ON: Mapping[str, Sequence[str]] = {
    "verify": ("bench",),
    "canary": ("bench", "verify"),
    "tune": ("bench",),
    "advise": ("bench",),
}
"""The features that a feature uses: without these it cannot be there."""


_OWNERS = {module: name for name, modules in FEATURE_MODULES.items() for module in modules}
_MOST_PARTS = max(module.count(".") for module in _OWNERS) + 1


@functools.cache
def feature_of(module: str) -> str | None:
    """Return the feature that a module belongs to, None for one of the core."""
    parts = module.split(".", _MOST_PARTS)[:_MOST_PARTS]
    packages = (".".join(parts[:count]) for count in range(2, len(parts) + 1))
    return next((_OWNERS[package] for package in packages if package in _OWNERS), None)
