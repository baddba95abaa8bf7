"""`torch.distributed.init_process_group` of a script whose cluster's world is there already.

A script makes a world of all ranks that it sees, and those are its cluster's. Under dsx.run that
world stands before the script begins, where the "dsx" block shows in the launch.
"""

from __future__ import annotations

import functools
import inspect
import logging
from types import ModuleType
from typing import Any

from dsx.comm.cluster_world import limit_collectives
from dsx.comm.world import World, current_world
from dsx.config.files import ConfigError
from dsx.run.session import Session

logger = logging.getLogger(__name__)


def keep_world(session: Session, distributed: ModuleType) -> None:
    """Let a script that makes its world have the one that is there; ConfigError for another one."""
    module: Any = distributed
    original = module.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        world = current_world()
        if world is None or not module.is_initialized() or session.has_met_script:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        require_own_world(given, world)
        session.has_met_script = True  # a second call is the script's own mistake
        if given.get("timeout") is not None:
            limit_collectives(given["timeout"])
        _tell(given.get("backend"), module.get_backend(), world)

    for place in (module, module.distributed_c10d):  # scripts import it from either
        place.init_process_group = init_process_group


def require_own_world(given: dict[str, Any], world: World) -> None:
    """Raise ConfigError for a size, or a rank, that is not of this cluster."""
    own = {"world_size": world.world_size, "rank": world.rank}
    for name, value in own.items():
        asked = given.get(name, -1)
        if asked not in (-1, None, value):
            raise ConfigError(
                f"init_process_group({name}={asked}), and under dsx.run a script's world is that "
                f"of its cluster, where it is {value}: take it from {name.upper()} in the "
                "environment, or leave it out"
            )


def _tell(wanted: Any, backend: str, world: World) -> None:
    if world.rank == 0 and wanted is not None and str(wanted).lower() != backend:
        logger.warning(
            "dsx: init_process_group(%r) of the script takes the world of cluster %d, whose "
            "backend is %s", str(wanted), world.cluster_id, backend,
        )  # fmt: skip
