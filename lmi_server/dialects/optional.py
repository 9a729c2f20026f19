"""The dialects that are optional features: each declares an `OptionalDialect`, which the table of features names.

Without its entry a dialect has no paths, and is not imported. How errors read in it stays in errors.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from lmi_server.contract.generation import GenerationRequest
from lmi_server.contract.protocol import Input
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.fields import Field
from lmi_server.features import FEATURES, load

Parser = Callable[[Input, ServedModel], Exchange]
Schema = dict[str, Any]


class TokenCount(NamedTuple):
    """How a request for the number of its tokens is read (with warnings), and the number written."""

    parse: Callable[[Input, ServedModel], tuple[GenerationRequest, tuple[str, ...]]]
    body: Callable[[int], bytes]


class Translation(NamedTuple):
    """How a request to a model that generates no text becomes one of LMI's, and the answer of LMI one of the dialect.

    `read` returns what `write` takes, and LMI's request; `write` takes also the name of the model and LMI's answer.
    """

    read: Callable[[Input], tuple[Any, Input]]
    write: Callable[[Any, str, bytes], tuple[list[tuple[str, str]], bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalDialect:
    """One dialect. `paths` has the route of each path that is always the same; everything else is by route.

    `summaries` say what a route does, for the OpenAPI document; `bodies` are the fields of requests, their type, or
    their schema.
    """

    summaries: Mapping[str, str]
    paths: Mapping[str, str] = field(default_factory=dict)
    parsers: Mapping[str, Parser] = field(default_factory=dict)
    counts: Mapping[str, TokenCount] = field(default_factory=dict)
    translations: Mapping[str, Translation] = field(default_factory=dict)
    bodies: Mapping[str, Mapping[str, Field] | type | Schema] = field(default_factory=dict)


@functools.cache
def optional_dialects() -> OptionalDialect:
    """Return all dialects of the table as one."""
    found = [cast(OptionalDialect, load(feature.dialect)) for feature in FEATURES if feature.dialect]
    return OptionalDialect(
        summaries={route: summary for each in found for route, summary in each.summaries.items()},
        paths={path: route for each in found for path, route in each.paths.items()},
        parsers={route: parser for each in found for route, parser in each.parsers.items()},
        counts={route: count for each in found for route, count in each.counts.items()},
        translations={route: translation for each in found for route, translation in each.translations.items()},
        bodies={route: body for each in found for route, body in each.bodies.items()},
    )
