"""Outer state on disk: resuming equals never having stopped, at every offset of a period."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dsx
from dsx.checkpoint.checksums import checksum, note_checksum
from dsx.checkpoint.files import SavedRank, differences, first_difference, rank_file
from dsx.checkpoint.outer_state import load_state
from dsx.comm.topology import RankInfo
from dsx.config.schema import preset, resolve_method
from dsx.core import registry
from dsx.method.outer_optimizer import OuterContext, OuterOptimizer
from dsx.outer.loop import OuterLoop
from dsx.outer.parcel import Opened
from dsx.outer.results import Results
from dsx.outer.shared_state import copy_shared, saved_names
from dsx.outer.transfer import Transfer
from tests.checkpoint.saved import save_state
from tests.engines.resumes import SIDE, Net
from tests.levels import by_default
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, CASES, TinyNet, mean_loss

NUM_CLUSTERS, NUM_STEPS = 2, 14
FORMAT_8 = Path(__file__).parents[1] / "fixtures" / "outer_state_8"


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def new_run(name: str, num_clusters: int = NUM_CLUSTERS) -> Simulated:
    return Simulated(TinyNet(), adamw, ALL_CASES[name].method(num_clusters), num_clusters)


@functools.cache
def whole_run(name: str) -> Simulated:
    """Return a run that never stopped; only to be looked at."""
    run = new_run(name)
    for _ in range(NUM_STEPS):
        run.train_step(mean_loss)
    return run


def rank_info(cluster: int, num_clusters: int = NUM_CLUSTERS) -> RankInfo:
    return RankInfo(cluster, num_clusters, 0, 1)


def save_all(run: Simulated, base: Path, axes: Mapping[str, Any], tracked: Any = None) -> None:
    for m, loop in enumerate(run.loops):
        here = rank_info(m, run.num_clusters)
        save_state(loop, base / f"cluster_{m}", here, "run-a", axes, tracked or {})


def resumed(first: Simulated, name: str, base: Path) -> Simulated:
    """Save a run, and return a new one that has loaded it."""
    axes, stop = ALL_CASES[name].axes(), first.num_steps
    save_all(first, base, axes, {"data": {"position": stop}})
    second = new_run(name)
    for m, loop in enumerate(second.loops):
        second.models[m].load_state_dict(first.models[m].state_dict())
        second.optimizers[m].load_state_dict(copy.deepcopy(first.optimizers[m].state_dict()))
        tracked = load_state(loop, base / f"cluster_{m}", rank_info(m), axes)
        assert tracked == {"data": {"position": stop}}
        assert len(loop.in_flight) == len(first.loops[0].in_flight)
    return second


def assert_the_same(second: Simulated, whole: Simulated) -> None:
    for ours, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    for ours, theirs in zip(second.loops, whole.loops, strict=True):
        assert ours.history == theirs.history
        assert ours.totals.bytes_sent == theirs.totals.bytes_sent
        for fragment in range(ours.history.num_fragments):
            state, expected = (x.state.named_state(fragment) for x in (ours, theirs))
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.ci
@pytest.mark.parametrize("stop", range(1, 10))
@pytest.mark.parametrize("name", ALL_CASES)
def test_resume_is_bit_for_bit(name: str, stop: int, tmp_path: Path) -> None:
    first = new_run(name)
    for _ in range(stop):
        first.train_step(mean_loss)
    second = resumed(first, name, tmp_path)
    for _ in range(NUM_STEPS - stop):
        second.train_step(mean_loss)
    assert_the_same(second, whole_run(name))


@pytest.mark.parametrize("name", ALL_CASES)
def test_resuming_again_and_again_is_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Behind every odd step up to the ninth, each time from what the one before has saved."""
    run = new_run(name)
    for step in range(1, NUM_STEPS + 1):
        run.train_step(mean_loss)
        if step % 2 and step < 10:
            run = resumed(run, name, tmp_path / str(step))
    assert_the_same(run, whole_run(name))


@pytest.mark.parametrize("name", ["streaming_diloco", "dilocox", "recommended", "cocodc"])
def test_what_a_joining_cluster_needs_is_found_in_its_own_checkpoint(
    name: str, tmp_path: Path
) -> None:
    run = new_run(name)
    for _ in range(5):
        run.train_step(mean_loss)
    save_all(run, tmp_path, ALL_CASES[name].axes())
    loop = run.loops[1]
    copy = copy_shared(loop, Results(), prunes=False)
    assert copy is not None
    parcel = copy()
    needed = Opened(parcel.head)
    assert all(needed.put(i, parcel.slice(i)) for i in range(len(needed.hashes)))
    saved = SavedRank(rank_file(tmp_path / "cluster_1", 0))
    names = saved_names(loop)
    assert set(names.values()) >= {f"anchor/{f.id}" for f in loop.adapter.fragments}
    for of_parcel, tensor in needed.tensors.items():
        assert of_parcel not in names or torch.equal(saved.read(names[of_parcel]), tensor)


def test_an_outer_optimizer_that_is_registered_resumes_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_known", {k: dict(v) for k, v in registry._known.items()})

    @dsx.register("outer_optimizer", "sign")
    @dataclass(frozen=True)
    class Sign(OuterOptimizer):
        lr: float
        decay: float = 0.5
        slots = ("mean",)

        def validate(self) -> None:
            """Takes every value."""

        def update(
            self, grad: torch.Tensor, slots: Mapping[str, torch.Tensor], context: OuterContext
        ) -> torch.Tensor:
            mean = slots["mean"].mul_(self.decay).add_(grad)
            return torch.sign(mean, out=grad).mul_(self.lr)

    def start(**fields: Any) -> tuple[Simulated, Mapping[str, Any]]:
        overrides = {
            "schedule": {"interval": 4}, "outer_optimizer": {"type": "sign", "lr": 0.01, **fields}
        }  # fmt: skip
        method, axes = resolve_method("diloco", overrides, 2)
        return Simulated(TinyNet(), adamw, method, 2), axes

    def resume(run: Simulated, axes: Mapping[str, Any]) -> None:
        for m, loop in enumerate(run.loops):
            run.models[m].load_state_dict(first.models[m].state_dict())
            run.optimizers[m].load_state_dict(copy.deepcopy(first.optimizers[m].state_dict()))
            load_state(loop, tmp_path / f"cluster_{m}", rank_info(m), axes)

    (whole, _), (first, axes), (second, _) = start(), start(), start()
    for step in range(NUM_STEPS):
        whole.train_step(mean_loss)
        if step < 6:
            first.train_step(mean_loss)
    assert axes["outer_optimizer"] == {"type": "sign", "lr": 0.01, "decay": 0.5}
    save_all(first, tmp_path, axes)
    resume(second, axes)
    for _ in range(6, NUM_STEPS):
        second.train_step(mean_loss)
    for ours, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    resume(*start(decay=0.9))  # another value, the same type
    other, other_axes = new_run("diloco"), ALL_CASES["diloco"].axes()
    with pytest.raises(ValueError, match=r"outer_optimizer.*sign"):
        resume(other, other_axes)


@pytest.mark.parametrize("name", by_default(ALL_CASES, *CASES))
def test_a_checkpoint_of_a_finished_run_goes_on_like_the_run(name: str, tmp_path: Path) -> None:
    axes, first, second = ALL_CASES[name].axes(), new_run(name), new_run(name)
    for _ in range(6):
        first.train_step(mean_loss)
    first.finish()
    save_all(first, tmp_path, axes)
    for m, loop in enumerate(second.loops):
        second.models[m].load_state_dict(first.models[m].state_dict())
        second.optimizers[m].load_state_dict(copy.deepcopy(first.optimizers[m].state_dict()))
        load_state(loop, tmp_path / f"cluster_{m}", rank_info(m), axes)
    for _ in range(9):
        assert first.train_step(mean_loss) == second.train_step(mean_loss)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("name", ["streaming_diloco", "eager"])
def test_a_finished_run_goes_on_from_its_own_masters(
    name: str, is_sharded: bool, tmp_path: Path
) -> None:
    """The engine's files hold the average; what a cluster goes on from is in the outer state."""
    first = new_run(name)
    for _ in range(6):
        first.train_step(mean_loss)
    first.finish()
    own = [[p.clone() for p in model.parameters()] for model in first.models]
    inner = [copy.deepcopy(optimizer.state_dict()) for optimizer in first.optimizers]
    for m, loop in enumerate(first.loops):
        masters = [torch.empty(fragment.numel) for fragment in loop.adapter.fragments]
        for fragment, master in enumerate(masters):
            loop.adapter.read(fragment, master)
        save_state(loop, tmp_path / f"{m}", rank_info(m), "run-a", {}, {}, masters)
    with first.averaged():
        average = first.models[0].state_dict()
        average = {n: p.clone() for n, p in average.items()}
    second = new_run(name)
    for m, loop in enumerate(second.loops):
        second.models[m].load_state_dict(average)
        second.optimizers[m].load_state_dict(inner[m])
        # of two ranks: put together from the files of others, here of one
        place = RankInfo(m, NUM_CLUSTERS, 0, 2) if is_sharded else rank_info(m)
        load_state(loop, tmp_path / f"{m}", place, {})
        pairs = zip(second.models[m].parameters(), own[m], strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        assert name == "eager" or not torch.equal(own[m][0], average["layers.0.weight"])
    for run in (first, second):
        for _ in range(6):
            run.train_step(mean_loss)
    for ours, theirs in zip(second.parameters(), first.parameters(), strict=True):
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize("name", ["streaming_diloco", "eager"])
@pytest.mark.parametrize("number", [7, 8])
def test_what_dsx_0_2_has_saved_is_gone_on_with(number: int, name: str, tmp_path: Path) -> None:
    """At step 6, with transfers under way; files of format 8 that an earlier version has written.

    What it came to at step 14 lies beside them.
    """
    first = FORMAT_8 / name
    method = ALL_CASES[name].method(NUM_CLUSTERS)
    sgd = functools.partial(torch.optim.SGD, lr=0.2)
    run = Simulated(TinyNet(), lambda model: sgd(model.parameters()), method, NUM_CLUSTERS)
    for m, loop in enumerate(run.loops):
        here = tmp_path / f"cluster_{m}"
        shutil.copytree(first / f"cluster_{m}", here)
        if number == 7:
            as_format_7(rank_file(here, 0))
        run.models[m].load_state_dict(load_file(here / "weights.safetensors"))
        load_state(loop, here, rank_info(m), ALL_CASES[name].axes())
    assert run.num_steps == 6 and any(isinstance(t, Transfer) for t in run.loops[0].in_flight)
    for _ in range(8):
        run.train_step(mean_loss)
    for m, ours in enumerate(run.parameters()):
        theirs = load_file(first / f"end_of_cluster_{m}.safetensors")
        for key, expected in theirs.items():  # another processor rounds matrix products otherwise
            torch.testing.assert_close(ours[key], expected, rtol=1e-5, atol=1e-6)


def as_format_7(path: Path) -> None:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = json.loads(file.metadata()["dsx"])
    assert meta.pop("engine_holds") == "local" and meta["format"] == 8
    save_file(tensors, path, {"dsx": json.dumps({**meta, "format": 7})})
    path.with_name(f"{path.name}.sha256").unlink()


def test_streaming_is_saved_with_a_transfer_in_flight() -> None:
    run = new_run("streaming_diloco")
    seen = set()
    for _ in range(8):
        run.train_step(mean_loss)
        seen.add(len(run.loops[0].in_flight))
    assert 2 in seen  # otherwise the test above proves less than it says


def test_a_file_of_another_layout_is_refused_by_name(tmp_path: Path) -> None:
    run = new_run("streaming_diloco")
    save_state(run.loops[0], tmp_path, rank_info(0), "run-a", {}, {})
    other = Simulated(
        TinyNet(), adamw, preset("streaming_diloco", fragments={"num_fragments": 2}), 2
    )
    with pytest.raises(ValueError, match=r"belongs to another model or fragmentation: par"):
        load_state(other.loops[0], tmp_path, rank_info(0), {})


def test_a_look_ahead_by_what_was_not_sent_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Eager in codes kept its share before coding, up to a version that says nothing of it."""
    method = preset("eager", compression={"type": "quantized"}, schedule={"interval": 2})
    run = Simulated(TinyNet(), adamw, method, 1)
    for _ in range(5):
        run.train_step(mean_loss)
    save_state(run.loops[0], tmp_path, rank_info(0, 1), "run-a", {}, {})
    load_state(run.loops[0], tmp_path, rank_info(0, 1), {})
    assert not caplog.text
    with safe_open(path := rank_file(tmp_path, 0), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = json.loads(file.metadata()["dsx"])
    del meta["encodes_at_launch"]
    save_file(tensors, path, {"dsx": json.dumps(meta)})
    note_checksum(path, checksum(path))
    load_state(run.loops[0], tmp_path, rank_info(0, 1), {})
    assert "looked ahead by its own share as it was before coding" in caplog.text


@pytest.mark.parametrize(
    ("saved", "resumed", "said"),
    [
        ("diloco", "eager", "delay of type 'blocking', and this run has 'eager'"),
        ("diloco_delayed", "diloco", "delay of type 'one_step', and this run has 'blocking'"),
        ("streaming_diloco", "cocodc", "schedule of type 'streaming', and this run has 'adaptive'"),
        ("slowmo", "diloco", "outer_optimizer of type 'momentum', and this run has 'nesterov'"),
        ("diloco_delayed", "co2", "outer_optimizer of type 'nesterov', and"),
        ("eager", "eager_2", "holds rounds_under_way=1, and this method 2"),
        ("dilocox", "dilocox, H falls from 4 to 2", None),  # other values, the same kind
    ],
)
def test_another_kind_of_method_does_not_resume(
    saved: str, resumed: str, said: str | None, tmp_path: Path
) -> None:
    run, other = new_run(saved), new_run(resumed)
    for _ in range(6):
        run.train_step(mean_loss)
    save_state(run.loops[0], tmp_path, rank_info(0), "run-a", ALL_CASES[saved].axes(), {})
    if said is None:
        load_state(other.loops[0], tmp_path, rank_info(0), ALL_CASES[resumed].axes())
        assert other.loops[0].history.step == 6
        return
    with pytest.raises(ValueError, match=said):
        load_state(other.loops[0], tmp_path, rank_info(0), ALL_CASES[resumed].axes())
    assert other.loops[0].history.step == 0  # nothing was changed


def test_missing_and_foreign_files_are_hard_errors(tmp_path: Path) -> None:
    run = new_run("diloco")
    with pytest.raises(FileNotFoundError, match="no outer state at"):
        load_state(run.loops[0], tmp_path, rank_info(0), {})
    save_file({"x": torch.zeros(1)}, str(rank_file(tmp_path, 0)))
    with pytest.raises(ValueError, match="is not an outer state of format 11"):
        load_state(run.loops[0], tmp_path, rank_info(0), {})
    rank_file(tmp_path, 0).write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="dsx_rank_00000.safetensors cannot be read"):
        load_state(run.loops[0], tmp_path, rank_info(0), {})
    two_ranks = RankInfo(0, NUM_CLUSTERS, 0, 2)
    save_state(run.loops[0], tmp_path, two_ranks, "run-a", {}, {})
    with pytest.raises(FileNotFoundError, match="dsx_rank_00001.* the file of this one is gone"):
        load_state(run.loops[0], tmp_path, rank_info(0), {})
    save_state(run.loops[0], tmp_path, RankInfo(0, NUM_CLUSTERS, 1, 2), "run-b", {}, {})
    with pytest.raises(ValueError, match="dsx_rank_00001.* of another save: session is 'run-b'"):
        load_state(run.loops[0], tmp_path, rank_info(0), {})


def test_first_difference_names_the_path() -> None:
    ours = {"a": [1, {"b": 2}], "c": 3}
    assert first_difference(ours, {"a": [1, {"b": 2}], "c": 3}) is None
    assert first_difference(ours, {"a": [1, {"b": 5}], "c": 3}) == ("a[1].b", 2, 5)
    assert first_difference(ours, {"a": [1, {"b": 2}]}) == ("c", 3, None)
    assert first_difference(ours, {"a": [1], "c": 3}) == ("the length of a", 2, 1)
    assert list(differences(ours, {"a": [1, {"b": 5}]})) == [("a[1].b", 2, 5), ("c", 3, None)]


class UnderWay:
    """A transfer whose thread owns its buffer until it is waited for."""

    bytes_sent, seconds = 0, 0.0

    def __init__(self, loop: OuterLoop, fragment: int) -> None:
        self.loop, self.fragment = loop, fragment
        self.anchor_when_waited: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        self.anchor_when_waited = self.loop.state.anchor[self.fragment].clone()
        return torch.zeros_like(self.loop.state.anchor[self.fragment])


def test_loading_waits_for_what_is_under_way_before_it_touches_a_buffer(tmp_path: Path) -> None:
    run = new_run("streaming_diloco")
    for _ in range(6):
        run.train_step(mean_loss)
    loop = run.loops[0]
    save_state(loop, tmp_path, rank_info(0), "run-a", {}, {})
    for _ in range(5):
        run.train_step(mean_loss)
    under_way = [UnderWay(loop, transfer.fragment) for transfer in loop.in_flight]
    for transfer, pending in zip(loop.in_flight, under_way, strict=True):
        assert isinstance(transfer, Transfer)
        transfer.pending = pending
    before = [anchor.clone() for anchor in loop.state.anchor]
    load_state(loop, tmp_path, rank_info(0), {})
    assert under_way
    for pending in under_way:
        assert pending.anchor_when_waited is not None
        assert torch.equal(pending.anchor_when_waited, before[pending.fragment])
        assert not torch.equal(loop.state.anchor[pending.fragment], before[pending.fragment])


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.module.", "module._orig_mod."])
def test_what_was_saved_under_the_names_of_wrappers_goes_on(
    wrapper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As dsx 0.2 named parameters under DistributedDataParallel and torch.compile."""

    def wrapped(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return {wrapper + name: p for name, p in model.named_parameters()}

    def loss(model: torch.nn.Module, cluster: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * cluster + step)
        return model(*torch.randn(2, 3, SIDE, generator=generator))

    overrides = {"schedule": {"interval": 4}, "compression": {"type": "low_rank", "rank": 2}}
    method, axes = (
        preset("diloco_delayed", 2, **overrides),
        resolve_method("diloco_delayed", overrides)[1],
    )
    monkeypatch.setattr("dsx.engines.torch.bare_parameters", wrapped)
    old = Simulated(Net(0), adamw, method, NUM_CLUSTERS)
    for _ in range(6):
        old.train_step(loss)
    save_all(old, tmp_path, axes)
    monkeypatch.undo()
    new = Simulated(Net(0), adamw, method, NUM_CLUSTERS)
    for m, loop in enumerate(new.loops):
        new.models[m].load_state_dict(old.models[m].state_dict())
        new.optimizers[m].load_state_dict(copy.deepcopy(old.optimizers[m].state_dict()))
        load_state(loop, tmp_path / f"cluster_{m}", rank_info(m), axes)
    for ours, theirs in zip(new.loops, old.loops, strict=True):
        for fragment in ours.adapter.fragments:
            found = ours.state.named_state(fragment.id)
            for name, value in theirs.state.named_state(fragment.id).items():
                assert torch.equal(found[name.replace(wrapper, "")], value)
    for _ in range(6):
        assert new.train_step(loss) == old.train_step(loss)
