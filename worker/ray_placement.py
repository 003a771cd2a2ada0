"""Which ranks share a bundle of a placement group, from what nodes offer. Nothing here talks to Ray.

A bundle lies on one node. So a TP group that fits on a node is one bundle, and the group's strategy PACK brings
pipeline stages as near to each other as nodes allow; where TP groups do not fit, each rank is a bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinpool.config import RaySection
from twinpool.errors import ConfigError

Resources = Mapping[str, float]
_EPSILON = 1e-6
"""Ray counts in ten-thousandths, floats do not."""


def rank_needs(ray: RaySection, use_gpu: bool) -> dict[str, float]:
    """What one rank reserves."""
    return {"CPU": ray.cpus_per_rank} | ({"GPU": 1.0} if use_gpu else {})


def room(resources: Resources, needs: Resources) -> int:
    """How many ranks fit into ``resources``."""
    return min(int(resources.get(name, 0.0) / amount + _EPSILON) for name, amount in needs.items())


def ranks_per_bundle(tp_size: int, pp_size: int, own: int, others: Sequence[int]) -> list[int] | None:
    """The number of ranks in each bundle, in the order of ranks; None while nodes are too few.

    ``own`` ranks fit on rank 0's node, which takes the first bundle, and ``others[i]`` on each other node.
    """
    if own >= tp_size and own // tp_size + sum(other // tp_size for other in others) >= pp_size:
        return [tp_size] * pp_size
    size = tp_size * pp_size
    if own >= 1 and own + sum(others) >= size:
        return [1] * size
    return None


def bundle_of_ranks(bundles: Sequence[Resources], needs: Resources, size: int) -> list[int]:
    """For each rank the index of its bundle: ranks fill the bundles in order.

    Raises:
        ConfigError: they do not fit.
    """
    slots = [index for index, bundle in enumerate(bundles) for _ in range(room(bundle, needs))]
    if len(slots) < size:
        raise ConfigError(
            f"the placement group has room for {len(slots)} of {size} ranks of {dict(needs)} each; make "
            "larger bundles, or lower tp_size, pp_size or ray.cpus_per_rank"
        )
    return slots[:size]
