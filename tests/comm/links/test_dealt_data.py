"""What a lost cluster has read and not committed is read again, once, and what it has is not."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from dsx.core.transport import Submission
from dsx.data import ClusterBatches
from tests.comm.links.sites import Site, run
from tests.comm.links.test_healing import slowly
from tests.comm.links.test_members_lost import LAST, TINY
from tests.data.test_cluster_batches import Numbers
from tests.tiny import ALL_CASES

NUM_STEPS, EPOCH = 160, 1000  # of each cluster, of which no run reads all


def cut_short(what: Submission) -> int | None:
    return 1 if what.step >= LAST else None


def batches_of(id: int) -> ClusterBatches:
    return ClusterBatches(
        Numbers(3 * EPOCH), 1, cluster_id=id, num_clusters=3, rank=0, world_size=1, seed=1
    )


def lose(name: str, again: int | None) -> tuple[list[Site], dict[int, list[int]]]:
    """Return the sites, and by place among them what each has read."""
    read: dict[int, list[int]] = defaultdict(list)

    def before(site: Site, step: int) -> None:
        read[id(site)].append(int(next(site.batches)[0, 0]))
        slowly(site, step)

    sites = run(
        ALL_CASES[name].method(3), TINY["model"], TINY["compute_loss"], NUM_STEPS,
        fates={2: cut_short}, before=before, by_log=True, again=again, batches_of=batches_of,
    )  # fmt: skip
    return sites, {n: read[id(site)] for n, site in enumerate(sites)}


def deal_of(site: Site) -> Any:
    assert site.loop is not None
    return site.loop.notices.places.state_dict()["data"]


@pytest.mark.ci
@pytest.mark.parametrize("again", [None, 2])
@pytest.mark.parametrize("name", ["diloco", "recommended"])
def test_samples_of_a_killed_cluster_are_read_by_others_or_by_itself(
    name: str, again: int | None
) -> None:
    """Over links, with processes that say nothing as they end."""
    sites, read = lose(name, again)
    survivors = [n for n, site in enumerate(sites) if not site.is_over.is_set()]
    assert len({str(deal_of(sites[n])) for n in survivors}) == 1
    sequence = batches_of(2)
    assert read[2] == [int(next(sequence)[0, 0]) for _ in read[2]]  # alone it reads as ever
    times = Counter(sample for n in survivors for sample in read[n])
    assert {*times.values()} == {1}
    committed = [sample for sample in read[2] if sample not in times]
    assert committed == read[2][: len(committed)]  # what it had committed, and no more
    assert 0 < len(committed) < len(read[2])
    assert sites[2].cut_at <= len(read[2])
    share = deal_of(sites[0])["shares"][2]
    assert share[0] >= len(read[2]) and share[4] == ("away" if again is None else "here")
