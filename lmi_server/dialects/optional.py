"""The dialects that are optional features: each declares an `OptionalDialect`, which the table of features names.

Without its entry a dialect has no paths, and is not imported.
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.generation import GenerationRequest
from lmi_server.contract.protocol import Input
from lmi_server.dialects.fields import Field
from lmi_server.dialects.routes import OPENAI_ROUTES
from lmi_server.features import FEATURES, load

if TYPE_CHECKING:  # errors.py, which these import, reads this table
    from lmi_server.dialects.base import Exchange, ServedModel

Schema = dict[str, Any]


class TokenCount(NamedTuple):
    """How a request for the number of its tokens is read (with warnings), and the number written."""

    parse: Callable[[Input, ServedModel], tuple[GenerationRequest, tuple[str, ...]]]
    body: Callable[[int], bytes]


class StreamTranslation(Protocol):
    """Turns the pieces of LMI's stream into those of a dialect."""

    def piece(self, data: bytes) -> bytes:
        """Return what a piece becomes; it may be empty."""

    def end(self) -> bytes:
        """Return the end of the stream."""


class Translation(NamedTuple):
    """How a request to a model that generates no text becomes one of LMI's, and the answer of LMI one of the dialect.

    `read` returns what the others take first, and LMI's request. `write` and `stream` also take the name of the model;
    `write` gets LMI's answer, and `error` an error, which it may return with the names of the dialect. A stream stays
    as it is without `stream`, which gets the pieces of an AsyncRequestHandler.
    """

    read: Callable[[Input], tuple[Any, Input]]
    write: Callable[[Any, str, bytes], tuple[list[tuple[str, str]], bytes]]
    stream: Callable[[Any, str], StreamTranslation] | None = None
    error: Callable[[Any, LmiServerError], LmiServerError] = lambda asked, error: error


class ErrorForm(NamedTuple):
    """How errors read: `write` takes also OpenAI's status and the id of the request, and returns status and body.

    `event` is the name of the event with which a stream fails, "" if events have no names; `name` and `properties` are
    those of the schema.
    """

    write: Callable[[LmiServerError, int, str], tuple[int, dict[str, object]]]
    event: str
    name: str
    properties: Schema


class ModelListForm(NamedTuple):
    """How models read, each with its name and the time.time() at which it was registered.

    `page` takes all models and the query, and may raise BadParameterError; errors have the form of `route`.
    """

    page: Callable[[Sequence[tuple[str, float]], Mapping[str, str]], dict[str, Any]]
    entry: Callable[[str, float], dict[str, Any]]
    route: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalDialect:
    """One dialect. `paths` has the route of each path that is always the same.

    `model_lists` are by the header of requests for /v1/models that asks for them; everything else is by route.
    `summaries` say what a route does, for the OpenAPI document; `bodies` are the fields of requests, their type, or
    their schema, and `body_types` the content types of other bodies than JSON. Answers repeat the id of the request in
    the header of `id_headers`.

    `model_fields` is the field of the body that names the model, `chats` the one with a conversation. `streams` are the
    routes whose answers always are streams. `errors_below` are by the first part of a path.
    """

    summaries: Mapping[str, str]
    paths: Mapping[str, str] = field(default_factory=dict)
    parsers: Mapping[str, Callable[[Input, ServedModel], Exchange]] = field(default_factory=dict)
    counts: Mapping[str, TokenCount] = field(default_factory=dict)
    translations: Mapping[str, Translation] = field(default_factory=dict)
    bodies: Mapping[str, Mapping[str, Field] | type | Schema] = field(default_factory=dict)
    body_types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    model_fields: Mapping[str, str] = field(default_factory=dict)
    chats: Mapping[str, str] = field(default_factory=dict)
    streams: Mapping[str, bool] = field(default_factory=dict)
    errors: Mapping[str, ErrorForm] = field(default_factory=dict)
    errors_below: Mapping[str, ErrorForm] = field(default_factory=dict)
    id_headers: Mapping[str, bytes] = field(default_factory=dict)
    model_lists: Mapping[str, ModelListForm] = field(default_factory=dict)


@functools.cache
def optional_dialects() -> OptionalDialect:
    """Return all dialects of the table as one."""
    found = [cast(OptionalDialect, load(feature.dialect)) for feature in FEATURES if feature.dialect]
    tables = {each.name: [getattr(dialect, each.name) for dialect in found] for each in fields(OptionalDialect)}
    return OptionalDialect(**{name: dict(ChainMap(*each)) for name, each in tables.items()})


@functools.cache
def model_in_body() -> frozenset[str]:
    """Return the routes whose bodies name the model; one that is not served is refused."""
    return OPENAI_ROUTES | optional_dialects().model_fields.keys()
