"""Two launchers at sites that nobody can call, with a relay between them: a run from end to end.

Each site is a namespace with one line, behind a router of its own that hides it (NAT, which takes
`nft`), or straight to the relay's host, which passes nothing on. Skipped, with the reason, where
there is no root or no support for namespaces.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from dsx.bench.namespaces import TestbedUnavailable, remove_namespaces, require_tools, run_ip
from dsx.comm.links.key_changes import add_key, make_key
from tests.installed import needs
from tests.launch.test_launch import BIN, launch, results, write_config

pytestmark = [needs("deepspeed", "zmq", "cryptography"), pytest.mark.ci]
__all__ = ["launch"]
NAMES = ("rome", "paris")
SITES = [f"dsx-{os.getpid()}-{digit}" for digit in (0, 1)]
ROUTERS = [f"dsx-{os.getpid()}-{digit}" for digit in (2, 3)]
RELAY = f"dsx-{os.getpid()}-4"
PORT = 29500
RULES = """
table ip nat {
  chain out { type nat hook postrouting priority 100; oifname "wan" masquerade
  }
}
table ip filter {
  chain past { type filter hook forward priority 0; iifname "wan" ct state new drop
  }
}
"""


def line(near: str, name: str, far: str, far_name: str) -> None:
    """Join two namespaces."""
    run_ip("link", "add", name, "netns", near, "type", "veth", "peer", "name", far_name,
           "netns", far)  # fmt: skip
    run_ip("-n", near, "link", "set", name, "up")
    run_ip("-n", far, "link", "set", far_name, "up")


def address(namespace: str, device: str, value: str, via: str | None = None) -> None:
    run_ip("-n", namespace, "address", "add", value, "dev", device)
    if via is not None:
        run_ip("-n", namespace, "route", "replace", "default", "via", via)


def forward(namespace: str, on: int) -> None:
    run_ip("netns", "exec", namespace, "sh", "-c", f"echo {on} > /proc/sys/net/ipv4/ip_forward")


def without_route() -> Callable[[int], None]:
    """Sites with a line to the relay's host alone; return what cuts a site's line for a second."""
    forward(RELAY, 0)
    for m, site in enumerate(SITES):
        line(site, "wan", RELAY, f"site{m}")
        address(RELAY, f"site{m}", f"203.0.113.{16 * m + 1}/28")
        address(site, "wan", f"203.0.113.{16 * m + 2}/28", f"203.0.113.{16 * m + 1}")

    def cut(m: int) -> None:
        run_ip("-n", RELAY, "link", "set", f"site{m}", "down")
        time.sleep(1.0)
        run_ip("-n", RELAY, "link", "set", f"site{m}", "up")

    return cut


def behind_routers() -> Callable[[int], None]:
    """Sites behind NAT, both with one private address; return what gives a router another one."""
    if shutil.which("nft") is None:
        pytest.skip("no `nft` on this host: install nftables")
    forward(RELAY, 1)
    given = [2, 2]
    for m, (site, router) in enumerate(zip(SITES, ROUTERS, strict=True)):
        run_ip("netns", "add", router)
        line(site, "lan", router, "lan")
        line(router, "wan", RELAY, f"site{m}")
        address(RELAY, f"site{m}", f"203.0.113.{16 * m + 1}/28")
        address(router, "wan", f"203.0.113.{16 * m + 2}/28", f"203.0.113.{16 * m + 1}")
        address(router, "lan", "192.168.1.1/24")
        address(site, "lan", "192.168.1.2/24", "192.168.1.1")
        forward(router, 1)
        rules = subprocess.run(
            ["ip", "netns", "exec", router, "nft", "-f", "-"], input=RULES, text=True,
            capture_output=True,
        )  # fmt: skip
        if rules.returncode:
            pytest.skip(f"this kernel has no NAT: {rules.stderr.strip()}")

    def forget(m: int) -> None:
        """What its connections were known by outside is gone, as with a provider's new address."""
        run_ip("-n", ROUTERS[m], "address", "flush", "dev", "wan", "scope", "global")
        given[m] += 1
        address(ROUTERS[m], "wan", f"203.0.113.{16 * m + given[m]}/28", f"203.0.113.{16 * m + 1}")

    return forget


WAYS = [
    pytest.param(without_route, id="no_route", marks=pytest.mark.slow),
    pytest.param(behind_routers, id="nat"),
]


@pytest.fixture(params=WAYS)
def disturb(request: pytest.FixtureRequest) -> Generator[Callable[[int], None]]:
    try:
        require_tools()
        for name in (RELAY, *SITES):
            run_ip("netns", "add", name)
            run_ip("-n", name, "link", "set", "lo", "up")
        yield request.param()
    except TestbedUnavailable as error:
        pytest.skip(f"no namespaces here: {error}")
    finally:
        remove_namespaces([*SITES, *ROUTERS, RELAY])


def within(namespace: str, *command: str) -> list[Any]:
    return [shutil.which("ip"), "netns", "exec", namespace, *command]


def with_keys(folder: Path) -> list[Path]:
    """Write each site's configuration, with keys of its own, and the relay's folder of keys."""
    made = {name: make_key(folder / name, name)[-1] for name in NAMES}
    paths: list[Path] = []
    for name in NAMES:
        for holder in (*NAMES, "relay"):
            if holder != name:
                add_key(folder / holder, made[name])
        path = write_config(folder / f"{name}.json")
        config: dict[str, Any] = json.loads(path.read_text())
        config["dsx"]["link"] = {
            "security": "curve",
            "members": list(NAMES),
            "relay": f"203.0.113.1:{PORT}",
            "keys": str(folder / name),
        }
        path.write_text(json.dumps(config))
        paths.append(path)
    return paths


def test_two_sites_that_can_only_call_out_train_through_a_relay(
    disturb: Callable[[int], None], launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = with_keys(tmp_path)
    command = [sys.executable, "-c", "from dsx.cli import app; app()", "relay", "--keys"]
    own = ["--host", "0.0.0.0", "--port", str(PORT)]
    relay = subprocess.Popen(
        within(RELAY, *command, str(tmp_path / "relay"), *own),
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert relay.stdout is not None and "listening on" in relay.stdout.readline()
        arguments = ["--steps", 40, "--step-seconds", 0.1, "--out", tmp_path / "out"]
        deepspeed = [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", "29480"]
        clusters = [
            launch(name, within(SITES[m], *deepspeed), "--deepspeed_config", configs[m],
                   *arguments, "--dsx-cluster-id", m)
            for m, name in enumerate(NAMES)
        ]  # fmt: skip
        clusters[0].wait_for("step 8\n", 120)
        disturb(0)
        clusters[0].wait_for("step 20\n", 120)
        disturb(1)
        for cluster in clusters:
            assert cluster.wait() == 0, cluster.output()
            assert "is lost" not in cluster.output()
        told = results(tmp_path / "out")
        assert told[0] == told[1] and len({one["checksum"] for one in told[0]}) == 1
    finally:
        relay.terminate()
        said = relay.communicate(timeout=10)[0]
    with capsys.disabled():
        print(f"\n{said}")
