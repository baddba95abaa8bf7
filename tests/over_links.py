"""Run a function on the ranks of several clusters, each of its own launcher, joined over links."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dsx
from tests.comm.links.folders import sites
from tests.distributed import free_port, run_distributed

DEADLINE_SECONDS = 60


def run_over_links(
    function: Callable[..., Any],
    num_clusters: int,
    ranks_per_cluster: int,
    *args: Any,
    streams: int = 1,
    timeout_seconds: float = 60.0,
    engine: str = "deepspeed",
) -> list[Any]:
    """Return `function(*args)` of every rank, in rank order, as `run_distributed` does.

    Clusters have keys of their own ("curve"); where they can be called, one port, behind a gateway
    if they have several ranks.
    """
    names = [f"site-{m}" for m in range(num_clusters)]
    ports = [free_port() for _ in range(2 * num_clusters)]
    with tempfile.TemporaryDirectory(prefix="dsx-over-links-") as folder:
        folders = [str(path) for path in sites(Path(folder), *names).values()]
        link = {
            "security": "curve",
            "members": [f"{name}=127.0.0.1:{ports[m]}" for m, name in enumerate(names)],
            "streams": streams,
        }
        results = run_distributed(
            _as_one_of_a_site, num_clusters * ranks_per_cluster, function, args, ranks_per_cluster,
            folders, ports, link, timeout_seconds=timeout_seconds, engine=engine,
        )  # fmt: skip
    for port in ports[:num_clusters]:  # gateways end with those who have started them
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as one:
            one.settimeout(10)
            assert not one.recv(1), f"somebody still listens at port {port}"
    return results


def _as_one_of_a_site(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    ranks_per_cluster: int,
    folders: list[str],
    ports: list[int],
    link: dict[str, Any],
) -> Any:
    """Join as a rank of a launcher that knows its own cluster alone."""
    cluster, rank = divmod(int(os.environ["RANK"]), ranks_per_cluster)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks_per_cluster}
    own["MASTER_PORT"] = ports[len(folders) + cluster]
    os.environ.update({name: str(value) for name, value in own.items()})
    clusters = {
        "num_clusters": len(folders), "cluster_id": cluster, "deadline_seconds": DEADLINE_SECONDS,
    }  # fmt: skip
    link = {**link, "keys": folders[cluster], "port": ports[cluster]}
    dsx.init_distributed({"dsx": {"preset": "diloco", "clusters": clusters, "link": link}})
    return function(*args)
