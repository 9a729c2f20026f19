"""Splits a pass at the mixers: sequences that decode are one batch there, and each prompt chunk is a sequence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from handlers.rolling_batch.attention.rows import ChunkRows
from handlers.rolling_batch.schedule.state_table import StateStep
from handlers.rolling_batch.states.forms import Call
from handlers.rolling_batch.states.probe import Mixer, Path
from handlers.rolling_batch.states.store import Segment, StateStore


def install(mixers: list[Mixer], store: StateStore) -> None:
    """Let the mixers compute flat passes over the states of `store`."""
    for number, mixer in enumerate(mixers):
        mixer.module.forward = SplitMixer(mixer, number, store)


def segments_of(
    slots: list[int], positions: list[int], chunks: list[ChunkRows], states: StateStep, device: torch.device
) -> list[Segment]:
    """Return what the rows of a pass are: a token at `positions[i]` of each of `slots`, then `chunks`.

    Sequences at their first token have no state yet, so that they are a segment of their own.
    """
    found = []
    for continues, run in itertools.groupby(range(len(slots)), lambda row: positions[row] > 0):
        own = list(run)
        rows = torch.tensor([states.rows[slots[row]] for row in own], device=device)
        found.append(Segment(own[0], own[-1] + 1, rows, True, continues))
    for chunk in chunks:
        row = torch.tensor([states.rows[chunk.slot]], device=device)
        found.append(Segment(chunk.first, chunk.last, row, False, chunk.start > 0))
    return found


class SplitMixer:
    """Takes the place of a mixer's `forward`: a flat pass in, (1, rows, ...), and a flat pass out."""

    def __init__(self, mixer: Mixer, number: int, store: StateStore) -> None:
        self._mixer, self._number, self._store = mixer, number, store
        self._form = mixer.form
        self._whole = mixer.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        segments = self._store.segments
        if segments is None:
            return self._whole(*args, **kwargs)
        parts = []
        for segment in segments:
            self._store.enter(segment.first, segment.last)
            parts.append(self._compute(segment, (args, kwargs)))
        path, dim = next(iter(self._mixer.inputs.items()))
        rows = _at((args, kwargs), path).shape[dim]
        self._store.enter(0, rows)
        return self._joined(parts, rows - segments[-1].last)

    def _compute(self, segment: Segment, call: Call) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the rows, with the segment's."""
        if segment.continues and self._form.by_token and segment.last - segment.first > 1 and not segment.decodes:
            return self._by_token(segment, call)
        states = self._store.read(self._number, segment.rows) if segment.continues else None
        out, after = self._form.call(_sliced(call, self._mixer.inputs, segment), states)
        self._store.write(self._number, segment.rows, after)
        return self._with_rows(out, segment.decodes)

    def _by_token(self, segment: Segment, call: Call) -> tuple[torch.Tensor, ...]:
        tokens = range(segment.first, segment.last)
        parts = []
        for token in tokens:
            self._store.enter(token, token + 1)
            parts.append(self._compute(replace(segment, first=token, last=token + 1), call))
        return self._cat(parts)

    def _with_rows(self, out: Any, decodes: bool) -> tuple[torch.Tensor, ...]:
        found = []
        for path, dim in self._mixer.outputs.items():
            tensor = _inner((out,) if self._mixer.is_plain else out, path)
            found.append(tensor.transpose(0, dim) if decodes else tensor)
        return tuple(found)

    def _cat(self, parts: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        dims = self._mixer.outputs.values()
        return tuple(
            column[0] if len(column) == 1 else torch.cat(column, dim)
            for column, dim in zip(zip(*parts, strict=True), dims, strict=True)
        )

    def _joined(self, parts: list[tuple[torch.Tensor, ...]], padding: int) -> Any:
        """Return the outputs of all segments in the form of the mixer's own, with zeros for rows of padding."""
        if padding:
            dims = self._mixer.outputs.values()
            parts = [*parts, tuple(_zeros(part, dim, padding) for part, dim in zip(parts[0], dims, strict=True))]
        joined = self._cat(parts)
        if self._mixer.is_plain:
            return joined[0]
        places = [path[0] for path in self._mixer.outputs]
        width = max(int(place) for place in places) + 1
        out: list[Any] = [None] * max(width, 2)
        for place, tensor in zip(places, joined, strict=True):
            out[int(place)] = tensor
        return tuple(out)


def _zeros(like: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    shape = list(like.shape)
    shape[dim] = rows
    return like.new_zeros(shape)


def _sliced(call: Call, inputs: Mapping[Path, int], segment: Segment) -> Call:
    """Return a call with the rows of a segment alone: (1, rows, ...), or (rows, 1, ...) if they decode."""
    args, kwargs = list(call[0]), dict(call[1])
    for path, dim in inputs.items():
        tensor = _at(call, path).narrow(dim, segment.first, segment.last - segment.first)
        tensor = tensor.transpose(0, dim) if segment.decodes else tensor
        place = path[0]
        holder: Any = kwargs if isinstance(place, str) else args
        holder[place] = tensor if len(path) == 1 else _replaced(holder[place], path[1:], tensor)
    return tuple(args), kwargs


def _replaced(value: Any, path: Path, tensor: torch.Tensor) -> Any:
    if not path:
        return tensor
    first, rest = path[0], path[1:]
    if isinstance(value, dict):
        return {**value, first: _replaced(value[first], rest, tensor)}
    assert isinstance(first, int)
    return (*value[:first], _replaced(value[first], rest, tensor), *value[first + 1 :])


def _at(call: Call, path: Path) -> torch.Tensor:
    return _inner(call[1] if isinstance(path[0], str) else call[0], path)


def _inner(value: Any, path: Path) -> torch.Tensor:
    for step in path:
        value = value[step]
    return value
