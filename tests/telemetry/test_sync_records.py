"""A cluster's sync records: what its ranks posted, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dsx.core.types import Stage
from dsx.telemetry.sync_records import SyncRecords


def event(numel: int, norm: float, sent: int, seconds: float, round: int = 1) -> dict[str, Any]:
    return {
        "fragment": 0,
        "numel": numel,
        "round": round,
        "launched_step": 4 * round,
        "applied_step": 6,
        "bytes_sent": sent,
        "wait_seconds": seconds,
        "transfer_seconds": 2 * seconds,
        "coding_seconds": seconds / 2,
        "turn_seconds": seconds / 8,
        "commit_seconds": seconds / 4,
        "pseudo_gradient_norm": torch.tensor(norm),
        "mean_norm": torch.tensor(norm / 2),
    }


@pytest.mark.parametrize(
    ("shards", "norm"),
    [
        ([(6, 3.0), (4, 4.0), (0, 0.0)], 5.0),  # sharded, one rank without any of it
        ([(10, 5.0), (10, 5.0), (10, 5.0)], 5.0),  # replicated
    ],
)
def test_ranks_are_put_together(shards: list[tuple[int, float]], norm: float) -> None:
    store, written = dist.HashStore(), list[Mapping[str, Any]]()
    ranks = [SyncRecords(store, Stage(), (r, 3), [10], written.append, 1.0) for r in range(3)]
    for round in (1, 2):
        for rank, (records, (numel, own)) in enumerate(zip(ranks, shards, strict=True)):
            records.add(event(numel, own, numel * 4, 0.1 * rank, round))
        for records in ranks:
            records.pass_boundary()
        assert not written  # posted a boundary after the sync, written one boundary later
    for records in reversed(ranks):
        records.flush()
    assert [r["round"] for r in written] == [1, 2]
    for record in written:
        assert record["numel"] == 10
        assert record["bytes_sent"] == sum(4 * numel for numel, _ in shards)
        assert record["wait_seconds"] == pytest.approx(0.2)
        assert record["transfer_seconds"] == pytest.approx(0.4)
        assert record["coding_seconds"] == pytest.approx(0.1)
        assert record["turn_seconds"] == pytest.approx(0.025)
        assert record["pseudo_gradient_norm"] == pytest.approx(norm)
        assert record["mean_norm"] == pytest.approx(norm / 2)
    assert ranks[0].bytes_sent == 2 * written[0]["bytes_sent"]


def test_a_rank_that_does_not_post_ends_the_records_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = SyncRecords(dist.HashStore(), Stage(), (0, 2), [10], lambda record: None, 0.05)
    records.add(event(10, 1.0, 4, 0.1))
    records.flush()
    assert "the records of syncs end here" in caplog.text
    assert "fragment 0 applied at step 6: a rank of this cluster has not posted" in caplog.text
    caplog.clear()
    for _ in range(3):
        records.add(event(10, 1.0, 4, 0.1))
        records.pass_boundary()
    assert not caplog.records


class LostStore(dist.HashStore):
    """A store whose host has gone."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Connection reset by peer\nand the stack of torch")


def test_a_store_that_is_lost_ends_the_records_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = SyncRecords(LostStore(), Stage(), (1, 2), [10], unwanted, 1.0)
    for _ in range(4):
        records.add(event(10, 1.0, 4, 0.1))
        records.pass_boundary()
    records.flush()
    (record,) = caplog.records
    assert "bytes sent: Connection reset by peer; training goes on" in record.getMessage()


def test_the_size_of_a_correction_is_that_of_the_whole_fragment() -> None:
    store, written = dist.HashStore(), list[Mapping[str, Any]]()
    ranks = [SyncRecords(store, Stage(), (r, 2), [10], written.append, 1.0) for r in range(2)]
    for records, (numel, descent, correction) in zip(
        ranks, [(6, 3.0, 0.6), (4, 4.0, 0.8)], strict=True
    ):
        norms = {"descent_norm": torch.tensor(descent), "correction_norm": torch.tensor(correction)}
        records.add({**event(numel, 1.0, 4, 0.1), **norms})
    for records in reversed(ranks):
        records.flush()
    assert written[0]["descent_norm"] == pytest.approx(5.0)
    assert written[0]["correction_ratio"] == pytest.approx(0.2)


def test_stages_of_a_pipeline_post_their_own_syncs_and_one_rank_writes_them() -> None:
    """Two stages of two ranks that sync at different boundaries."""
    store, written = dist.HashStore(), list[Mapping[str, Any]]()
    stages = [
        [
            SyncRecords(store, Stage(s, 2), (r, 2), [10], [written.append, unwanted][r or s], 1.0)
            for r in range(2)
        ]
        for s in range(2)
    ]
    for round in (1, 2):
        for stage, ranks in enumerate(stages):
            for records in ranks:
                records.add(event(5, 1.0, 4 * (1 + stage), 0.1, round))
            for _ in range(2 * stage):
                for records in reversed(ranks):
                    records.pass_boundary()
    assert not written
    for records in (*stages[1], *stages[0][::-1]):
        records.flush()
    seen = [(r["stage"], r["round"], r["bytes_sent"]) for r in written]
    assert sorted(seen) == [(0, 1, 8), (0, 2, 8), (1, 1, 16), (1, 2, 16)]
    assert stages[0][0].bytes_sent == 48
    for records in (*stages[1], *stages[0][::-1]):
        records.flush()
    assert len(written) == 4


def test_launches_are_written_at_once_or_passed_on_from_a_further_stage() -> None:
    store, written, syncs = dist.HashStore(), list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    first, second, third = (
        SyncRecords(store, Stage(s, 2), (r, 2 - (not s)), [10], syncs.append, 1.0)
        for s, r in ((0, 0), (1, 0), (1, 1))
    )
    first.write_launch = written.append
    second.write_launch = third.write_launch = unwanted
    for records in (first, second, third):
        records.launched({"step": 4, "fragment": 0})
    assert written == [{"step": 4, "fragment": 0}]
    for records in (third, second, first):
        records.flush()
    assert written[1:] == [{"step": 4, "fragment": 0, "kind": "launch", "stage": 1}]
    assert not syncs and not first.bytes_sent


def unwanted(record: Mapping[str, Any]) -> None:
    raise AssertionError(record)


def test_a_stage_that_does_not_flush_ends_the_records_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = SyncRecords(dist.HashStore(), Stage(0, 2), (0, 1), [10], unwanted, 0.05)
    records.flush()
    assert "pipeline stage 1 of this cluster has not posted" in caplog.text
