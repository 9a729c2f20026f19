"""Pages of OpenAI's lists: sorted by the time of creation, which ids begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from frontend.http.parameters import integer
from lmi_server.contract.errors import BadParameterError
from lmi_server.contract.texts.quoting import excerpt

_Record = TypeVar("_Record")


def page_of(ids: Sequence[str], query: Mapping[str, str], largest: int, default: int) -> tuple[list[str], int]:
    """Return the ids that `after` and `order` of a query ask for, and how many of them a page has at most.

    Raises BadParameterError.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadParameterError(f'Parameter order is "{excerpt(order)}"; it takes asc or desc')
    ordered = sorted(ids, reverse=order == "desc")
    after = query.get("after", "")
    if after:
        ordered = [each for each in ordered if (each < after if order == "desc" else each > after)]
    return ordered, limit_of(query, largest, default)


def limit_of(query: Mapping[str, str], largest: int, default: int) -> int:
    """Return how many entries of a list a query asks for at most. Raises BadParameterError."""
    limit = integer(query, "limit", default)
    if not 1 <= limit <= largest:
        raise BadParameterError(f"Parameter limit is {limit}; it takes an integer from 1 to {largest}")
    return limit


def first_of(ids: Iterable[str], limit: int, load: Callable[[str], _Record | None]) -> tuple[list[_Record], bool]:
    """Return the first records that `load` finds for the ids, and whether it finds more than `limit`.

    What it does not find takes no place: a client would take a page without records for the last one.
    """
    found = list(islice((record for each in ids if (record := load(each)) is not None), limit + 1))
    return found[:limit], len(found) > limit


def list_object(objects: Sequence[Mapping[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return OpenAI's list of `objects`."""
    first, last = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    return {"object": "list", "data": list(objects), "first_id": first, "last_id": last, "has_more": has_more}
