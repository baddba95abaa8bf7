"""What clusters compare before they train, over a store in this process, a thread per cluster."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from dsx.comm.rendezvous import Rendezvous
from dsx.comm.topology import RankInfo
from dsx.config.files import ConfigError
from dsx.training.agreement import require_alike, without

FACTS = {"dsx": {"schedule": {"interval": 4}}, "train_batch_size": 8}
SETTINGS = {"optimizer": {"lr": [0.1, 0.2], "betas": [[0.9, 0.95]]}, "clip": 1.0}


def meet(
    facts: Sequence[Any], settings: Sequence[Any], may_differ: Sequence[str] = ()
) -> list[BaseException | None]:
    """Let one rank of each cluster compare; return what each of them got."""
    store = dist.HashStore()

    def compare(cluster: int) -> BaseException | None:
        info = RankInfo(cluster, len(facts), 0, 1)
        rendezvous = Rendezvous(store, info, "session", 20.0)
        try:
            require_alike(rendezvous, facts[cluster], settings[cluster], may_differ)
        except ValueError as error:
            return error
        return None

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(compare, range(len(facts))))


def test_equal_ones_pass() -> None:
    assert meet([FACTS] * 3, [SETTINGS] * 3) == [None] * 3


def test_what_is_not_a_number_is_equal_to_itself() -> None:
    unset = {"best_loss": float("nan")}
    assert meet([FACTS] * 2, [unset] * 2) == [None] * 2
    errors = meet([FACTS] * 2, [unset, {"best_loss": 1.0}])
    assert all("best_loss: cluster 0 has nan, cluster 1 has 1.0" in str(e) for e in errors)


def test_every_cluster_names_the_first_difference() -> None:
    other = {**SETTINGS, "optimizer": {**SETTINGS["optimizer"], "lr": [0.1, 0.3]}, "clip": 2.0}
    errors = meet([FACTS] * 3, [SETTINGS, SETTINGS, other])
    assert len({str(error) for error in errors}) == 1
    assert "optimizer.lr[1]: cluster 0 has 0.2, cluster 2 has 0.3;" in str(errors[0])
    assert "name 'optimizer.lr[1]' in clusters.may_differ" in str(errors[0])


@pytest.mark.parametrize("names", [["optimizer"], ["optimizer.lr"], ["optimizer.lr[1]"]])
def test_what_is_meant_to_differ_is_left_out(names: list[str]) -> None:
    other = {**SETTINGS, "optimizer": {**SETTINGS["optimizer"], "lr": [0.1, 0.3]}}
    assert meet([FACTS] * 2, [SETTINGS, other], names) == [None] * 2
    errors = meet([FACTS] * 2, [SETTINGS, {**other, "clip": 2.0}], names)
    assert all("clip: cluster 0 has 1.0, cluster 1 has 2.0" in str(error) for error in errors)


def test_a_setting_that_one_cluster_alone_has_differs() -> None:
    errors = meet([FACTS] * 2, [SETTINGS, {**SETTINGS, "warmup": 10}])
    assert all("warmup: cluster 0 has None, cluster 1 has 10" in str(error) for error in errors)
    assert meet([FACTS] * 2, [SETTINGS, {**SETTINGS, "warmup": 10}], ["warmup"]) == [None] * 2


def test_facts_may_not_differ() -> None:
    other = {**FACTS, "train_batch_size": 16}
    errors = meet([FACTS, other], [SETTINGS] * 2)
    assert all("do not match at train_batch_size: cluster 0 has 8" in str(e) for e in errors)
    errors = meet([FACTS] * 2, [SETTINGS] * 2, ["train_batch_size"])
    assert all(type(error) is ConfigError for error in errors)


def test_a_name_that_stands_for_nothing_is_refused() -> None:
    errors = meet([FACTS] * 2, [SETTINGS] * 2, ["optimizer.rl"])
    for error in errors:
        assert type(error) is ConfigError
        assert "may_differ names 'optimizer.rl', which is not compared; did you mean" in str(error)
        assert "'optimizer.lr'" in str(error)


def test_holes_keep_the_places_of_the_others() -> None:
    assert without(SETTINGS, ["optimizer.lr[0]", "clip"]) == {
        "optimizer": {"lr": [None, 0.2], "betas": [[0.9, 0.95]]}
    }
