"""Outer state under another layout or number of clusters: the same bits, found by parameter."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.checkpoint.checksums import checksum, note_checksum
from dsx.checkpoint.files import Source, put_together, rank_file, shard_ranges
from dsx.checkpoint.outer_state import load_state
from dsx.comm.in_process import InProcessHub
from dsx.comm.topology import RankInfo
from dsx.config.schema import preset
from dsx.core.types import Fragment, Slot
from dsx.engines.cluster_collectives import OneRank
from dsx.engines.torch import TorchAdapter
from dsx.method.fragments import lay_out
from dsx.method.method import Method
from dsx.outer.loop import OuterLoop
from dsx.outer.transfer import Transfer
from tests.checkpoint.saved import save_state
from tests.compress.test_over_gloo import CODECS_OF_ALL, WideNet, adamw, loss, simulated
from tests.levels import in_turn
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss

CUTS = (0, 0.2, 0.2, 0.7, 1)  # of every parameter: the second of four ranks has nothing


class Ranks(OneRank):
    """Several ranks, of which one is there."""

    def __init__(self, everyone: list[list[Fragment]], rank: int) -> None:
        self.everyone, self.shard = everyone, (rank, len(everyone))

    def layouts(self, own: Sequence[Fragment]) -> tuple[Sequence[Sequence[Fragment]], int]:
        return self.everyone, self.shard[0]


class ShardAdapter(TorchAdapter):
    """Stands in for one of several ranks: a part of every parameter, to be loaded and saved."""

    def __init__(self, whole: Any, rank: int, cuts: Sequence[float] = CUTS) -> None:
        self.fragment_parameters = whole.fragment_parameters
        self.fragment_numel = whole.fragment_numel
        self.stage, self.device, self.pins_host_memory = whole.stage, whole.device, False
        self.everyone = [self._layout(first, last) for first, last in zip(cuts, cuts[1:])]  # noqa: B905
        self.fragments = self.everyone[rank]
        self.ranks = Ranks(self.everyone, rank)
        self.held = [torch.zeros(fragment.numel) for fragment in self.fragments]

    def _layout(self, first: float, last: float) -> list[Fragment]:
        shapes = {p.name: p.shape for ps in self.fragment_parameters for p in ps}
        numel = {p.name: p.numel for ps in self.fragment_parameters for p in ps}
        places = {n: (int(first * k), int(last * k)) for n, k in numel.items()}
        pieces = {n: ((b - a,), a) for n, (a, b) in places.items() if b > a}
        return lay_out([[p.name for p in ps] for ps in self.fragment_parameters], pieces, shapes)

    def read(self, fragment: int, out: Tensor) -> None:
        out.copy_(self.held[fragment])

    def write(self, fragment: int, source: Tensor) -> None:
        self.held[fragment].copy_(source)


def shard_loop(whole: OuterLoop, method: Method, rank: int) -> OuterLoop:
    seat = whole.transport.seat
    hub = InProcessHub(seat.membership).transports()
    return OuterLoop(method, ShardAdapter(whole.adapter, rank), hub[seat.position])


def new_tiny(name: str, num_clusters: int = 2) -> Simulated:
    method = ALL_CASES[name].method(num_clusters)
    return Simulated(
        TinyNet(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), method, num_clusters
    )


def save_all(run: Simulated, base: Path, holds_average: bool = False) -> None:
    for m, loop in enumerate(run.loops):
        own = [masters(loop)] if holds_average else None
        save_state(loop, base / f"{m}", RankInfo(m, run.num_clusters, 0, 1), "run", {}, {}, own)


def resume(run: Simulated, first: Simulated, base: Path) -> None:
    """Load every cluster's state, and the inner one beside it; new clusters take cluster 0's."""
    for m, loop in enumerate(run.loops):
        source = m if m < first.num_clusters else 0
        run.models[m].load_state_dict(first.models[source].state_dict())
        inner = copy.deepcopy(first.optimizers[source].state_dict())
        run.optimizers[m].load_state_dict(inner)
        load_state(loop, base / f"{source}", RankInfo(m, run.num_clusters, 0, 1), {})


def through_shards(run: Simulated, whole: Path, sharded: Path) -> None:
    """Load every cluster's state on four ranks, and save it from there."""
    for m, loop in enumerate(run.loops):
        for rank in range(len(CUTS) - 1):
            shard = shard_loop(loop, run.method, rank)
            rank_info = RankInfo(m, run.num_clusters, rank, 4)
            load_state(shard, whole / f"{m}", rank_info, {})
            save_state(shard, sharded / f"{m}", rank_info, "run", {}, {})


CASES = [
    ("streaming_diloco", None),
    ("eager_2", None),
    ("co2, element, nesterov, clip", None),
    ("co2's penalty on streaming fragments", None),
    ("averaging in fragments, overlapped", None),
    ("cocodc", None),
    ("dilocox, H falls from 4 to 2", None),
    ("diloco_delayed", "quantized"),
    ("dilocox", "low_rank"),
]


@pytest.mark.parametrize(("case", "stop"), in_turn(CASES, [5, 6]))
def test_state_survives_other_shards_bit_for_bit(
    case: tuple[str, str | None], stop: int, tmp_path: Path
) -> None:
    name, codec = case
    runs = [simulated(name, codec, 2) if codec else new_tiny(name) for _ in range(3)]
    uninterrupted, first, second = runs
    for step in range(10):
        uninterrupted.train_step(loss if codec else mean_loss)
        if step < stop:
            first.train_step(loss if codec else mean_loss)
    save_all(first, tmp_path / "whole")
    through_shards(first, tmp_path / "whole", tmp_path / "sharded")
    resume(second, first, tmp_path / "sharded")
    for ours, theirs in zip(second.loops, first.loops, strict=True):
        for fragment in ours.adapter.fragments:
            state, expected = (x.state.named_state(fragment.id) for x in (ours, theirs))
            assert state.keys() == expected.keys()
            for key in expected.keys() - {"parity_check.memory"}:
                assert torch.equal(state[key], expected[key]), key
        for a, b in zip(ours.in_flight, theirs.in_flight, strict=True):
            if isinstance(b, Transfer):
                assert isinstance(a, Transfer)
                assert torch.equal(a.contribution_norm, b.contribution_norm)
                assert a.pending.bytes_sent == b.pending.bytes_sent
        assert ours.totals.bytes_sent == theirs.totals.bytes_sent
    for _ in range(stop, 10):
        second.train_step(loss if codec else mean_loss)
    for ours, theirs in zip(second.parameters(), uninterrupted.parameters(), strict=True):
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_parts_that_nobody_has_saved_are_an_error(tmp_path: Path) -> None:
    run = new_tiny("diloco")
    save_all(run, tmp_path / "whole")
    through_shards(run, tmp_path / "whole", tmp_path / "sharded")
    directory = tmp_path / "sharded" / "0"
    rank_file(directory, 0).write_bytes(rank_file(directory, 1).read_bytes())
    note_checksum(rank_file(directory, 0), checksum(rank_file(directory, 0)))
    with pytest.raises(ValueError, match=r"lacks .* elements of outer.momentum that rank 0"):
        load_state(run.loops[0], directory, RankInfo(0, 2, 0, 1), {})


@pytest.mark.parametrize(
    ("change", "codec"),
    in_turn([(2, 3), (3, 1), (4, 5), (5, 4), (2, 4)], ["quantized", "low_rank"]),
)
def test_another_number_of_clusters(
    change: tuple[int, int], codec: str, tmp_path: Path, caplog: Any
) -> None:
    before, after = change
    first, second = (simulated("diloco_delayed", codec, n) for n in (before, after))
    for _ in range(7):
        first.train_step(loss)
    save_all(first, tmp_path)
    with caplog.at_level(logging.WARNING):
        resume(second, first, tmp_path)
    assert ("are dropped" in caplog.text) == (after < before)
    assert ("its residuals start from zero" in caplog.text) == (after > before)
    owed_before = owed(first.loops[: min(before, after)], after)
    owed_after = owed(second.loops, after)
    assert torch.allclose(owed_after, owed_before, atol=1e-7)
    assert owed_before.abs().max() > 0.0001
    for loop in second.loops:
        assert torch.equal(loop.state.anchor[0], first.loops[0].state.anchor[0])
    for _ in range(6):
        second.train_step(loss)
    second.finish()
    for loop in second.loops[1:]:
        assert torch.equal(loop.state.anchor[0], second.loops[0].state.anchor[0])
    assert second.loops[0].history.step == 13
    assert not any("decoded another mean" in message for message in caplog.messages)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 1), (3, 3)])
def test_a_refused_round_under_way_stays_refused(before: int, after: int, tmp_path: Path) -> None:
    """Also where the cluster that it was refused because of is gone."""
    first, second = (new_tiny("diloco_delayed", n) for n in (before, after))
    while not first.loops[0].history.launched[0]:
        if first.loops[0].history.step + 1 == first.method.schedule.interval:
            next(first.models[-1].parameters()).data[0] = float("nan")
        first.train_step(mean_loss)
    save_all(first, tmp_path)
    resume(second, first, tmp_path)
    anchors = [anchor.clone() for anchor in second.loops[0].state.anchor]
    momenta = [slots.outer["momentum"].clone() for slots in second.loops[0].state.slots]
    for model in second.models:  # as if the lost cluster had been repaired
        model.load_state_dict(first.models[0].state_dict())
    for _ in range(second.method.schedule.interval):
        second.train_step(mean_loss)
    for loop in second.loops:
        assert loop.totals.refused == 1 and loop.history.rounds == [0]
        assert all(torch.equal(a, b) for a, b in zip(loop.state.anchor, anchors, strict=True))
        slots = [s.outer["momentum"] for s in loop.state.slots]
        assert all(torch.equal(a, b) for a, b in zip(slots, momenta, strict=True))


def owed(loops: Sequence[OuterLoop], num_clusters: int) -> Tensor:
    """What coding has lost in all, in units of what clusters send."""
    total = torch.zeros(loops[0].adapter.fragments[0].numel)
    for loop in loops:
        for error in loop.state.channels[0].codec.errors.values():
            scale = num_clusters if error.is_of_mean else 1
            total[error.start : error.stop] += scale * error.residual.read()
    return total


def two_legs(num_clusters: int, delay: str = "shift", error_feedback: str = "none") -> Simulated:
    """2 bits both ways: owners keep what coding a mean has lost, and under shift nothing else."""
    compression = CODECS_OF_ALL["two legs"] | {"error_feedback": error_feedback}
    method = preset(
        "diloco", num_clusters,
        schedule={"interval": 3}, delay={"type": delay}, compression=compression,
    )  # fmt: skip
    return Simulated(WideNet(), adamw, method, num_clusters)


def masters(loop: OuterLoop) -> Tensor:
    out = torch.empty(loop.adapter.fragments[0].numel)
    loop.adapter.read(0, out)
    return out


def kept_of_means(loop: OuterLoop) -> Tensor:
    found = torch.zeros(loop.adapter.fragments[0].numel)
    for error in loop.state.channels[0].codec.errors.values():
        assert error.is_of_mean
        found[error.start : error.stop] = error.residual.read()
    return found


def test_residuals_of_means_stay_with_their_owners_or_go_to_its_masters(tmp_path: Path) -> None:
    """C is 4, a power of two, so the whole is equal to the bit."""
    run = two_legs(4)
    for _ in range(6):
        run.train_step(loss)
    save_all(run, tmp_path)
    offsets = {slot.name: slot.offset for slot in run.loops[0].adapter.fragments[0].layout}
    for m, loop in enumerate(run.loops):
        before = kept_of_means(loop)
        kept, moved = torch.zeros_like(before), torch.zeros_like(before)
        for rank in range(4):
            shard = shard_loop(loop, run.method, rank)
            load_state(shard, tmp_path / f"{m}", RankInfo(m, 4, rank, 4), {})
            for slot in shard.adapter.fragments[0].layout:
                first = offsets[slot.name] + slot.start
                here, there = (slice(i, i + slot.numel) for i in (slot.offset, first))
                kept[there] = kept_of_means(shard)[here]
                moved[there] = masters(shard)[here] / -4
        assert kept.any() and moved.any() and not (kept * moved).any()
        assert torch.equal(kept + moved, before)


@pytest.mark.parametrize(
    ("after", "holds_average"), [(5, False), (4, False), (3, False), (1, False), (5, True)]
)
def test_means_get_what_coding_them_has_lost_with_other_clusters(
    after: int, holds_average: bool, tmp_path: Path, caplog: Any
) -> None:
    first, second = two_legs(4), two_legs(after)
    for _ in range(6):
        first.train_step(loss)
    save_all(first, tmp_path, holds_average)
    with caplog.at_level(logging.WARNING):
        resume(second, first, tmp_path)
    assert ("go into what this cluster sends next" in caplog.text) == (after != 4)
    assert ("are dropped" in caplog.text) == (after < 4)
    assert "are lost" not in caplog.text and "not used" not in caplog.text
    for m, loop in enumerate(second.loops[:4]):
        saved = kept_of_means(first.loops[m])
        sent_next = (masters(first.loops[m]) - masters(loop)) / after
        torch.testing.assert_close(kept_of_means(loop) + sent_next, saved, rtol=0, atol=1e-6)
        assert saved.abs().max() > 0.0001
        if after == 4:
            assert torch.equal(kept_of_means(loop), saved) and not sent_next.any()
    for loop in second.loops[4:]:
        assert not kept_of_means(loop).any()
        assert torch.equal(masters(loop), masters(first.loops[0]))
    for _ in range(6):
        second.train_step(loss)
    second.finish()
    for loop in second.loops[1:]:
        assert torch.equal(loop.state.anchor[0], second.loops[0].state.anchor[0])


@pytest.mark.filterwarnings("ignore::dsx.SettingWarning")
@pytest.mark.parametrize("error_feedback", ["none", "fp32"])
def test_residuals_of_means_that_nothing_can_take_are_lost_with_a_warning(
    error_feedback: str, tmp_path: Path, caplog: Any
) -> None:
    """Unless the run goes on with a residual of what is sent, as the warning says."""
    first = two_legs(4, "blocking")
    second = two_legs(5, "blocking", error_feedback)
    for _ in range(6):
        first.train_step(loss)
    save_all(first, tmp_path)
    with caplog.at_level(logging.WARNING):
        resume(second, first, tmp_path)
    assert ("are lost: this method" in caplog.text) == (error_feedback == "none")
    if error_feedback == "fp32":
        before, after = owed(first.loops, 5), owed(second.loops, 5)
        assert torch.allclose(after, before, atol=1e-7) and before.any()


def test_what_is_stored_in_fewer_bits_is_coded_anew_with_a_warning(
    tmp_path: Path, caplog: Any
) -> None:
    from tests.compress import test_over_gloo as codecs

    settings = {"type": "quantized", "wire": "int4", "error_feedback": "int8"}
    codecs.CODECS_OF_ALL["in int8"] = settings
    run = simulated("diloco", "in int8", 2)
    for _ in range(6):
        run.train_step(loss)
    save_all(run, tmp_path / "whole")
    with caplog.at_level(logging.WARNING):
        through_shards(run, tmp_path / "whole", tmp_path / "sharded")
    assert "coded anew in other groups" in caplog.text


def test_overlapping_pieces_are_put_together() -> None:
    def source(first: int, last: int) -> Source:
        slot = Slot("a", (last - first,), 0, first)
        return Source(shard_ranges([slot]), lambda i, j: torch.arange(first, last).float()[i:j])

    out = torch.full((6,), -1.0)
    wanted = shard_ranges([Slot("a", (4,), 0, 3), Slot("b", (2,), 4, 0)])
    assert put_together(wanted, out, [source(0, 4), source(4, 9)]) == 2
    assert out.tolist() == [3, 4, 5, 6, -1, -1]
    assert shard_ranges([Slot("a", (4,), 0, 3)], 1, 3)[0].first == 4
