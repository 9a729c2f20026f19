"""The request router of a model's deployment: it hears from Ray which replicas run, and tells the ingress.

Requests go from the front end to a replica without Ray; the dispatcher decides which replica it is
(`lmi_server.serving.dispatch.dispatcher`). Calls by a handle, which are rare, go to any replica.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from lmi_server.ray.actors.announcements import ANNOUNCEMENT, announce


class AnnouncingRouter(RequestRouter):  # type: ignore[misc]  # Ray is skipped by mypy
    """Passes the running replicas on, and lets a handle call any of them."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas that run now."""
        super().update_replicas(replicas)
        announcements = {
            replica.replica_id.unique_id: str(replica.replica_metadata[ANNOUNCEMENT])
            for replica in replicas
            if ANNOUNCEMENT in replica.replica_metadata
        }
        announce(self._deployment_id.app_name, self._deployment_id.name, announcements)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return every candidate in one rank."""
        return [candidate_replicas]
