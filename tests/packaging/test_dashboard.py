"""The dashboard of deploy/ against Grafana's own schema, as its Foundation SDK for 11.6 has it.

The SDK keeps what the schema names and drops everything else, so a key that Grafana would ignore does not come back.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from paths import ROOT

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "lmi-server.json").read_text(encoding="utf-8"))


def read_and_written(dashboard: dict[str, Any]) -> dict[str, Any]:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    written: dict[str, Any] = json.loads(JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(dashboard))))
    return written


def lost(given: Any, back: Any, path: str = "dashboard") -> list[str]:
    """Return where `given` has something that `back` has not; defaults that were added are no matter."""
    if isinstance(given, dict) and isinstance(back, dict):
        missing = [f"{path}.{key}" for key in given if key not in back]
        return missing + [each for key in given.keys() & back for each in lost(given[key], back[key], f"{path}.{key}")]
    if isinstance(given, list) and isinstance(back, list) and len(given) == len(back):
        return [each for i, item in enumerate(given) for each in lost(item, back[i], f"{path}[{i}]")]
    return [] if given == back else [path]


def test_grafana_knows_every_key() -> None:
    assert lost(DASHBOARD, read_and_written(DASHBOARD)) == []


@pytest.mark.parametrize("within", ["panel", "target", "options", "custom"])
def test_a_key_that_it_does_not_know_is_found(within: str) -> None:
    dashboard = copy.deepcopy(DASHBOARD)
    at, panel = next((at, each) for at, each in enumerate(dashboard["panels"]) if each["type"] == "timeseries")
    places = {
        "panel": (panel, ""),
        "target": (panel["targets"][0], ".targets[0]"),
        "options": (panel["options"], ".options"),
        "custom": (panel["fieldConfig"]["defaults"].setdefault("custom", {}), ".fieldConfig.defaults.custom"),
    }
    place, path = places[within]
    place["noSuchKey"] = 1
    assert lost(dashboard, read_and_written(dashboard)) == [f"dashboard.panels[{at}]{path}.noSuchKey"]


def test_every_query_is_read_as_one_of_prometheus() -> None:
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel
    from grafana_foundation_sdk.models.prometheus import Dataquery

    register_default_plugins()
    panels = [each for each in Dashboard.from_json(copy.deepcopy(DASHBOARD)).panels or () if isinstance(each, Panel)]
    queries = [query for panel in panels for query in panel.targets or ()]
    assert len(queries) == sum(len(panel.get("targets", ())) for panel in DASHBOARD["panels"])
    assert all(isinstance(query, Dataquery) and query.expr for query in queries)


def test_no_two_panels_cover_each_other() -> None:
    """Grafana moves panels that overlap, and its grid has 24 columns."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
