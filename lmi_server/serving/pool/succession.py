"""What the successor of a pool is started with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lmi_server.serving.adapters.adapters import RegisteredAdapter
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.serving.pool_settings import PoolSettings


async def successor_settings(pool: WorkerPool, settings: PoolSettings) -> PoolSettings:
    """Return `settings` for the successor of `pool`, with the changes by calls there.

    These are the adapters, and the numbers of workers. Adapters that requests have brought stay where they are.
    """
    return msgspec.structs.replace(
        settings,
        adapters=await _adapters_as_changed(pool, settings.adapters),
        own_adapters=settings.adapters,
        bounds=pool.scaling.bounds,
        reserved_numbers=frozenset(pool.roster.numbers.values()),
    )


async def _adapters_as_changed(pool: WorkerPool, own: Sequence[RegisteredAdapter]) -> tuple[RegisteredAdapter, ...]:
    """Return the `own` adapters of a successor, with what calls have registered, changed and removed in `pool`."""
    settings, on_demand = pool.settings, pool.on_demand
    own_before = settings.adapters if settings.own_adapters is None else settings.own_adapters
    before = {each.name: each for each in own_before}
    now = {each.name: each for each in await pool.adapters.all()}
    removed = before.keys() - now.keys()
    changed = {
        name: each
        for name, each in now.items()
        if before.get(name) != each and not (on_demand is not None and on_demand.keeps(name))
    }
    return tuple({**{each.name: each for each in own if each.name not in removed}, **changed}.values())
