"""Orders: given at one cluster, followed by all at one step, and told of by each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsx.cli import app
from dsx.training.notices import Due
from dsx.training.orders import Order, Orders
from tests.ctl.runs import Run, three_clusters

STEP = 40


class Shared:
    """Notices as all clusters have them: what one posts, each gets once, at one step."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, str, Any]] = []

    def of(self, cluster: int) -> OwnNotices:
        return OwnNotices(self, cluster)


class OwnNotices:
    """Those of one cluster's first rank."""

    def __init__(self, shared: Shared, cluster: int) -> None:
        self._shared, self._cluster, self._taken = shared, cluster, 0

    def post(self, kind: str, payload: Any) -> None:
        self._shared.posted.append((self._cluster, kind, json.loads(json.dumps(payload))))

    def due(self, kind: str) -> list[Due]:
        fresh = self._shared.posted[self._taken :]
        self._taken = len(self._shared.posted)
        return [Due(STEP, k, payload, cluster, 0) for cluster, k, payload in fresh if k == kind]


def orders_of(run: Run, do: str, **check: Any) -> tuple[list[Orders], list[Any]]:
    """Return every cluster's, taking one kind of order, and the records that they write."""
    shared, records = Shared(), []
    made = [
        Orders(shared.of(m), desk, True, 4, records.append)  # pyright: ignore
        for m, desk in enumerate(run.desks)
    ]
    for orders in made:
        orders.offer(do, **check)
    return made, records


def ctl(*words: object) -> Result:
    return CliRunner().invoke(app, ["ctl", *map(str, words)])


def follow(run: Run, made: list[Orders], how: Any) -> None:
    """Let each cluster come to its boundary as soon as somebody asks how an order stands."""
    for m, desk in enumerate(run.desks):
        tell = desk.verbs["progress"]

        def told(request: Any, tell: Any = tell, m: int = m) -> Any:
            for order in made[m].due():
                how(m, made[m], order)
            return tell(request)

        desk.verbs["progress"] = told


def test_all_follow_at_one_step_and_say_what_came_of_it(tmp_path: Path) -> None:
    def save(m: int, orders: Orders, order: Order) -> None:
        assert (order.do, order.by, order.step, order.cluster) == ("save", "rome", STEP, 0)
        orders.note(order, "done", path=f"/data/cluster_{m}", seconds=0.25)

    with three_clusters(tmp_path) as run:
        made, records = orders_of(run, "save")
        follow(run, made, save)
        done = ctl("save", run.configs[2])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "rounds, which are 4 steps each" in lines[0]
    assert lines[1] == f"all clusters save at step {STEP}"
    assert sorted(lines[2:]) == [
        f"{name} (cluster {m}): saved in 0.2 s: /data/cluster_{m}"
        for m, name in enumerate(("berlin", "oslo", "rome"))
    ]
    assert records == [{"step": STEP, "do": "save", "by": "rome"}] * 3


def test_one_that_cannot_is_told_and_the_exit_status_says_so(tmp_path: Path) -> None:
    def save(m: int, orders: Orders, order: Order) -> None:
        if m == 1:
            orders.note(order, "failed", why="the disk at / has 0 B free")
        else:
            orders.note(order, "done", path="/data", seconds=1.0)

    with three_clusters(tmp_path) as run:
        made, _ = orders_of(run, "save")
        follow(run, made, save)
        done = ctl("save", run.configs[0])
    assert done.exit_code == 1 and "oslo (cluster 1): the disk at / has 0 B free" in done.stdout


@pytest.mark.ci
def test_what_is_refused_or_takes_too_long(tmp_path: Path) -> None:
    def refuse(request: Any) -> dict[str, Any]:
        raise ValueError("this run has nowhere to save")

    with three_clusters(tmp_path) as run:
        orders_of(run, "save", check=refuse)
        done = ctl("save", run.configs[0])
        assert done.exit_code == 2  # whoever is asked
        assert re.search(r"\(cluster \d\): this run has nowhere to save", done.stderr)
    with three_clusters(tmp_path / "again") as run:
        orders_of(run, "stop")
        done = ctl("stop", run.configs[0], "--wait", 1)
        assert done.exit_code == 1 and "no cluster has come to it yet" in done.stderr
        status = json.loads(ctl("status", run.configs[0], "--json").stdout)
        (order,) = status["clusters"]["0"]["orders"]
        assert order["do"] == "stop" and order["state"] == "asked"
