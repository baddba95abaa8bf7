"""Which iteration `--load` goes on from, by outer states and what Megatron has beside them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dsx
from dsx.config.checkpoints import CheckpointsConfig
from dsx.engines.megatron.own_part import latest_iteration
from dsx.engines.megatron_model.dist_checkpoint import TRACKER
from megatron_patches.resume import choose_iteration
from tests.checkpoint.test_tags import write
from tests.distributed import run_distributed
from tests.telemetry.trace.runs import block


def outer(load: Path, cluster: int, iteration: int, **facts: Any) -> None:
    write(load / "dsx", cluster, iteration, **facts)
    made = load / "dsx" / f"cluster_{cluster}" / f"step{iteration}"
    made.rename(made.with_name(f"iter_{iteration:07d}"))


def choose(base: str) -> dict[str, Any]:
    world = dsx.init_distributed(block("diloco"))
    cluster, told = world.cluster_id, list[str]()
    config = SimpleNamespace(checkpoints=CheckpointsConfig())
    run: Any = SimpleNamespace(world=world, tell=told.append, config=config)
    found: dict[str, Any] = {}
    for case in ("good", "not finite", "newer than Megatron's", "named", "none good", "new"):
        load = Path(base) / case / f"{cluster}"
        for iteration in (10, 20, 30):
            bad = (case == "not finite" and iteration == 30 and cluster) or case == "none good"
            if case != "new":
                outer(load, cluster, iteration, trouble="not finite" if bad else "")
                if iteration < 30 or case != "newer than Megatron's":
                    (load / f"iter_{iteration:07d}").mkdir()
        load.mkdir(parents=True, exist_ok=True)
        if case != "new":
            latest = 20 if case == "newer than Megatron's" else 30
            (load / TRACKER).write_text(f"{latest}\n")
        arguments = SimpleNamespace(
            load=str(load), save=str(load), ckpt_step=10 if case == "named" else None
        )
        try:
            choose_iteration(run, arguments)
            found[case] = arguments.ckpt_step
        except ValueError as error:
            found[case] = str(error)
    return {"found": found, "told": told}


@pytest.mark.ci
def test_all_clusters_go_on_from_the_newest_good_iteration(tmp_path: Path) -> None:
    for result in run_distributed(choose, 2, str(tmp_path)):
        none_good = result["found"].pop("none good")
        assert result["found"] == {
            "good": None, "not finite": 20, "newer than Megatron's": None, "named": 10, "new": None
        }  # fmt: skip
        assert none_good.startswith("--load ") and none_good.endswith("(here: --ckpt-step)")
        (told,) = result["told"]
        assert told == "goes on from iteration 20, not 30, which is not good everywhere"


def choose_after_a_kill(base: str) -> dict[str, Any]:
    """Begin from 10, as 30 is not good in a cluster, and be killed in Megatron's save of 20."""
    world = dsx.init_distributed(block("diloco"))
    cluster, config = world.cluster_id, SimpleNamespace(checkpoints=CheckpointsConfig())
    run: Any = SimpleNamespace(world=world, tell=lambda text: None, config=config)
    found: dict[str, Any] = {}
    for case, saved_to in (("there", "there"), ("elsewhere", "other")):
        load, save = (Path(base) / f"{cluster}" / name for name in (case, saved_to))
        for iteration in (10, 30):
            outer(load, cluster, iteration, trouble="bad" if cluster and iteration == 30 else "")
            (load / f"iter_{iteration:07d}").mkdir()
        (load / TRACKER).write_text("30")
        chosen: list[int | None] = []
        for _ in range(2):
            arguments = SimpleNamespace(load=str(load), save=str(save), ckpt_step=None)
            choose_iteration(run, arguments)
            chosen.append(arguments.ckpt_step or latest_iteration(load))
            if save == load and len(chosen) == 1:
                outer(load, cluster, 20)
                (load / "iter_0000020").mkdir()  # a half
        found[case] = (chosen, latest_iteration(load))
    if cluster:
        (load / f"{TRACKER}.tmp").mkdir()  # in the way
    try:
        choose_iteration(run, SimpleNamespace(load=str(load), save=str(load), ckpt_step=None))
    except OSError as error:
        found["trouble"] = str(error)
    return found


@pytest.mark.ci
def test_what_megatron_had_not_ended_is_not_chosen(tmp_path: Path) -> None:
    for result in run_distributed(choose_after_a_kill, 2, str(tmp_path)):
        assert result["there"] == ([10, 10], 10)
        assert result["elsewhere"] == ([10, 10], 30)  # what is only read stays as it is
        assert result["trouble"].endswith(
            f"1/elsewhere/{TRACKER} cannot be written: Is a directory"
        )
