"""What adapters cost: the same traffic without one, with one, with all by weight, and with one that is merged."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmi_server.client.trial_server import LoadFailedError, TrialServer
from lmi_server.tune.measurement import Traffic

BASE = "base"
_ALONE = 16  # requests, one at a time
_PROBE = "tune-load-probe"
_MERGE_S = 1800.0


@dataclass(frozen=True, slots=True)
class Cost:
    """The figures of one traffic; milliseconds are medians. `reason` says why there are none.

    `prefill_ms` is the time to the first token and `decode_ms` that of each further one, for requests one at a time: no
    waiting is in them. `load_s` is how long it takes to add an adapter.
    """

    traffic: str
    prefill_ms: float | None = None
    decode_ms: float | None = None
    loaded_decode_ms: float | None = None
    output_tokens_per_s: float | None = None
    p99_e2el_ms: float | None = None
    load_s: float | None = None
    reason: str = ""


def adapter_costs(
    server: TrialServer, model: Path, settings: Mapping[str, str], traffic: Traffic, timeout_s: float
) -> list[Cost]:
    """Return the costs of the adapters in the traffic. Raises LoadFailedError if the model does not load."""
    traffic = replace(traffic, target=traffic.target.at(server.url))
    heaviest = max((name for name in traffic.weights if name != BASE), key=lambda name: traffic.weights[name])
    server.load(str(model), settings, timeout_s)
    try:
        costs = list(_of_traffic(server, model, traffic, heaviest))
    finally:
        server.unload()
    return [*costs, _cost_of_merged(server, model, settings, traffic, heaviest, timeout_s)]


def _of_traffic(server: TrialServer, model: Path, traffic: Traffic, heaviest: str) -> Iterator[Cost]:
    yield _cost(BASE, replace(traffic, weights={}))
    one = _cost(f"one adapter, {heaviest}", replace(traffic, weights={heaviest: 1.0}))
    yield replace(one, load_s=_load_time(server, model / "adapters" / heaviest))
    yield _cost("all, by their weights", traffic)


def _cost(title: str, traffic: Traffic) -> Cost:
    traffic.run(1, 2, 0)  # the first requests of a kind compile and allocate
    alone = traffic.run(1, min(traffic.requests, _ALONE), 1)
    loaded = traffic.run(traffic.concurrency, traffic.requests, 2)
    errors = [*alone["errors"], *loaded["errors"]]
    if errors:
        return Cost(title, reason=errors[0])
    return Cost(
        title,
        _median(alone, "ttft"),
        _median(alone, "tpot"),
        _median(loaded, "tpot"),
        loaded["output_tokens_per_s"],
        loaded["e2el_ms"].get("p99"),
    )


def _median(figures: Mapping[str, Any], latency: str) -> float | None:
    value: float | None = figures[f"{latency}_ms"].get("median")
    return value


def _load_time(server: TrialServer, adapter: Path) -> float | None:
    """Return the seconds in which the adapter is added under another name; None if it cannot be."""
    began = time.monotonic()
    try:
        server.add_adapter(_PROBE, adapter)
    except LoadFailedError:
        return None
    return time.monotonic() - began


def _cost_of_merged(
    server: TrialServer, model: Path, settings: Mapping[str, str], traffic: Traffic, adapter: str, timeout_s: float
) -> Cost:
    title = f"{adapter}, merged into the model"
    source = model / "adapters" / adapter
    if not (model / "config.json").is_file() or not (source / "adapter_config.json").is_file():
        return Cost(title, reason="only a checkpoint and an adapter of peft in the model directory can be merged")
    with tempfile.TemporaryDirectory(prefix="lmi-tune-") as out:
        command = [sys.executable, "-m", "lmi_server.tune.merging", str(model), str(source), out]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MERGE_S, check=False)
        if done.returncode:
            return Cost(title, reason=f"it cannot be merged: {done.stderr.strip().splitlines()[-1]}")
        try:
            server.load(out, settings, timeout_s)
            return _cost(title, replace(traffic, weights={}))
        except LoadFailedError as error:
            return Cost(title, reason=f"it does not load: {error}")
        finally:
            server.unload()
