"""The further bundles of a replica's placement group: each is taken for one rank, and lends its devices to the replica.

The ranks themselves are processes that the replica starts (the MPI engine), so all bundles must be on its node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lmi_server.machine.environment import process_environment

# By Ray's name of a resource, the variables that say which devices a process sees. Ray sets that of the vendor.
_VISIBLE: Mapping[str, Sequence[str]] = {
    "GPU": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "neuron_cores": ("NEURON_RT_VISIBLE_CORES",),
}


Place = tuple[str, Mapping[str, Sequence[str]]]


class RankReservation:
    """Takes the resources of one bundle for as long as the replica lives."""

    def place(self) -> Place:
        """Return the node, and the numbers of the devices on it by Ray's name of their kind."""
        return _place()


class RankReservations:
    """The ranks of this replica but for the first one, which has the bundle of the replica's actor."""

    def __init__(self) -> None:
        group: PlacementGroup | None = ray.util.get_current_placement_group()
        bundles = [] if group is None else group.bundle_specs[1:]
        self._actors = [_rank(group, index, bundle) for index, bundle in enumerate(bundles, start=1)]

    async def variables(self) -> Mapping[str, str]:
        """Return the variables with which the process of the replica sees the devices of all its ranks.

        Raises RuntimeError if one of them is on another node.
        """
        if not self._actors:
            return {}
        further: Sequence[Place] = await asyncio.gather(*(rank.place.remote() for rank in self._actors))
        own = _place()
        if any(node != own[0] for node, _ in further):
            raise RuntimeError("the ranks of a replica are on several nodes; set placement_strategy to STRICT_PACK")
        devices = {kind: [number for _, held in (own, *further) for number in held.get(kind, ())] for kind in _VISIBLE}
        return {_variable(kind): ",".join(numbers) for kind, numbers in devices.items() if numbers}


def _place() -> Place:
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()


def _variable(kind: str) -> str:
    """Return the variable that Ray has set for the actor; the last one if it has set none."""
    *others, last = _VISIBLE[kind]
    return next((name for name in others if name in process_environment()), last)


def _rank(group: PlacementGroup, index: int, bundle: Mapping[str, float]) -> Any:
    custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    return (
        ray.remote(RankReservation)
        .options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources=custom,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        .remote()
    )
