"""What the keys of a registration name, over the options of all handlers: which one serves is not known yet."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from lmi_server.configuration.declaration import Option
from lmi_server.configuration.handlers import HANDLERS, load_options_type
from lmi_server.configuration.options import ServingOptions
from lmi_server.configuration.references import FOR_OPERATOR, NAMES_MODEL, Reference

_OLD_NAMES = {"option.s3url": NAMES_MODEL}  # LMI's old name of option.model_id


@functools.cache
def references() -> Mapping[str, Reference]:
    """Return what each declared key names, in every spelling; of several handlers, the strictest counts."""
    found = dict(_OLD_NAMES)
    for option in _declared_options():
        for key in option.keys:
            declared = option.reference or FOR_OPERATOR
            found[key] = max(declared, found.get(key, declared), key=lambda reference: reference.kind)
    return MappingProxyType(found)


def _declared_options() -> Iterator[Option]:
    yield from ServingOptions.declared_options()
    for spec in HANDLERS:
        yield from load_options_type(spec).declared_options()
