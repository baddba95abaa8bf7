"""Whether a run is the one that its block says it was planned for; where not, a warning."""

from __future__ import annotations

import logging

from dsx.comm.world import World
from dsx.config.schema import DsxConfig
from dsx.core.engine import EngineAdapter
from dsx.plan.model_files import of_deepspeed
from dsx.plan.stage_weights import stage_shapes

logger = logging.getLogger(__name__)

_OF_ANOTHER = "what dsx dry-run and dsx memory say of this configuration is of another run"


def tell_of_plan(adapter: EngineAdapter, world: World, config: DsxConfig) -> None:
    """Compare the ranks of this cluster, and the parameters of its first stage, on its first rank.

    A model's file that is not there, or not to be seen, is passed over: a host that trains has no
    need of it. So is one beside an engine whose own flags tell the model, as Megatron's do: it is
    of a DeepSpeed JSON.
    """
    plan = config.plan
    if world.rank:
        return
    if plan.ranks_per_cluster not in (None, world.world_size):
        logger.warning(
            "dsx.plan.ranks_per_cluster=%d, and this cluster has %d ranks: %s; write the number "
            "that it has",
            plan.ranks_per_cluster, world.world_size, _OF_ANOTHER,
        )  # fmt: skip
    if adapter.tells_model:
        return
    if (file := plan.model_file()) is None:
        return
    try:
        files = of_deepspeed(config.given, file, world.world_size, file)
        count = files.cluster.pipeline
        if count != adapter.stage.count:
            raise ValueError(f"it has {count} pipeline stages, and the run {adapter.stage.count}")
        planned = sum(p.numel for p in stage_shapes(files.model, files.cluster, adapter.stage))
    except ValueError as error:
        logger.warning("dsx.plan.model=%r is not compared with the run: %s", plan.model, error)
        return
    own = sum(p.numel for of_fragment in adapter.fragment_parameters for p in of_fragment)
    if own != planned:
        where = " in the first pipeline stage" if count > 1 else ""
        logger.warning(
            "dsx.plan.model=%r has %d parameters%s, and the run trains %d: %s; write the sizes "
            "that it has",
            plan.model, planned, where, own, _OF_ANOTHER,
        )  # fmt: skip
