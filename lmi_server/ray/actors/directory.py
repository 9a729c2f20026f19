"""What front ends are told: which models there are, and where the replicas of each are. Plain data, without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lmi_server.ray.messages import ClusterModels, ModelReplicas, ReplicaReady
from lmi_server.supervisor.launch.remote import RemotePlace


class Directory:
    """Joins the config of an ingress and the replicas that the routers of its deployments report.

    The two come in any order: replicas of a model with a new name may run before the ingress knows the name.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # of models, by deployment
        self._announced: dict[str, Mapping[str, ReplicaReady]] = {}  # the replicas that run, by deployment and id
        self._replicas: dict[str, ModelReplicas] = {}  # by the name of the model

    def models(self) -> ClusterModels:
        """Return what front ends are told."""
        return ClusterModels(list(self._replicas.values()))

    def deployment_of(self, name: str) -> str | None:
        """Return the deployment of a model, None if there is no such model."""
        return next((deployment for deployment, known in self._names.items() if known == name), None)

    def configure(self, models: Sequence[Mapping[str, Any]]) -> None:
        """Have these models and no others: ModelReplicas without places, with the name of each deployment."""
        self._names = {entry["deployment"]: entry["name"] for entry in models}
        before = self._replicas
        self._replicas = {
            entry["name"]: msgspec.structs.replace(
                before.get(entry["name"], _NO_REPLICAS),
                name=entry["name"],
                aliases=tuple(entry["aliases"]),
                min_replicas=entry["min_replicas"],
                max_replicas=entry["max_replicas"],
            )
            for entry in models
        }
        self._announced = {each: replicas for each, replicas in self._announced.items() if each in self._names}
        for deployment in self._announced:
            self._place(deployment)

    def announce(self, deployment: str, announced: Mapping[str, str]) -> bool:
        """Take the announcements of the replicas of a running deployment; return whether front ends must hear of it."""
        if deployment not in self._names:
            return False
        self._announced[deployment] = {
            replica: msgspec.json.decode(text, type=ReplicaReady) for replica, text in announced.items()
        }
        return self._place(deployment)

    def describe(self, deployment: str, announced: str) -> bool:
        """Take from a replica what its model is, since it may end before the router hears of it; as `announce`."""
        name, serving = self._names.get(deployment), msgspec.json.decode(announced, type=ReplicaReady)
        if name != serving.name or self._replicas[name].model is not None:
            return False
        self._replicas[name] = msgspec.structs.replace(self._replicas[name], model=serving.model)
        return True

    def _place(self, deployment: str) -> bool:
        """Have the replicas of a deployment in the places of its model; return whether that changes anything."""
        name = self._names[deployment]
        before = self._replicas[name]
        # A model may have another name now, which replicas of its old version refuse.
        serving = {replica: there for replica, there in self._announced[deployment].items() if there.name == name}
        places: dict[str, RemotePlace] = {replica: there.place for replica, there in serving.items()}
        # Of a new version the new replicas are right; old ones may stay for some minutes.
        models = [there.model for replica, there in serving.items() if replica not in before.places]
        models = models or [there.model for there in serving.values()]
        model = before.model if before.model in models or not models else models[-1]
        self._replicas[name] = msgspec.structs.replace(before, places=places, model=model)
        return self._replicas[name] != before


_NO_REPLICAS = ModelReplicas(name="", min_replicas=0, max_replicas=0)
