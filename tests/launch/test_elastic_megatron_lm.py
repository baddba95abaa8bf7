"""Unmodified `pretrain_gpt.py`: a killed cluster comes back; `--megatron-lm=PATH -m slow`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import free_port
from tests.launch.sites_of_three import NAMES, Sites
from tests.launch.test_launch import launch
from tests.launch.test_megatron_lm import (
    DRIVER,
    DSX,
    MODEL,
    PIPELINE,
    SHARDED,
    anchors,
    environment,
    logged,
    tree,
)

__all__ = ["launch", "tree"]
TENSOR = ["--bf16", "--tensor-model-parallel-size", "2"]
DECAYS = ["--lr-decay-style", "linear", "--lr-decay-iters", "4000", "--train-iters", "4000"]
LAYOUTS = {"pipeline": PIPELINE, "tensor": TENSOR, "sharded": SHARDED}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cluster_comes_back(
    launch: Any,
    tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    layout: str,
) -> None:
    """It has the iteration, the samples and the rate of the others, and all stop at one step."""
    for name, value in environment(tree).items():
        monkeypatch.setenv(name, value)
    sites = Sites(tmp_path, launch)

    def start(m: int, way: str) -> Any:
        how = ["torchrun", "--nproc-per-node", 2, "--master-port", free_port()]
        link = sites.link(m)
        own = ["--dsx-num-clusters", 3, "--dsx-cluster-id", m, "--dsx-link-keys", link["keys"]]
        own += ["--dsx-link-security", "curve", "--dsx-link-port", link["port"]]
        own += ["--dsx-link-members", ",".join(link["members"])]
        own += ["--save", f"{tmp_path}/{{cluster_id}}"]
        given = [*DSX, *MODEL, *LAYOUTS[layout], *DECAYS, "--save-interval", 4000, *own]
        path = tree / "pretrain_gpt.py"
        return launch(f"{way}_{NAMES[m]}", how, path, *given, script=DRIVER)

    clusters = [start(m, "first") for m in range(3)]
    for cluster in clusters:
        cluster.wait_for("iteration 8,", 200)
    clusters[2].end()
    for cluster in clusters[:2]:
        cluster.wait_for("cluster 2 is lost: going on with clusters 0, 1", 200)
    clusters[2] = again = start(2, "again")
    again.wait_for("joined: goes on from iteration ", 200)
    joined_at = int(re.findall(r"joined: goes on from iteration (\d+),", again.output())[0])
    again.wait_for(f"iteration {joined_at + 12},", 200)
    assert sites.ctl("stop").returncode == 0
    for cluster in clusters:
        assert cluster.wait(200) == 0, cluster.output()
    texts = [cluster.output() for cluster in clusters]
    last = max(logged(texts[0], "lm loss"))
    before, after = logged(texts[0], "learning rate"), logged(texts[2], "learning rate")
    assert [*after] == list(range(joined_at + 1, last + 1))
    assert after == {i: before[i] for i in after}
    consumed = [dict(re.findall(r"iteration +(\d+)/.*consumed samples: +(\d+)", t)) for t in texts]
    assert consumed[2] and consumed[2].items() <= consumed[0].items()
    first, second, third = anchors(tmp_path, last, 3)
    assert first and first.keys() == second.keys() == third.keys()
    for name, anchor in first.items():
        assert anchor.any() and second[name].equal(anchor) and third[name].equal(anchor), name
    with capsys.disabled():
        print(f"\njoined at {joined_at}, all stopped at {last}")
