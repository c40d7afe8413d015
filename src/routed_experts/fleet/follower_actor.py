"""The followers of a replica: the other processes of its engine, as actors in its placement group.

Ray ends them with the replica that made them. A follower that dies ends its replica, as in any group of processes."""

import dataclasses
from typing import Any

from routed_experts.core.dist_config import DistConfig, format_address
from routed_experts.fleet.ports import free_pair
from routed_experts.fleet.ray_runtime import import_ray
from routed_experts.fleet.spec import ReplicaSpec


class FollowerActor:
    """One follower. It loads and compiles as its leader does."""

    def follow(self, spec: ReplicaSpec, dist: DistConfig) -> None:
        """Run this process's part of the engine until its leader ends it."""
        from routed_experts.engine.follower import follow
        from routed_experts.execution.absent_tpu import skip_absent_tpu

        skip_absent_tpu()
        follow(**dataclasses.asdict(spec.args), **spec.parts, dist=dist)


def start_followers(
    spec: ReplicaSpec, *, placement_group: Any, bundle_indices: list[int]
) -> tuple[DistConfig, list[Any]]:
    """Start the followers of the engine that this process leads, one in each bundle, and return the leader's config and
    the actors, which live as long as they are referred to. Raises MachineError where no port is free."""
    ray = import_ray()
    strategies = import_ray("ray.util.scheduling_strategies")
    host = ray.util.get_node_ip_address()
    address = format_address(host, free_pair(host))  # the rendezvous, and JAX's coordinator on the next port
    leader = dataclasses.replace(spec.dist, dist_init_addr=address)
    followers: list[Any] = []
    for rank, index in enumerate(bundle_indices, 1):
        bundle = dict(placement_group.bundle_specs[index])
        num_cpus, num_gpus = bundle.pop("CPU", 0.0), bundle.pop("GPU", 0.0)
        strategy = strategies.PlacementGroupSchedulingStrategy(
            placement_group=placement_group, placement_group_bundle_index=index
        )
        actor = ray.remote(FollowerActor).options(
            num_cpus=num_cpus, num_gpus=num_gpus, resources=bundle, max_restarts=0, scheduling_strategy=strategy
        )
        follower = actor.remote()
        follower.follow.remote(spec, dataclasses.replace(leader, node_rank=rank))
        followers.append(follower)
    return leader, followers
