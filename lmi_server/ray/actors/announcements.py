"""Which replicas of a deployment front ends can connect to: what the routers of a process hear from Ray.

It is not in the module of the router because Ray pickles that by value: the running router has a copy of everything in
its module, and shares this one with the actor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

ANNOUNCEMENT = "lmi_server"
"""The key of a replica's metadata that says where front ends connect to."""

OnReplicas = Callable[[str, Mapping[str, str]], None]
"""Gets the name of a deployment, and the announcement of each replica by its id."""

_watchers: dict[tuple[str, str], OnReplicas] = {}


def watch(app: str, deployment: str, on_replicas: OnReplicas) -> None:
    """Have `on_replicas` called, in the thread of the router, whenever the replicas of a deployment change.

    The router exists once the deployment has a handle in this process.
    """
    _watchers[app, deployment] = on_replicas


def announce(app: str, deployment: str, announcements: Mapping[str, str]) -> None:
    """Tell the watcher of a deployment, if there is one, which replicas run."""
    watcher = _watchers.get((app, deployment))
    if watcher is not None:
        watcher(deployment, announcements)
