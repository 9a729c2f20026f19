"""Finds the mixers of a model with states, for any architecture, and which arguments have a row for each token."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from handlers.checkpoints.placement import main_device
from handlers.rolling_batch.attention.pass_inputs import PassInputs
from handlers.rolling_batch.attention.probe import UnsupportedAttentionError
from handlers.rolling_batch.states.forms import CacheForm, Form, LayerCache, own_forms

_WITH_STATES = {"conv", "linear_attention", "hybrid", "hybrid_sliding"}  # kinds of layers, as transformers names them
_CACHES = ("cache_params", "past_key_values")  # the arguments that are a cache
_ROWS = (5, 7)  # of the two passes that are compared

Path = tuple[int | str, ...]


@dataclass(frozen=True)
class Mixer:
    """A module that keeps states, how it takes them, and where its arguments and outputs have a row for each token.

    `inputs` and `outputs` map places to the dimension of the rows; all else is the same for every row, or left out.
    `is_plain`: its output is one tensor. `unread` are linear layers whose weights it reads without calling them.
    """

    module: Any
    form: Form
    inputs: Mapping[Path, int]
    outputs: Mapping[Path, int]
    is_plain: bool
    unread: frozenset[Any] = frozenset()


def keeps_states(model: Any) -> bool:
    """Whether the model keeps states besides keys and values, by its configuration."""
    if getattr(model, "_is_stateful", False):
        return True
    try:
        kinds, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    except (AttributeError, TypeError, ValueError):  # a configuration without layers of a kind that transformers knows
        return False
    return not _WITH_STATES.isdisjoint(kinds)


def find_mixers(model: Any, inputs: PassInputs) -> list[Mixer]:
    """Return the mixers of `model`, which computes `inputs`, in the order of calls. Raises UnsupportedAttentionError.

    Every module that takes a cache gets a recording one of its own in a pass over a few tokens. The modules that write
    to it are the mixers; if one contains another, the outer one is.
    """
    if not keeps_states(model):
        return []
    own = own_forms(model)
    if not own:
        candidates = [module for module in model.modules() if _cache_name(module) is not None]
        recorded = _record(
            model, inputs, [module for module in candidates if not isinstance(module, PreTrainedModel)], {}
        )
        writers = [call.module for call in recorded if any(call.cache.states())]
        modules = [module for module in writers if not any(_contains(outer, module) for outer in writers)]
    else:
        modules = list(own)
    few, more = ([_checked(call) for call in _record(model, inputs, modules, own, rows)] for rows in _ROWS)
    if sorted(map(id, modules)) != sorted(id(call.module) for call in more):
        raise UnsupportedAttentionError(f"{type(model).__name__} calls a layer with a state several times in a pass")
    return [_mixer(one, other, own) for one, other in zip(few, more, strict=True)]


@dataclass
class _Recorded:
    """One call of a module, and the linear layers in it that were called."""

    module: Any
    cache: LayerCache
    place: int | str | None  # of the cache among the arguments
    inputs: dict[Path, torch.Size] = field(default_factory=dict)
    outputs: dict[Path, torch.Size] = field(default_factory=dict)
    is_plain: bool = True
    called: set[Any] = field(default_factory=set)


def _record(
    model: Any, inputs: PassInputs, modules: list[Any], own: Mapping[Any, Form], rows: int = _ROWS[0]
) -> list[_Recorded]:
    """Run `rows` tokens through the model; return the calls of `modules`."""
    calls: list[_Recorded] = []

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _Recorded(module, LayerCache(), None if module in own else _place(module, args, kwargs))
        call.inputs = dict(_shapes(args)) | dict(_shapes(kwargs))
        calls.append(call)
        if call.place is None:
            return None
        if isinstance(call.place, str):
            return args, {**kwargs, call.place: _Recording(call.cache)}
        return (*args[: call.place], _Recording(call.cache), *args[call.place + 1 :]), kwargs

    def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = next(call for call in reversed(calls) if call.module is module)
        call.is_plain = isinstance(output, torch.Tensor)
        call.outputs = dict(_shapes((output,) if call.is_plain else output))

    def linear_called(module: Any, inputs: Any, output: Any) -> None:
        calls[-1].called.add(module)

    with _hooks(modules, before, after, linear_called), torch.inference_mode():
        numbers = torch.arange(rows, device=main_device(model))[None]
        model(**inputs(numbers, numbers))
    return calls


@contextmanager
def _hooks(modules: list[Any], before: Any, after: Any, linear_called: Any) -> Iterator[None]:
    linears = {linear for module in modules for linear in module.modules() if isinstance(linear, nn.Linear)}
    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(after, with_kwargs=True) for module in modules]
    hooks += [linear.register_forward_hook(linear_called) for linear in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Recording(LayerCache):
    """A cache that also takes keys and values, and returns them unchanged, for modules with attention."""

    def __init__(self, cache: LayerCache) -> None:
        self.layer, self.layers = cache.layer, cache.layers

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *more: Any) -> Any:
        return keys, values

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        return keys

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def _cache_name(module: Any) -> str | None:
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in _CACHES if name in parameters), None)


def _place(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str:
    """Return where a call has the cache: its position, or its name."""
    name = _cache_name(module)
    assert name is not None
    position = list(inspect.signature(module.forward).parameters).index(name)
    return position if position < len(args) and name not in kwargs else name


def _shapes(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Size]]:
    """Yield the places of the tensors in arguments or outputs, and their shapes."""
    if isinstance(value, torch.Tensor):
        yield path, value.shape
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from _shapes(part, (*path, index))
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _shapes(part, (*path, name))


def _contains(outer: Any, module: Any) -> bool:
    return outer is not module and any(inner is module for inner in outer.modules())


def _checked(call: _Recorded) -> _Recorded:
    if not call.outputs:
        raise UnsupportedAttentionError(f"{type(call.module).__name__} keeps a state and returns no tensor")
    return call


def _mixer(few: _Recorded, more: _Recorded, own: Mapping[Any, Form]) -> Mixer:
    """Compare the calls with fewer and more rows."""
    module = more.module
    inputs, outputs = _varying(few.inputs, more.inputs, module), _varying(few.outputs, more.outputs, module)
    if not inputs or not outputs:
        raise UnsupportedAttentionError(f"{type(module).__name__} keeps a state and has no rows")
    form = own.get(module)
    if form is None:
        assert more.place is not None
        form = CacheForm(module, more.place)
        form.record(more.cache)
    linears = {linear for linear in module.modules() if isinstance(linear, nn.Linear)}
    return Mixer(module, form, inputs, outputs, more.is_plain, frozenset(linears - more.called))


def _varying(few: Mapping[Path, torch.Size], more: Mapping[Path, torch.Size], module: Any) -> dict[Path, int]:
    """Return the places whose shapes vary with the number of rows, with the dimension that does."""
    found: dict[Path, int] = {}
    for path, shape in more.items():
        dims = [dim for dim, size in enumerate(shape) if path in few and few[path][dim] != size]
        if len(dims) > 1:
            raise UnsupportedAttentionError(f"{type(module).__name__} takes a mask of its own beside its state")
        if dims:
            found[path] = dims[0]
    return found
