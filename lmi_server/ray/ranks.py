"""The further bundles of a replica's placement group: each is taken for one rank, and lends its GPUs to the replica.

The ranks themselves are processes that the replica starts (the MPI engine), so all bundles must be on its node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Rank:
    """Takes the resources of one bundle for as long as the replica lives."""

    def place(self) -> tuple[str, list[str]]:
        """Return the node, and the numbers of the GPUs on it."""
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]


class FurtherRanks:
    """The ranks of the replica that runs here, but for the first one, which has the bundle of the replica's actor."""

    def __init__(self) -> None:
        group: PlacementGroup | None = ray.util.get_current_placement_group()
        bundles = [] if group is None else group.bundle_specs[1:]
        self._actors = [_rank(group, index, bundle) for index, bundle in enumerate(bundles, start=1)]

    async def variables(self) -> Mapping[str, str]:
        """Return the variables with which the process of the replica sees every GPU of its ranks.

        Raises RuntimeError if one of them is on another node.
        """
        if not self._actors:
            return {}
        places: Sequence[tuple[str, list[str]]] = await asyncio.gather(*(rank.place.remote() for rank in self._actors))
        context = ray.get_runtime_context()
        if any(node != context.get_node_id() for node, _ in places):
            raise RuntimeError("the ranks of a replica are on several nodes; set placement_strategy to STRICT_PACK")
        gpus = [*context.get_accelerator_ids()["GPU"], *(gpu for _, gpus in places for gpu in gpus)]
        return {VISIBLE: ",".join(gpus)} if gpus else {}


def _rank(group: PlacementGroup, index: int, bundle: Mapping[str, float]) -> Any:
    custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    return (
        ray.remote(Rank)
        .options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources=custom,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        .remote()
    )
