"""The list of models as Anthropic's API has it, in pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from lmi_server.contract.errors import BadParameterError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects.anthropic.route_names import MESSAGES
from lmi_server.dialects.optional import ModelListForm

_PAGE = 20
_MAX_PAGE = 1000


def _entry(name: str, created: float) -> dict[str, Any]:
    """Return Anthropic's model object."""
    moment = datetime.fromtimestamp(int(created), UTC)
    return {"type": "model", "id": name, "display_name": name, "created_at": moment.strftime("%Y-%m-%dT%H:%M:%SZ")}


def _page(models: Sequence[tuple[str, float]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of the list that `limit`, `after_id` and `before_id` ask for. Raises BadParameterError."""
    limit = _limit(query.get("limit", "").strip())
    names = [name for name, _ in models]
    start = _place_in(names, "after_id", query["after_id"]) + 1 if "after_id" in query else 0
    end = _place_in(names, "before_id", query["before_id"]) if "before_id" in query else len(names)
    backwards = "before_id" in query and "after_id" not in query
    shown = models[start:end][-limit:] if backwards else models[start:end][:limit]
    return {
        "data": [_entry(*each) for each in shown],
        "has_more": len(shown) < len(models[start:end]),
        "first_id": shown[0][0] if shown else None,
        "last_id": shown[-1][0] if shown else None,
    }


def _limit(text: str) -> int:
    digits = text.lstrip("0")
    if not text:
        return _PAGE
    if not (text.isascii() and text.isdecimal() and digits and len(digits) <= 4 and int(digits) <= _MAX_PAGE):
        raise BadParameterError(f'Parameter limit is "{excerpt(text)}"; it takes 1 to {_MAX_PAGE}')
    return int(digits)


def _place_in(names: Sequence[str], parameter: str, name: str) -> int:
    if name not in names:
        raise BadParameterError(f'Parameter {parameter} is "{excerpt(name)}", no model of the list; send an id from it')
    return names.index(name)


FORM = ModelListForm(_page, _entry, MESSAGES)
