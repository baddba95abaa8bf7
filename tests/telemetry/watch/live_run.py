"""A run of two clusters over links, of a process each or several; as a script: one of these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsx.bench.testbed import Testbed
from tests.comm.links.folders import sites
from tests.distributed import free_port
from tests.forked_commands import ForkedCommand, start_command

NAMES = ("berlin", "oslo")
STEPS = 100_000
ROOT = Path(__file__).parents[3]


class LiveRun:
    """Its processes by cluster; cluster 0 goes on alone where the other one is lost.

    `ranks` each. Only the first `num_called` clusters have an address. On a `testbed` each is in a
    namespace of its own; `link` is what its section has besides, `width` the net's. Each step logs
    a text of `told` letters that do not pack well. `net_test` is what was measured.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int = 1,
        num_called: int = 2,
        testbed: Testbed | None = None,
        link: Mapping[str, Any] | None = None,
        width: int = 64,
        told: int = 0,
        net_test: Path | None = None,
    ) -> None:
        self.directory = folder / "run"
        self._folder, self._ranks, self._testbed = folder, ranks, testbed
        keys = sites(folder / "keys", *NAMES)
        ports = [free_port() for _ in NAMES]
        hosts = [testbed.address(m) if testbed else "127.0.0.1" for m in range(num_called)]
        places = [f"={host}:{port}" for host, port in zip(hosts, ports, strict=False)]
        places += [""] * len(NAMES)
        for cluster, name in enumerate(NAMES):
            own = {
                "security": "curve", "arbiter": NAMES[0], "keys": str(keys[name]),
                "members": [name + place for name, place in zip(NAMES, places, strict=False)],
                "port": ports[cluster], "suspect_seconds": 3.0,
            }  # fmt: skip
            block = {
                "preset": "streaming_diloco", "schedule": {"interval": 8},
                "clusters": {"num_clusters": 2, "cluster_id": cluster, "deadline_seconds": 60},
                "link": {**own, **(link or {})}, "metrics": {"dir": str(self.directory)},
            }  # fmt: skip
            if net_test is not None:
                block["metrics"]["net_test"] = str(net_test)
            settings = {"dsx": block, "width": width, "told": told}
            (folder / f"{name}.json").write_text(json.dumps(settings))
        self.processes: dict[int, list[subprocess.Popen[bytes] | ForkedCommand]] = {}

    def start(self, cluster: int) -> None:
        """Start a cluster, for the first time or again."""
        own = {"WORLD_SIZE": self._ranks, "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}  # fmt: skip
        config = self._folder / f"{NAMES[cluster]}.json"
        log = self._folder / f"{NAMES[cluster]}.log"
        self.processes[cluster] = []
        for rank in range(self._ranks):
            told = {**own, "RANK": rank, "LOCAL_RANK": rank}
            environment = {name: str(value) for name, value in told.items()}
            command = [sys.executable, "-m", "tests.telemetry.watch.live_run", str(config)]
            if self._testbed is not None:
                environment["PYTHONPATH"] = str(ROOT)
                with log.open("ab") as file:
                    process = self._testbed.start(cluster, command, environment, file.fileno())
                self.processes[cluster].append(process)
            else:
                environment = {**os.environ, **environment}
                self.processes[cluster].append(start_command(command, log, environment))

    def kill(self, cluster: int) -> None:
        """Kill a cluster."""
        for process in self.processes[cluster]:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End what still runs."""
        for cluster in self.processes:
            self.kill(cluster)

    def logs(self) -> str:
        """Return what the clusters have said."""
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("*.log")))


def train(config: Path) -> None:
    """Train a small net for ever, ten steps a second."""
    import torch

    import dsx

    settings: dict[str, Any] = json.loads(config.read_text())
    width, told = (settings.pop(name) for name in ("width", "told"))
    world = dsx.init_distributed(settings)
    torch.manual_seed(0)
    into, out = torch.nn.Linear(16, width), torch.nn.Linear(width, 1)
    model = torch.nn.Sequential(into, torch.nn.Tanh(), out)
    if world.world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    handle = dsx.attach(model, optimizer, config=settings)
    handle.settle()
    torch.manual_seed(1000 * world.cluster_id + 100 * world.rank + handle.step)
    while handle.step < STEPS:
        x = torch.randn(64, 16)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        handle.log_step(loss=float(loss), tokens=64, total_steps=STEPS)
        if told:
            handle.log("note", text=os.urandom(told // 2).hex())
        if handle.step % 20 == 0:
            handle.log("validation", loss=float(loss) * 1.1)
        time.sleep(0.1)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
