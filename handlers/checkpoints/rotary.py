"""Rotary embeddings whose frequencies depend on the longest position of a pass, as those of Phi 3 and dynamic NTK.

What they compute for a sequence depends on the others of its batch then. `steady_length` reads a config.json alone, so
that a handler can be chosen by it; the module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_KEYS = ("rope_parameters", "rope_scaling")  # the latter in files of transformers 4
_CHANGING = ("dynamic", "longrope", "su")  # "su" is an older name of longrope
_CACHED, _ORIGINAL = "max_seq_len_cached", "original_inv_freq"


def steady_length(config: Mapping[str, Any]) -> int | None:
    """Return up to how many tokens the frequencies stay the same; None if they always do.

    `config` is that of a model of text, or of one with a part for text.
    """
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    lengths = [_length(entry, config) for key in _KEYS for entry in _entries(config.get(key)) if _changes(entry)]
    return min(lengths, default=None)


def _entries(rope: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters, or those of each kind of layer."""
    if isinstance(rope, Mapping):
        yield rope
        yield from (entry for entry in rope.values() if isinstance(entry, Mapping))


def _changes(entry: Mapping[str, Any]) -> bool:
    kind = entry.get("rope_type") or entry.get("type")
    return isinstance(kind, str) and kind.startswith(_CHANGING)


def _length(entry: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    name = "original_max_position_embeddings"
    named = (entry.get(name), config.get(name), config.get("max_position_embeddings"))
    return min((length for length in named if isinstance(length, int) and length > 0), default=0)


class RotaryEmbeddings:
    """What a loaded model has of such embeddings. `steady` is the number of tokens of `steady_length`."""

    def __init__(self, model: Any) -> None:
        self.steady = steady_length(model.config.get_text_config().to_dict())
        changes = self.steady is not None
        self._modules = [module for module in model.modules() if changes and hasattr(module, _CACHED)]

    def may_mix(self, longest: int | None) -> bool:
        """Return whether sequences of several lengths may run together if none gets longer than `longest` tokens."""
        return self.steady is None or (longest is not None and longest <= self.steady)

    def forget(self) -> None:
        """Undo what earlier passes have changed: dynamic frequencies stay those of the longest sequence so far."""
        for module in self._modules:
            names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith(_ORIGINAL)]
            for kind in (name.removesuffix(_ORIGINAL) for name in names):
                now, before = f"{kind}inv_freq", getattr(module, f"{kind}{_ORIGINAL}")
                setattr(module, now, before.to(getattr(module, now).device))
                setattr(module, f"{kind}{_CACHED}", module.original_max_seq_len)
