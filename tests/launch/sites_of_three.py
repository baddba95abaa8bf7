"""Three sites on this host, a launcher of two ranks each, with keys; told things by `dsx ctl`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsx.comm.links.key_changes import add_key, make_key
from tests.distributed import free_port
from tests.launch.test_launch import SCRIPT, Launcher, write_config

NAMES = ("berlin", "oslo", "rome")


class Sites:
    """Their configurations, and their launchers once they are started."""

    def __init__(
        self,
        folder: Path,
        launch: Any,
        names: tuple[str, ...] = NAMES,
        script: Path = SCRIPT,
        how: Callable[[], Any] = lambda: 2,
    ) -> None:
        """`how` each launcher is started: see `Launcher`."""
        self._how = how
        self.names, self._folder, self._launch, self._script = names, folder, launch, script
        ports = {name: free_port() if m < 2 else 0 for m, name in enumerate(names)}
        made = {name: make_key(folder / name, name)[-1] for name in names}
        self.configs: list[Path] = []
        for name in names:
            for other in names:
                if other != name:
                    add_key(folder / name, made[other])
            path = write_config(folder / f"{name}.json", num_clusters=len(names))
            config: dict[str, Any] = json.loads(path.read_text())
            config["dsx"]["metrics"] = {"dir": str(folder / "run")}
            config["dsx"]["link"] = {
                "security": "curve",
                "members": [f"{n}=127.0.0.1:{ports[n]}" if ports[n] else n for n in names],
                "keys": str(folder / name),
                "port": ports[name] or 29400,
            }
            path.write_text(json.dumps(config))
            self.configs.append(path)
        self.launchers: list[Launcher] = []

    def change(self, section: str, **values: Any) -> None:
        """Change a section of the "dsx" block everywhere."""
        for path in self.configs:
            config = json.loads(path.read_text())
            config["dsx"].setdefault(section, {}).update(values)
            path.write_text(json.dumps(config))

    def link(self, m: int) -> dict[str, Any]:
        """Return how a site is joined to the others."""
        return json.loads(self.configs[m].read_text())["dsx"]["link"]

    def change_engine(self, section: str, **values: Any) -> None:
        """Change a section of DeepSpeed's own everywhere."""
        for path in self.configs:
            config = json.loads(path.read_text())
            config.setdefault(section, {}).update(values)
            path.write_text(json.dumps(config))

    def start(self, way: str, *args: Any, step_seconds: float = 0.1) -> list[Launcher]:
        """Start a launcher per site."""
        self.launchers = [
            self.start_one(m, way, *args, step_seconds=step_seconds)
            for m in range(len(self.names))
        ]  # fmt: skip
        return self.launchers

    def start_one(self, m: int, way: str, *args: Any, step_seconds: float = 0.1) -> Launcher:
        """Start one site's launcher, which comes back where it has been started before."""
        return self._launch(
            f"{way}_{self.names[m]}", self._how(), "--deepspeed_config", self.configs[m], *args,
            "--step-seconds", step_seconds, "--dsx-cluster-id", m, script=self._script,
        )  # fmt: skip

    def ctl(self, *what: Any, at: int = 0, words: str = "") -> subprocess.CompletedProcess[str]:
        """Run `dsx ctl VERB CONFIG ...` with a site's key, and type `words`."""
        verb, *rest = map(str, what)
        command = [sys.executable, "-m", "dsx", "ctl", verb, str(self.configs[at]), *rest]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=180,
            env=environment,
            check=False,
            input=words,
        )

    def end(self) -> None:
        """Kill what has been started with these configurations and runs still."""
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ProcessLookupError):
                if {str(p) for p in self.configs} & {*(path / "cmdline").read_text().split("\0")}:
                    os.kill(int(path.name), signal.SIGKILL)

    def signal_ranks(self, site: int, number: int = signal.SIGTERM) -> None:
        """Send a signal to all ranks of a site, as a scheduler does."""
        for pid in ranks_of(self.launchers[site]).values():
            os.kill(pid, number)


def ranks_of(launcher: Launcher) -> dict[int, int]:
    """Return the process ids of a launcher's ranks, by rank."""
    from tests.launch.test_preemption import ranks_of as found

    return found(launcher)


def ranks_of_group(config: Path) -> dict[int, int]:
    """Return the process ids of the ranks that have a configuration, by rank."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_text().split("\0")
            rank = dict(
                text.split("=", 1) for text in (path / "environ").read_text().split("\0")
                if "=" in text
            ).get("LOCAL_RANK")  # fmt: skip
            if rank is not None and str(config) in words:
                found[int(rank)] = int(path.name)
    return found
