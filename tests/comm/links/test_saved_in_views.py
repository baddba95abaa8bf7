"""Checkpoints of a run whose clusters go and come, gone on with by clusters of one process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.checkpoint.files import SavedCluster
from dsx.checkpoint.outer_state import load_state
from dsx.comm.topology import RankInfo
from dsx.outer.parcel import hash_of
from tests.checkpoint.saved import save_state
from tests.comm.links.sites import Site, run
from tests.comm.links.test_healing import NUM_STEPS as UNTIL_HEALED
from tests.comm.links.test_healing import cut_short, slowly, wait_until
from tests.comm.links.test_members_lost import TINY
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss

AT, LATER = 14, 12  # a step at which all save, and how many more are taken after a resume
NAMES = ["diloco", pytest.param("streaming_diloco", marks=pytest.mark.ci), "recommended"]


def save(site: Site, folder: Path) -> None:
    """Save what a site has trained, waiting for nobody."""
    assert site.loop is not None
    directory = folder / f"{site.id}"
    save_state(site.loop, directory, RankInfo(site.id, 3, 0, 1), "run", {}, {})
    torch.save([site.model.state_dict(), site.optimizer.state_dict()], directory / "inner.pt")


def resume(name: str, num_clusters: int, folder: Path, sources: tuple[int, ...]) -> Simulated:
    """Return a run that goes on; `sources` are whose checkpoints its clusters take."""
    method = ALL_CASES[name].method(3)
    resumed = Simulated(
        TinyNet(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), method, num_clusters
    )
    for m, (loop, source) in enumerate(zip(resumed.loops, sources, strict=True)):
        directory = folder / f"{source}"
        model, optimizer = torch.load(directory / "inner.pt", weights_only=True)
        resumed.models[m].load_state_dict(model)
        of_inner: Any = resumed.optimizers[m]
        of_inner.load_state_dict(optimizer)
        load_state(loop, directory, RankInfo(m, num_clusters, 0, 1), {})
    for loop in resumed.loops:
        loop.settle()
    return resumed


def anchors(run: Simulated, cluster: int) -> str:
    held = run.loops[cluster].state.anchor
    return hash_of(b"".join(anchor.numpy().tobytes() for anchor in held))


def go_on(resumed: Simulated, whole: list[Site] | None = None, members: int = 3) -> None:
    """Train a while: all hold the same, and, of `whole`, what it has held at each step."""
    for step in range(AT + 1, AT + LATER + 1):
        resumed.train_step(mean_loss)
        held = {anchors(resumed, m) for m in range(members)}
        assert len(held) == 1, step
        if whole is not None:
            assert held == {whole[m].hashes[step] for m in range(members)}, step
    assert all(loop.totals.refused == 0 for loop in resumed.loops)


def lose(name: str, again: int | None, folder: Path, num_steps: int) -> list[Site]:
    """Kill the third; the others save at a step, where it has been started again as it heals."""
    saved = threading.Barrier(2)

    def before(site: Site, step: int) -> None:
        if step == AT + 1 and site.id != 2:
            donor = site.donor
            assert donor is not None
            if again is not None:
                wait_until(lambda: donor.healing)
            save(site, folder)
            if again is not None:
                saved.wait(60)
                assert tuple(donor.healing) == (2,), "it has healed before all had saved"
        slowly(site, step)

    return run(
        ALL_CASES[name].method(3), TINY["model"], TINY["compute_loss"], num_steps,
        fates={2: cut_short}, before=before, by_log=True, again=again,
    )  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("name", NAMES)
def test_saved_by_the_others_while_one_heals(name: str, tmp_path: Path) -> None:
    """Two go on to the bit as if it had never come; of three it takes what the first has saved."""
    sites = lose(name, 2, tmp_path / "healing", UNTIL_HEALED)
    assert sites[-1].members_at[UNTIL_HEALED] == (0, 1, 2)
    assert SavedCluster(tmp_path / "healing" / "0").members == [0, 1]
    whole = lose(name, None, tmp_path / "alone", AT + LATER)
    go_on(resume(name, 2, tmp_path / "healing", (0, 1)), whole, members=2)
    go_on(resume(name, 3, tmp_path / "healing", (0, 1, 0)))


@pytest.mark.parametrize("name", NAMES)
def test_saved_by_one_while_the_others_train(name: str, tmp_path: Path) -> None:
    """It is a step ahead of them, and waits for nobody; they save once they are there."""
    has_saved = threading.Event()

    def before(site: Site, step: int) -> None:
        if step == AT and site.id != 2:
            assert has_saved.wait(60)
        if step == AT + 1:
            if site.id == 2:
                assert site.loop is not None and site.loop.history.step == AT
            save(site, tmp_path)
            has_saved.set()

    whole = run(
        ALL_CASES[name].method(3), TINY["model"], TINY["compute_loss"], AT + LATER, before=before
    )
    go_on(resume(name, 3, tmp_path, (0, 1, 2)), whole)
