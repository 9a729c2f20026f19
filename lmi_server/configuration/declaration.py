"""Declarations of options: `Options`, the base of every options class, and the marks that its fields carry.

An option is a pydantic field with a default and a docstring that describes it. Marks in `Annotated` say what the type
cannot say. Reading, checking and the reference page all work on these declarations, so that a new key is one new field.

    dtype: Annotated[Dtype, Key(also=("option.data_type",))] = "auto"
    \"\"\"Data type of weights and KV cache.\"\"\"
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from lmi_server.configuration.references import NAMES_NOTHING, Reference


@dataclass(frozen=True, slots=True)
class Key:
    """The spellings of the option, if they are not the field's name: `name` without prefix, `also` in full.

    If one layer has several spellings, the first wins, `name` before `also`. If they `must_agree`, different values are
    an error.
    """

    name: str | None = None
    also: tuple[str, ...] = ()
    must_agree: bool = False


@dataclass(frozen=True, slots=True)
class Allowed:
    """The allowed values in words: "true or false"."""

    text: str


@dataclass(frozen=True, slots=True)
class Deprecated:
    """The option still works; `advice` names what replaces it.

    If `becomes` names a key in full and a value, the option with the value true means the same.
    """

    advice: str
    becomes: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class DeprecatedValue:
    """One value of the option still works; `advice` names what replaces it."""

    value: str
    advice: str


@dataclass(frozen=True, slots=True)
class ValueMeans:
    """One value of the option, in lower case, stands for `stands_for` (a key in full and a value) and `itself`.

    It does so unless another value of that key is given, which the options class refuses then.
    """

    value: str
    itself: str
    stands_for: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Documented:
    """LMI's documentation has another default (None: none at all); `reason` says why this project differs."""

    default: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class NoEffect:
    """LMI documents the option, and it is accepted, but it changes nothing; `reason` says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unavailable:
    """This version cannot serve the documented values for which `applies` is true; `instead` names the remedy.

    `shown` says in words which values these are, if not all.
    """

    applies: Callable[[Any], bool]
    instead: str
    shown: str = ""

    @classmethod
    def values(cls, *values: Any, instead: str) -> Unavailable:
        return cls(lambda value: value in values, instead)


Mark = Deprecated | DeprecatedValue | Documented | NoEffect | Unavailable | ValueMeans


@dataclass(frozen=True, slots=True)
class Option:
    """One declared option: `key` in full ("option.dtype"), its other spellings, and what the reference page needs.

    `choices` lists its values if they can be listed. `reference` says what its value names, None if it is free text and
    its declaration does not say.
    """

    field: str
    key: str
    aliases: tuple[str, ...]
    must_agree: bool
    default: Any
    allowed: str
    choices: tuple[Any, ...]
    marks: tuple[Mark, ...]
    reference: Reference | None
    declared_by: type[Options] = dataclass_field(compare=False)

    @property
    def description(self) -> str:
        """Return what the option means: the description of its field, or else the docstring below the field."""
        described = self.declared_by.model_fields[self.field].description
        classes = (base for base in self.declared_by.__mro__ if self.field in vars(base).get("__annotations__", ()))
        return described or _docstrings(next(classes)).get(self.field, "")

    @property
    def keys(self) -> tuple[str, ...]:
        """Return every spelling; if a layer has several of them, the first wins."""
        return (self.key, *self.aliases)


def written(value: object) -> str:
    """Return `value` as serving.properties would have it; an empty text for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(written, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class Conflict:
    """Options that do not go together: `keys` in full, the one to blame first; `text` says what is allowed or why."""

    keys: tuple[str, ...]
    text: str


class Options(BaseModel):
    """Base of the options classes: frozen, and built from texts as files and variables hold them."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), defer_build=True)

    prefix: ClassVar[str] = ""

    def unavailable(self) -> Iterator[Conflict]:
        """Yield combinations of valid values that this version cannot serve; marks are for single values."""
        yield from ()

    @classmethod
    def declared_options(cls) -> tuple[Option, ...]:
        """Return the options of this class and of its bases, in the order of their declaration."""
        return _options_of(cls)


_AnyDeclaration = TypeVar("_AnyDeclaration", bound=BaseModel)
_first_use = threading.Lock()


def validated(declaration: type[_AnyDeclaration], values: Any) -> _AnyDeclaration:
    """Return an object of a class that builds its validator at its first use (`defer_build`).

    A start imports many more of these classes than it uses. An older version of pydantic must not build one in two
    threads at once.
    """
    with _first_use:
        declaration.model_rebuild()
    return declaration.model_validate(values)


class FeatureSettings(Options):
    """Base of the settings that an optional feature adds to the server's.

    `after` is the setting behind which they stand in documents. `secrets` hold keys or passwords.
    """

    after: ClassVar[str]
    secrets: ClassVar[tuple[str, ...]] = ()


@functools.cache  # each of the layers of a configuration, and each check of it, asks for them
def _options_of(options: type[Options]) -> tuple[Option, ...]:
    fields = options.model_fields
    return tuple(_option(options, name, fields[name]) for name in _in_order(options))


def _in_order(options: type[Options]) -> Sequence[str]:
    """Return the names of the fields as they are declared; those of a feature stand where its `after` says."""
    parts = feature_parts(options)
    of_features = {name for part in parts for name in part.model_fields}
    names = [name for name in options.model_fields if name not in of_features]
    for part in parts:
        place = names.index(part.after) + 1
        names[place:place] = part.model_fields
    return names


def feature_parts(options: type[Options]) -> Sequence[type[FeatureSettings]]:
    """Return the settings of features that `options` is made of."""
    return [base for base in options.__bases__ if issubclass(base, FeatureSettings) and base is not FeatureSettings]


@functools.cache
def _docstrings(declaring: type) -> Mapping[str, str]:
    """Return the docstring of each field of a class. This reads its source, so no start of a server should ask."""
    try:
        module = ast.parse(inspect.getsource(sys.modules[declaring.__module__]))
    except OSError:  # installed without sources
        return {}
    classes = (node for node in module.body if isinstance(node, ast.ClassDef))
    body = next((node.body for node in classes if node.name == declaring.__qualname__), [])
    return {
        declared.target.id: " ".join(text.value.value.split())
        for declared, text in pairwise(body)
        if isinstance(declared, ast.AnnAssign) and isinstance(declared.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _option(options: type[Options], field: str, info: FieldInfo) -> Option:
    key = next((mark for mark in info.metadata if isinstance(mark, Key)), Key())
    return Option(
        field=field,
        key=options.prefix + (key.name or field),
        aliases=key.also,
        must_agree=key.must_agree,
        default=info.get_default(call_default_factory=False),
        allowed=allowed_values(info.annotation, info.metadata),
        choices=tuple(choices_of(info.annotation)),
        marks=tuple(mark for mark in info.metadata if isinstance(mark, Mark)),
        reference=_reference(info),
        declared_by=options,
    )


def _reference(info: FieldInfo) -> Reference | None:
    marked = next((mark for mark in info.metadata if isinstance(mark, Reference)), None)
    return NAMES_NOTHING if marked is None and not _takes_text(info.annotation) else marked


def _takes_text(annotation: Any) -> bool:
    """Return whether a value may be anything but a number, true or false, or one of the values of a Literal."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _takes_text(annotation.__origin__)
    if origin in (Union, types.UnionType, tuple):
        return any(_takes_text(member) for member in get_args(annotation) if member is not Ellipsis)
    return origin is not Literal and annotation not in (bool, int, float, types.NoneType)


def choices_of(annotation: Any) -> Iterator[Any]:
    """Yield the values of a type, as far as they can be listed."""
    if annotation is bool:
        yield from (True, False)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Annotated, Union, types.UnionType):
        for member in get_args(annotation):
            yield from choices_of(member)


def allowed_values(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """Return in words what a field with this annotation takes; the mark `Allowed` decides if there is one."""
    for mark in metadata:
        if isinstance(mark, Allowed):
            return mark.text
    return " or ".join(dict.fromkeys(_parts(annotation)))


def _parts(annotation: Any) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield allowed_values(annotation.__origin__, annotation.__metadata__)
    elif origin is Literal:
        yield ", ".join(str(value) for value in get_args(annotation))
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _parts(member)
    elif annotation is not types.NoneType:
        yield _NAMES[annotation]


_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
}
