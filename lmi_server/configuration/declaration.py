"""What a declared option is made of: `Options`, the base of every options class, and the marks that fields carry.

An option is a pydantic field with a default and a one-line description, and, where its type does not say it all, marks
in `Annotated`. Reading, checking and documentation work on these declarations; adding a key is only that.

    dtype: Annotated[Dtype, Key(also=("option.data_type",))] = Field("auto", description="...")
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class Key:
    """How the option is written, where that is not the field's name: `name` without prefix, `also` in full.

    Of several spellings in one place the first is used, `name` before `also`; where they `must_agree`, giving them
    different values is an error.
    """

    name: str | None = None
    also: tuple[str, ...] = ()
    must_agree: bool = False


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may be given, in words: "true or false"."""

    text: str


@dataclass(frozen=True, slots=True)
class Deprecated:
    """The option still works; `advice` says what to write today.

    Where `becomes` names a key in full and a value, giving "true" is the same as writing that.
    """

    advice: str
    becomes: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class DeprecatedValue:
    """One value of the option still works; `advice` says what to write today."""

    value: str
    advice: str


@dataclass(frozen=True, slots=True)
class Documented:
    """LMI's documentation names another default (or none at all: None); `reason` says why it is not the one here."""

    default: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class NoEffect:
    """The option is documented and accepted, but changes nothing here; `reason` says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Documented values (those for which `applies`) that this version cannot serve; `instead` says what it can."""

    applies: Callable[[Any], bool]
    instead: str

    @classmethod
    def values(cls, *values: Any, instead: str) -> Unavailable:
        return cls(lambda value: value in values, instead)


Mark = Deprecated | DeprecatedValue | Documented | NoEffect | Unavailable


@dataclass(frozen=True, slots=True)
class Option:
    """One declared option: `key` in full ("option.dtype"), its other spellings, and what the reference page needs.

    `choices` are its values where they can be listed.
    """

    field: str
    key: str
    aliases: tuple[str, ...]
    must_agree: bool
    default: Any
    description: str
    allowed: str
    choices: tuple[Any, ...]
    marks: tuple[Mark, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Return every spelling; where several are given, the first of them wins."""
        return (self.key, *self.aliases)


def written(value: object) -> str:
    """Return `value` as it would be written in serving.properties; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(written, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class Conflict:
    """Options that do not go together: `keys` in full, the one to name first; `text` says what is allowed or why."""

    keys: tuple[str, ...]
    text: str


class Options(BaseModel):
    """Base of the options classes: frozen, and built from strings as they stand in files and variables."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    prefix: ClassVar[str] = ""

    def unavailable(self) -> Iterator[Conflict]:
        """Yield what is right and what this version cannot serve, where one value alone does not tell."""
        yield from ()

    @classmethod
    def declared(cls) -> tuple[Option, ...]:
        """Return the options of this class and of its bases, in the order of their declaration."""
        return tuple(_option(cls.prefix, name, info) for name, info in cls.model_fields.items())


def _option(prefix: str, field: str, info: FieldInfo) -> Option:
    key = next((mark for mark in info.metadata if isinstance(mark, Key)), Key())
    return Option(
        field=field,
        key=prefix + (key.name or field),
        aliases=key.also,
        must_agree=key.must_agree,
        default=info.get_default(call_default_factory=False),
        description=info.description or "",
        allowed=_allowed(info.annotation, info.metadata),
        choices=tuple(_choices(info.annotation)),
        marks=tuple(mark for mark in info.metadata if isinstance(mark, Mark)),
    )


def _choices(annotation: Any) -> Iterator[Any]:
    if annotation is bool:
        yield from (True, False)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Annotated, Union, types.UnionType):
        for member in get_args(annotation):
            yield from _choices(member)


def _allowed(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    for mark in metadata:
        if isinstance(mark, Allowed):
            return mark.text
    return " or ".join(dict.fromkeys(_parts(annotation)))


def _parts(annotation: Any) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield _allowed(annotation.__origin__, annotation.__metadata__)
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
