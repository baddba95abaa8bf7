"""Where a rank is, in Lightning's words: a cluster's ranks, their devices and their folders.

A script says `devices` of all that its launcher has started, or of one cluster; either way a
cluster's Trainer has the devices of its own ranks. Checkpoints lie in `cluster_<m>` of the folder
that the script or Lightning has chosen, and so do the files of loggers that write files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from dsx.checkpoint.tags import cluster_directory
from dsx.comm.world import World
from dsx.config.files import ConfigError
from dsx.run.lightning.hooks import around, modules_of
from dsx.run.session import Session

_CLUSTER = re.compile(r"cluster_\d+")


class Local:
    """This cluster's ranks on this host; `offset` is how many of the launcher's come before."""

    def __init__(self, world: World) -> None:
        shared = world.clusters["rendezvous"] == "env://"
        first = world.cluster_id * world.world_size if shared else 0  # of the launcher's ranks
        total = world.world_size * (world.num_clusters if shared else 1)
        own, local = first + world.rank, int(os.environ.get("LOCAL_RANK", "0"))
        self.started = min(int(os.environ.get("LOCAL_WORLD_SIZE", total)), total)
        begin = own - local  # the first rank of this host
        start = max(first, begin)
        self.offset = start - begin
        self.count = min(first + world.world_size, begin + self.started) - start
        self.rank = own - start
        self.node_rank = max(begin - first, 0) // max(self.started, 1)


def replace_places(session: Session, root: str) -> None:
    """Let a Trainer take its devices and its world from this cluster's."""
    connector = modules_of(root)("trainer.connectors.accelerator_connector")
    cls = connector._AcceleratorConnector
    environment = _environment_class(connector.ClusterEnvironment)

    def choose_devices(original: Any, self: Any) -> None:
        original()
        world = session.join()
        if world is not None and self._parallel_devices:
            self._parallel_devices = own_devices(self._parallel_devices, Local(world))

    def choose_environment(original: Any, self: Any) -> Any:
        world = session.join()
        if world is None:
            return original()
        if self._cluster_environment_flag is not None:
            raise ConfigError(
                f"Trainer(plugins=[{type(self._cluster_environment_flag).__name__}()]) says where "
                "the ranks are, which dsx.run has found out already: leave it out"
            )
        return environment(world)

    around(cls, "_set_parallel_devices_and_init_accelerator", choose_devices)
    around(cls, "_choose_and_init_cluster_environment", choose_environment)


def own_devices(devices: list[Any], local: Local) -> list[Any]:
    """Return the devices of this cluster's ranks on this host, of those that a script has named.

    ConfigError if they are neither as many as the launcher has started nor as the cluster has.
    """
    if len(devices) == local.started:
        return devices[local.offset : local.offset + local.count]
    if len(devices) == local.count:
        kind = type(devices[0])
        if local.offset == 0 or devices[0].type == "cpu":
            return devices
        return [kind(device.type, device.index + local.offset) for device in devices]
    if len(devices) == 1 and devices[0].type == "cpu":  # what Lightning takes unless told
        return devices * local.count
    raise ConfigError(
        f"Trainer(devices={len(devices)}): the launcher has started {local.started} rank(s) on "
        f"this host, of which {local.count} are this cluster's: give either number"
    )


def _environment_class(base: Any) -> Any:
    class DsxEnvironment(base):
        """The ranks of this cluster, which a launcher has started."""

        def __init__(self, world: World) -> None:
            super().__init__()
            self._world, self._local = world, Local(world)

        @property
        def creates_processes_externally(self) -> bool:
            return True

        @property
        def main_address(self) -> str:
            return os.environ.get("MASTER_ADDR", "127.0.0.1")

        @property
        def main_port(self) -> int:
            return int(os.environ.get("MASTER_PORT", "29500"))

        @staticmethod
        def detect() -> bool:
            return False

        def world_size(self) -> int:
            return self._world.world_size

        def set_world_size(self, size: int) -> None:
            """Nothing to do: the world stands."""

        def global_rank(self) -> int:
            return self._world.rank

        def set_global_rank(self, rank: int) -> None:
            """Nothing to do: the world stands."""

        def local_rank(self) -> int:
            return self._local.rank

        def node_rank(self) -> int:
            return self._local.node_rank

        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            """Nothing to do: the devices are those of the ranks."""

    return DsxEnvironment


def own_place(path: str | Path, cluster_id: int) -> Path:
    """Return this cluster's place of a checkpoint that a script names, its own or the run's."""
    named = Path(os.path.abspath(os.path.expanduser(path)))
    base = named.parent
    if _CLUSTER.fullmatch(base.name):
        base = base.parent
    return cluster_directory(base, cluster_id) / named.name


def share_log_versions(loggers: list[Any], world: World) -> None:
    """Give each cluster a folder of its own below one version of loggers that write files.

    Collective over all ranks of all clusters, once per fit().
    """
    own = f"cluster_{world.cluster_id}"
    writers = [one for one in loggers if hasattr(one, "_root_dir") and hasattr(one, "_version")]
    told = world.rendezvous.gather("versions of loggers", [_version(one) for one in writers])
    for number, logger in enumerate(writers):
        versions = [of[number] for of in told if number < len(of)]
        chosen = max(versions) if all(isinstance(v, int) for v in versions) else versions[0]
        name = f"version_{chosen}" if isinstance(chosen, int) else str(chosen)
        if Path(str(logger._version)).name != own:
            logger._version = os.path.join(name, own)


def _version(logger: Any) -> Any:
    version = logger.version
    return version if isinstance(version, int) else str(version)


def base_of_checkpoints(callback: Any, trainer: Any) -> Path:
    """Return the folder of a ModelCheckpoint, that of the whole run."""
    folder = Path(os.path.abspath(callback._ModelCheckpoint__resolve_ckpt_dir(trainer)))
    if _CLUSTER.fullmatch(folder.name):
        return folder.parent
    if folder.name == "checkpoints" and _CLUSTER.fullmatch(folder.parent.name):
        return folder.parent.parent / folder.name  # a logger's, with a folder for each cluster
    return folder
