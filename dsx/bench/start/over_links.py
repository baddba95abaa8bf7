"""Starts over secured links: keys of all clusters, what ranks ask each other, and gateways.

Every cluster's ranks are on this host, behind one gateway; on hosts of their own each host has one.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from dsx.bench.start.job import Job
from dsx.comm.world import World


@contextlib.contextmanager
def keys_of(num_clusters: int) -> Generator[list[str]]:
    """Yield a folder of keys for each cluster, with the public ones of all; none for 0."""
    if not num_clusters:
        yield []
        return
    from dsx.comm.links.key_changes import add_key, make_key

    with tempfile.TemporaryDirectory(prefix="dsx-bench-start-") as place:
        names = [name_of(cluster) for cluster in range(num_clusters)]
        folders = [Path(place, name) for name in names]
        made = [make_key(folder, name)[0] for folder, name in zip(folders, names, strict=True)]
        for folder, key in itertools.product(folders, made):
            add_key(folder, key)
        yield [str(folder) for folder in folders]


def name_of(cluster: int) -> str:
    """Return the name of a cluster as a member."""
    return f"cluster-{cluster}"


def link_of(job: Job, cluster: int) -> dict[str, Any]:
    """Return the "link" part of the configuration."""
    places = enumerate(job.called_at)
    return {
        "security": "curve", "keys": job.keys[cluster], "port": job.called_at[cluster],
        "members": [f"{name_of(each)}=127.0.0.1:{port}" for each, port in places],
    }  # fmt: skip


class Asked:
    """How many requests this process has sent to ranks of other clusters, from now on."""

    def __init__(self) -> None:
        from dsx.comm.links.link import Link

        self._count, ask = 0, Link.ask

        def counted(link: Link, whom: tuple[int, int], body: bytes) -> Any:
            self._count += whom != (link.cluster_id, link.rank)
            return ask(link, whom, body)

        setattr(Link, "ask", counted)  # noqa: B010 - with a name of its own for the link

    def __call__(self) -> int:
        """Return it."""
        return self._count


def gateway_of(world: World | None) -> tuple[float | None, int]:
    """Return the processor seconds and connections of the gateway that this rank has started.

    0 where it has started none, and None over gloo.
    """
    if world is None or world.link is None:
        return None, 0
    from dsx.comm.links.host_port import HostGateway

    for each in world.link.held:
        if isinstance(each, HostGateway):
            text = Path(f"/proc/{each.pid}/schedstat").read_text()
            return int(text.split()[0]) / 1e9, each.num_joined
    return 0.0, 0
