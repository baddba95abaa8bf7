"""A cluster that is killed and started again with the same command joins those who go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsx.comm.links.key_changes import add_key, make_key
from tests.distributed import free_port
from tests.installed import needs
from tests.launch.test_launch import launch, write_config

pytestmark = [needs("deepspeed"), pytest.mark.ci]
SLOW = pytest.mark.slow
__all__ = ["launch"]
NAMES = ("berlin", "oslo", "rome")


def configs_of(folder: Path, change: Any = None) -> list[Path]:
    """Write each site's configuration, with keys of its own; two of three can be called."""
    ports = dict.fromkeys(NAMES, 0) | {name: free_port() for name in NAMES[:2]}
    made = {name: make_key(folder / name, name)[-1] for name in NAMES}
    configs: list[Path] = []
    for name in NAMES:
        for other in NAMES:
            if other != name:
                add_key(folder / name, made[other])
        path = write_config(folder / f"{name}.json", num_clusters=3)
        config: dict[str, Any] = json.loads(path.read_text())
        if change is not None:
            change(config)
        config["dsx"]["link"] = {
            "security": "curve",
            "members": [f"{n}=127.0.0.1:{ports[n]}" if ports[n] else n for n in NAMES],
            "keys": str(folder / name),
            "port": ports[name] or 29400,
        }
        path.write_text(json.dumps(config))
        configs.append(path)
    return configs


@pytest.mark.parametrize(
    ("victim", "zero_stage"),
    [
        pytest.param(2, 1, marks=SLOW),
        (0, 1),
        pytest.param(1, 3, marks=SLOW),
        pytest.param(2, 0, marks=SLOW),
    ],
)
def test_a_cluster_that_is_killed_and_started_again_joins_the_others(
    launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], victim: int, zero_stage: int
) -> None:
    """Two ranks each; the first one is where all had met, and has a checkpoint of its own."""

    def change(config: dict[str, Any]) -> None:
        config["zero_optimization"]["stage"] = zero_stage

    configs = configs_of(tmp_path, change)

    def start(m: int, way: str, *args: Any) -> Any:
        return launch(
            f"{way}_{NAMES[m]}", 2, "--deepspeed_config", configs[m], "--out", tmp_path / way,
            "--steps", 10_000, "--step-seconds", 0.1, "--stop-file", tmp_path / "stop",
            *args, "--dsx-cluster-id", m,
        )  # fmt: skip

    saves = [] if victim else ["--save-dir", tmp_path / "saved"]
    clusters = {m: start(m, "first", *saves) for m in range(3)}
    for cluster in clusters.values():
        cluster.wait_for("step 8\n", 120)
    clusters[victim].end()
    others = [cluster for m, cluster in clusters.items() if m != victim]
    for cluster in others:
        cluster.wait_for(f"cluster {victim} is lost: going on")
    again = start(victim, "again", *saves, *["--resume"][: len(saves)])
    again.wait_for("has joined the run at step", 90)
    joined_at = again.output().partition("has joined the run at step ")[2].partition(":")[0]
    for cluster in others:
        cluster.wait_for(f"cluster {victim} is back: going on with clusters 0, 1, 2")
    again.wait_for(f"step {int(joined_at) + 12}\n")
    (tmp_path / "stop").touch()  # all hear of it beside a transfer, and stop at one step
    for cluster in [*others, again]:
        assert cluster.wait(120) == 0, cluster.output()
    told = json.loads((tmp_path / f"again.{victim}").read_text())
    assert [one["cluster"] for one in told] == [0, 1, 2]
    assert int(joined_at) > 8
    held = f"more were in {tmp_path / 'saved' / 'cluster_0' / 'step5'}\n"
    assert (held in again.output()) == (victim == 0)
    assert told[victim]["started_at"] == (0 if victim else int(joined_at))
    assert len({(one["checksum"], one["step"]) for one in told}) == 1
    with capsys.disabled():
        lines = [x for x in again.output().splitlines() if "has joined" in x]
        print(f"\n{lines}")
