"""The layers of the configuration: where values come from, and which of them wins."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from pydantic import ValidationError

from lmi_server.configuration.declaration import Option, Options, validated
from lmi_server.configuration.properties import Properties
from lmi_server.contract.texts.quoting import one_line
from lmi_server.machine.environment import Variable

_AnyOptions = TypeVar("_AnyOptions", bound=Options)
Layer = Literal[
    "command line",  # of the server's own settings only
    "sagemaker",  # SageMaker's overriding variables
    "registration",  # the call that registered the model
    "serving.properties",
    "model file",  # a model file of Ray in place of serving.properties
    "model directory",  # what its files say if there is no serving.properties
    "environment",  # OPTION_* and ARGS_*, HF_MODEL_ID, variables of text-generation-inference
    "engine alias",  # values that engine=MPI and engine=DeepSpeed stand for
    "deprecated key",  # values that a deprecated key stands for
    "recommender",  # values derived from the model and the machine
    "environment default",  # TENSOR_PARALLEL_DEGREE and similar variables, SERVING_*
    "default",
]

DERIVED: tuple[Layer, ...] = ("model directory", "engine alias", "deprecated key", "recommender", "default")
"""Layers of values that no user wrote."""

_BEGINNING = 6  # characters of a key that are enough to find a longer one
_COMMENT = re.compile(r"\s[#!]")


@dataclass(frozen=True, slots=True)
class Source:
    """A value as text (`raw`) with its origin: the layer, and file and line or the name of the variable.

    `spelling` and `written` are key and value as the user wrote them, if they differ from the option's own key and from
    `raw`. For example, engine=MPI gives option.mpi_mode the value true.
    """

    layer: Layer
    raw: str
    file: str | None = None
    line: int | None = None
    variable: str | None = None
    spelling: str | None = None
    written: str | None = None

    @property
    def place(self) -> str:
        """Return file and line, the variable, or the layer, as messages name it."""
        if self.variable is not None:
            return f"variable {self.variable}"
        return f"{self.file}:{self.line}" if self.file is not None else self.layer

    @property
    def is_true(self) -> bool:
        """Whether pydantic takes the text for true, for keys that are read before they are validated."""
        return self.raw.lower() in ("true", "1", "yes", "on", "t", "y")

    def describe(self, key: str) -> str:
        """Return place, key and value, with which every message begins; key and value as the user wrote them."""
        written = self.raw if self.written is None else self.written
        return one_line(f'{self.place}: {self.spelling or key} = "{written}"')


Given = Mapping[str, Source]
"""The values of one layer, or of several merged ones, by key in full."""


@dataclass(frozen=True, slots=True)
class SortedKeys:
    """One layer, or several merged, under the declared spellings: values of `known` options and `unknown` keys."""

    known: Given
    unknown: Given
    warnings: tuple[str, ...]
    problems: tuple[str, ...]


def from_file(properties: Properties, file: str) -> Given:
    return {
        key: Source("serving.properties", entry.value.strip(), file=file, line=entry.line)
        for key, entry in properties.entries.items()
    }


def from_variables(layer: Layer, variables: Iterable[Variable]) -> Given:
    """Return the layer; if several variables give one key, the first wins."""
    given: dict[str, Source] = {}
    for variable in variables:
        given.setdefault(variable.key, Source(layer, variable.value, variable=variable.name))
    return given


def from_values(layer: Layer, values: Mapping[str, str]) -> Given:
    return {key: Source(layer, raw.strip()) for key, raw in values.items()}


def merge(layers: Sequence[Given]) -> Given:
    """Merge the layers, given highest first."""
    merged: dict[str, Source] = {}
    for layer in reversed(layers):
        merged |= layer
    return merged


def without_none(given: Given, declared: Sequence[Option]) -> Given:
    """Leave out options with the value None and no default: by LMI's documents they are not set.

    It also takes back the value of a lower layer, so that layers are merged first.
    """
    written = [option for option in declared if option.key in given and given[option.key].raw == "None"]
    unset = {option.key for option in written if option.default is None}
    return {key: source for key, source in given.items() if key not in unset} if unset else given


def sort_keys(layer: Given, declared: Sequence[Option]) -> SortedKeys:
    """Separate declared from unknown keys, and put other spellings under the option's own key."""
    if not layer:  # as most are
        return SortedKeys({}, {}, (), ())
    known: dict[str, Source] = {}
    warnings: list[str] = []
    problems: list[str] = []
    for option in declared:
        given = [key for key in option.keys if key in layer]  # the first spelling wins
        for key in given[:1]:
            known[option.key] = layer[key] if key == option.key else replace(layer[key], spelling=key)
        for spare in given[1:]:
            source, used = layer[spare], layer[given[0]]
            if not option.must_agree:
                warnings.append(f"{source.place}: {spare} is ignored, because {given[0]} is given too")
            elif source.raw != used.raw:
                text = f'{source.place}: {spare} = "{source.raw}" is not allowed'
                problems.append(f'{text}; allowed: "{used.raw}", since {given[0]} is the same option')
    spelled = {key for option in declared for key in option.keys}
    unknown = {key: source for key, source in layer.items() if key not in spelled}
    empty = [key for key, source in known.items() if not source.raw]
    warnings += [f"{known[key].place}: {known[key].spelling or key} has no value and is ignored" for key in empty]
    return SortedKeys({key: known[key] for key in known if key not in empty}, unknown, tuple(warnings), tuple(problems))


def build(options_type: type[_AnyOptions], sources: Given) -> tuple[_AnyOptions, dict[str, str]]:
    """Return the typed options, and a problem for each key with a wrong value.

    A wrong value has its default in the result, so that later checks can report further problems in the same run.
    """
    declared = {option.field: option for option in options_type.declared_options() if option.key in sources}
    values = {field: sources[option.key].raw for field, option in declared.items()}
    try:
        return validated(options_type, values), {}
    except ValidationError as error:
        # One key may have several errors: each member of a union reports its own.
        wrong = dict.fromkeys(str(detail["loc"][0]) for detail in error.errors())
    sound = {field: value for field, value in values.items() if field not in wrong}
    bad = [option for field, option in declared.items() if field in wrong]
    return validated(options_type, sound), {option.key: _bad_value(option, sources) for option in bad}


def _bad_value(option: Option, sources: Given) -> str:
    source = sources[option.key]
    advice = value_advice(source, option.allowed)
    return f"{source.describe(option.key)} is not allowed; allowed: {option.allowed}{advice}"


def unknown_key_warning(key: str, source: Source, known: Sequence[str], fate: str = "it is ignored") -> str:
    """Return the warning on an undeclared key, with the most similar `known` key."""
    nearest = nearest_key(key, known)
    advice = f"; did you mean {nearest}?" if nearest else ""
    return f"{source.place}: unknown key {key}, {fate}{advice}"


def spellings(declared: Sequence[Option]) -> list[str]:
    """Return every spelling of every option."""
    return [name for option in declared for name in option.keys]


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Return the known key that is most like `key`, ignoring prefix, case and underscores; None if none is."""
    by_core: dict[str, str] = {}
    for name in known:
        by_core.setdefault(_core(name), name)
    core = _core(key)
    longer = [name for name in by_core if len(core) >= _BEGINNING and name.startswith(core)]
    found = [min(longer, key=len)] if longer else difflib.get_close_matches(core, by_core, n=1, cutoff=0.7)
    return by_core[found[0]] if found else None


def value_advice(source: Source, allowed: str) -> str:
    """Return the hint behind the allowed values, for a wrong value that is near one, or has a comment behind it."""
    if _COMMENT.search(source.raw):
        return "; a comment needs a line of its own"
    words = [item.partition(" (")[0] for item in allowed.split(", ")]  # of "bf16 (bfloat16)" the first
    items = {_core(word): word for word in words}
    found = difflib.get_close_matches(_core(source.raw), items, n=1, cutoff=0.7)
    return f"; did you mean {items[found[0]]}?" if found else ""


def _core(key: str) -> str:
    return key.removeprefix("option.").replace("_", "").replace("-", "").lower()
