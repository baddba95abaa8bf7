"""Clusters of two hosts each: launchers over ssh, one for each cluster and one for all.

Skipped, with the reason, where there is no root, no namespaces, no ssh server or no pdsh.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from dsx.bench.namespaces import TestbedUnavailable
from dsx.comm.links.key_changes import add_key, make_key
from tests.installed import needs
from tests.launch.sites_of_hosts import NAMES, SitesOfHosts, wan
from tests.launch.test_launch import BIN, launch, results, write_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
__all__ = ["launch"]
OF_DEEPSPEED = needs("deepspeed")
OF_MEGATRON = needs("megatron")
HERE = Path(__file__).parent
STEPS = ["--steps", 20, "--step-seconds", 0.05]


@pytest.fixture
def sites(tmp_path: Path) -> Generator[SitesOfHosts]:
    try:
        with SitesOfHosts(tmp_path) as made:
            yield made
    except TestbedUnavailable as error:
        pytest.skip(f"no hosts here: {error}")


def hostfile(folder: Path, *names: str) -> Path:
    path = folder / f"{names[0]}.hosts"
    path.write_text("".join(f"{name} slots=1\n" for name in names))
    return path


def config_of(folder: Path, **clusters: Any) -> Path:
    """Write what all hosts read: they share this disk."""
    path = write_config(folder / "ds.json", **clusters)
    config = json.loads(path.read_text())
    config["dsx"]["fragments"]["num_fragments"] = 2
    config["dsx"]["link"] = {"security": "none"}
    path.write_text(json.dumps(config))
    return path


def deepspeed(sites: SitesOfHosts, host: int, hosts: Path, *more: str) -> list[Any]:
    command = [BIN / "deepspeed", "--hostfile", hosts, "--master_port", "29501", *more]
    return sites.on(host, "env", f"PYTHONPATH={HERE.parents[1]}", *command)


def two_launchers(sites: SitesOfHosts, launch: Any, folder: Path, *arguments: Any) -> list[Any]:
    config = config_of(folder, rendezvous=f"tcp://{wan(0)}:29400", join_deadline_seconds=90)
    return [
        launch(NAMES[first], deepspeed(sites, first, hostfile(folder, *NAMES[first : first + 2])),
               "--deepspeed_config", config, *STEPS, "--out", folder / "out",
               "--dsx-cluster-id", cluster, *arguments)
        for cluster, first in enumerate((0, 2))
    ]  # fmt: skip


@OF_DEEPSPEED
def test_a_launcher_for_each_cluster_of_two_hosts(
    sites: SitesOfHosts, launch: Any, tmp_path: Path
) -> None:
    clusters = two_launchers(sites, launch, tmp_path, "--dsx-interface", "wan")
    for cluster in clusters:
        assert cluster.wait(300) == 0, cluster.output()
    told = results(tmp_path / "out")
    assert told[0] == told[1]
    assert len({one["checksum"] for one in told[0]}) == 1 and told[0][0]["step"] == 20
    for first, cluster in zip((0, 2), clusters, strict=True):
        for host in (first, first + 1):  # once a host
            said = f"host {NAMES[host]}: the other clusters reach it by wan ({wan(host)}, "
            assert cluster.output().count(said) == 1, cluster.output()
        assert "inside the cluster gloo takes lan (that of the host's name)" in cluster.output()


@OF_DEEPSPEED
def test_over_links_every_host_is_called_where_the_other_site_reaches_it(
    sites: SitesOfHosts, launch: Any, tmp_path: Path
) -> None:
    """Also the second host of each, whose ranks tell where they are; no interface is named."""
    names = ("oslo", "rome")
    made = [make_key(tmp_path / name, name)[-1] for name in names]
    members = [f"{name}={wan(first)}:29400" for name, first in zip(names, (0, 2), strict=True)]
    clusters: list[Any] = []
    for m, name in enumerate(names):
        add_key(tmp_path / name, made[1 - m])
        config: dict[str, Any] = json.loads(
            config_of(tmp_path, join_deadline_seconds=90).read_text()
        )
        keys = str(tmp_path / name)
        config["dsx"]["link"] = {"security": "curve", "members": members, "keys": keys}
        own = tmp_path / f"{name}.json"
        own.write_text(json.dumps(config))
        hosts = hostfile(tmp_path, *NAMES[2 * m : 2 * m + 2])
        clusters.append(
            launch(name, deepspeed(sites, 2 * m, hosts), "--deepspeed_config", own, *STEPS,
                   "--out", tmp_path / "out", "--dsx-cluster-id", m)
        )  # fmt: skip
    for cluster in clusters:
        assert cluster.wait(300) == 0, cluster.output()
    told = results(tmp_path / "out")
    assert told[0] == told[1] and len({one["checksum"] for one in told[0]}) == 1


@OF_DEEPSPEED
def test_an_interface_that_leads_nowhere_is_named_at_once(
    sites: SitesOfHosts, launch: Any, tmp_path: Path
) -> None:
    """The host's name is of the fast network, whose addresses the other site has as well."""
    clusters = two_launchers(sites, launch, tmp_path)
    for cluster in clusters:
        assert cluster.wait(300) != 0
        said = cluster.output()
        for m in (0, 1):
            assert f"cluster {m} listens at 192.168.1.1 (lan, that of the host's name) on" in said
        assert "by clusters.interface or --dsx-interface there (wan (203.0.113." in said
        assert "Gloo connectFullMesh" not in said


@OF_DEEPSPEED
def test_one_launcher_over_the_hosts_of_both_clusters(
    sites: SitesOfHosts, launch: Any, tmp_path: Path
) -> None:
    config = config_of(tmp_path, interface="wan", join_deadline_seconds=90)
    command = deepspeed(sites, 0, hostfile(tmp_path, *NAMES), "--master_addr", wan(0))
    run = launch("all", command, "--deepspeed_config", config, *STEPS, "--out", tmp_path / "out")
    assert run.wait(300) == 0, run.output()
    told = results(tmp_path / "out")
    assert told[0] == told[1] and len({one["checksum"] for one in told[0]}) == 1


@OF_MEGATRON
def test_torchrun_starts_megatron_on_two_hosts_of_each_cluster(
    sites: SitesOfHosts, launch: Any, tmp_path: Path
) -> None:
    config = config_of(tmp_path, rendezvous=f"tcp://{wan(0)}:29400", join_deadline_seconds=90)
    nodes = [
        launch(
            name,
            sites.on(host, "unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh",
                     "env", f"PYTHONPATH={HERE.parents[1]}", sys.executable,
                     "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", host % 2,
                     "--nproc-per-node", "1", "--master-addr", NAMES[host - host % 2],
                     "--master-port", "29501"),
            "--layout", "pipeline", "--deepspeed_config", config,
            "--stop-file", tmp_path / "stop", "--out", tmp_path / "out",
            "--dsx-cluster-id", host // 2, "--dsx-interface", "wan",
            script=HERE / "train_megatron.py",
        )
        for host, name in enumerate(NAMES)
    ]  # fmt: skip
    nodes[0].wait_for("step 12\n", 300)
    (tmp_path / "stop").touch()
    for node in nodes:
        assert node.wait(120) == 0, node.output()
    told = results(tmp_path / "out")
    assert told[0] == told[1]
