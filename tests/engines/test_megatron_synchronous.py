"""From a run of plain Megatron into one across clusters, and back: states and place in data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dsx
from megatron_patches import data, probe, synchronous
from megatron_patches.place import Place
from tests.distributed import run_distributed
from tests.engines.megatrons import (
    Kind,
    build_inner,
    config_of,
    needs_megatron,
    train_step,
    whole_weights,
)
from tests.engines.test_megatron_patches import CLUSTERS, MICRO_BATCH, RANKS, TOTAL, patched

BEFORE = 7  # samples that the plain run has read, of no whole batch of all clusters
BATCH = MICRO_BATCH * RANKS
SINGLE = {"dataloader_type": "single", "load": "there", "micro_batch_size": MICRO_BATCH}


def begin(run: Any, counted: int, is_plain: bool, is_split: bool = True, **more: Any) -> Any:
    """Let a cluster's loop find its place, as `agree` does; return its arguments."""
    arguments = SimpleNamespace(**{**SINGLE, "consumed_train_samples": counted, **more})
    run.division.is_split = is_split
    data._find_place(run.division, arguments, is_plain)
    return arguments


def read(kind: Any, counted: int, steps: int) -> list[int]:
    """Return what all ranks of a cluster read in so many batches of each."""
    found: list[int] = []
    for rank in range(RANKS):
        batches = list(kind(TOTAL, counted, MICRO_BATCH, rank, RANKS))
        found += [sample for batch in batches[:steps] for sample in batch]
    return found


def test_clusters_read_on_where_a_plain_run_was_and_it_where_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, places, states = list(range(BEFORE)), [], []
    for cluster in range(CLUSTERS):
        run: Any = SimpleNamespace()
        kind, training = patched(monkeypatch, cluster, run)
        arguments = begin(run, BEFORE, is_plain=True)
        assert arguments.consumed_train_samples == BEFORE
        assert training.get_train_valid_test_num_samples()[0] == (
            BEFORE + CLUSTERS * (TOTAL - BEFORE)
        )
        seen += read(kind, BEFORE, 2)
        arguments.consumed_train_samples += 2 * BATCH
        with run.division.place.saving(arguments):
            places.append(arguments.consumed_train_samples)  # in Megatron's checkpoint
            states.append(run.division.place.state_dict())
        assert arguments.consumed_train_samples == BEFORE + 2 * BATCH
    assert places == [BEFORE + 2 * BATCH * CLUSTERS] * CLUSTERS
    assert sorted(seen) == list(range(places[0]))
    for cluster in range(CLUSTERS):  # resumed
        run = SimpleNamespace()
        kind, _ = patched(monkeypatch, cluster, run)
        run.division.place.load_state_dict(states[cluster])
        arguments = begin(run, places[cluster], is_plain=False)
        assert arguments.consumed_train_samples == BEFORE + 2 * BATCH
        seen += read(kind, arguments.consumed_train_samples, 1)
    assert sorted(seen) == list(range(BEFORE + 3 * BATCH * CLUSTERS))


def test_a_place_without_a_plain_run_and_of_older_checkpoints() -> None:
    place = Place()
    assert place.go_on(3, 40) == 40 and place.of(40) == 120  # one that holds no place
    saved = Place()
    saved.begin(3, 0, 0)
    saved.counted = 40
    other = Place()
    other.load_state_dict(saved.state_dict())
    assert other.go_on(2, 120) == 40  # with other clusters, behind what those have read
    assert (other.of(40), other.of(50)) == (120, 140)
    assert other.counted_before == 40
    other.load_state_dict(saved.state_dict())
    assert other.go_on(1, 120, is_own=True) == 40  # shared before, and now each cluster's own
    assert (other.of(40), other.of(50)) == (40, 50)
    other.load_state_dict(saved.state_dict())
    assert other.go_on(1, 120) == 40 and other.of(40) == 120  # one cluster alone


def test_data_of_a_clusters_own_begins_at_its_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = SimpleNamespace()
    kind, training = patched(monkeypatch, 1, run)
    begin(run, BEFORE, is_plain=True, is_split=False)
    assert sorted(read(kind, BEFORE, 2)) == list(range(2 * BATCH))
    assert training.get_train_valid_test_num_samples()[0] == TOTAL - BEFORE
    external = begin(run, BEFORE, is_plain=True, dataloader_type="external")
    with run.division.place.saving(external):
        assert external.consumed_train_samples == BEFORE


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dataloader_type": "cyclic"}, "--dataloader-type cyclic orders samples by the number"),
        ({"phase_transition_iterations": [4]}, "--phase-transition-iterations counts samples by"),
    ],
)
def test_an_order_of_one_world_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    run: Any = SimpleNamespace()
    patched(monkeypatch, 0, run)
    with pytest.raises(ValueError, match=said) as caught:
        begin(run, BEFORE, is_plain=True, **given)
    assert "or begin from the weights alone (--finetune)" in str(caught.value)
    begin(run, BEFORE, is_plain=True, is_split=False, **given)
    begin(run, BEFORE, is_plain=False, **given)
    saved = {"counted": 8, "place": 8 * CLUSTERS, "begun": [0, 0], "parts": CLUSTERS}
    run.division.place.load_state_dict(saved)
    assert begin(run, 8 * CLUSTERS, is_plain=False, **given).consumed_train_samples == 8
    run.division.place.load_state_dict({**saved, "parts": CLUSTERS + 1})
    with pytest.raises(
        ValueError, match=rf"in {CLUSTERS + 1} part\(s\), and this one in {CLUSTERS}"
    ):
        begin(run, 8 * CLUSTERS, is_plain=False, **given)
    begin(run, 8 * CLUSTERS, is_plain=False, is_split=False, **given)


@pytest.mark.parametrize(
    ("iteration", "saved_with", "outer", "is_plain"),
    [
        (10, {"num_layers": 2}, None, True),
        (10, {"num_layers": 2}, "iter_0000005", True),
        (10, {"num_layers": 2}, "iter_0000010", False),
        (10, {"dsx_preset": "diloco"}, None, False),  # its outer state is lost
        (0, {}, None, False),
    ],
)
def test_whose_checkpoint_megatron_has_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    iteration: int, saved_with: dict[str, Any], outer: str | None, is_plain: bool,
) -> None:  # fmt: skip
    checked: list[Any] = []

    def check_checkpoint_args(checkpoint_args: Any, skip_args: Any = None) -> None:
        checked.append(checkpoint_args)

    loading = SimpleNamespace(__name__="checkpointing", check_checkpoint_args=check_checkpoint_args)
    monkeypatch.setattr(probe, "module", lambda *names: loading)  # pyright: ignore
    world = SimpleNamespace(
        cluster_id=0, rendezvous=SimpleNamespace(gather=lambda what, value: [value])
    )
    told: list[str] = []
    run: Any = SimpleNamespace(world=world, has_loaded_own=False, tell=told.append)
    synchronous.patch(run)
    if iteration:
        loading.check_checkpoint_args(SimpleNamespace(**saved_with), skip_args=None)
        assert len(checked) == 1
    if outer:
        (tmp_path / "dsx" / "cluster_0" / outer).mkdir(parents=True)
        (tmp_path / "dsx" / "cluster_0" / outer / "dsx.json").write_text("{}")
    arguments = SimpleNamespace(load=str(tmp_path), save=str(tmp_path), iteration=iteration)
    assert synchronous.begins_plain(run, arguments) is is_plain
    if outer == "iter_0000005":
        synchronous.tell(run, arguments)
        assert told[-1] == f"{tmp_path} holds iter_0000005 of dsx: to go on from that, --load it"


def test_a_checkpoint_is_of_dsx_or_of_none() -> None:
    said = r"resume=\('there', 2\) or begins_from=\('here', {}\): give one, not both"
    with pytest.raises(ValueError, match=said):
        dsx.attach_megatron([], None, config={}, resume=("there", 2), begins_from=("here", {}))


def states(engine: Any) -> list[torch.Tensor]:
    """Return masters and moments of what this rank steps."""
    from dsx.engines.megatron.masters import locate

    pieces = [piece for place in locate(engine.optimizer) for _, piece in place.pieces()]
    leaf = engine.optimizer.chained_optimizers[0]
    held = [leaf.optimizer.state[piece.master] for piece in pieces]
    moments = [one[key].clone() for one in held for key in ("exp_avg", "exp_avg_sq")]
    return [piece.view().clone() for piece in pieces] + moments


def anchors_are_masters(loop: Any) -> bool:
    for fragment in loop.adapter.fragments:
        own = torch.empty(fragment.numel)
        loop.adapter.read(fragment.id, own)
        if not own.equal(loop.state.anchor[fragment.id]):
            return False
    return True


def begin_from_plain(kind: Kind) -> dict[str, Any]:
    """Train in each cluster alike, as if loaded, and begin; then from moments of its own."""
    found: dict[str, Any] = {}
    for case in ("alike", "moments", "weights"):
        engine = build_inner(kind, seed=0)
        cluster = dsx.comm.world.current_world().cluster_id
        for step in range(2):
            train_step(engine, step, cluster=0)
        if case == "moments":
            leaf = engine.optimizer.chained_optimizers[0].optimizer
            next(iter(leaf.state.values()))["exp_avg"].add_(cluster)
        if case == "weights":
            train_step(engine, 2, cluster=cluster)
        before = states(engine)
        try:
            handle = dsx.attach_megatron(
                engine.chunks, engine.optimizer, config=config_of(kind),
                begins_from=("--load there", {"iteration": 2}),
            )  # fmt: skip
        except ValueError as error:
            found[case] = str(error)
            continue
        after = states(engine)
        found[case] = all(a.equal(b) for a, b in zip(before, after, strict=True))
        found["step"] = handle.step
        found["anchors"] = anchors_are_masters(handle.loop)
        handle.close()
    whole_weights(engine)
    return found


@needs_megatron
@pytest.mark.ci
def test_what_megatron_has_loaded_stays_and_is_the_same_everywhere() -> None:
    kind = Kind(is_sharded=True, precision="bf16")
    for found in run_distributed(begin_from_plain, 4, kind, engine="megatron", timeout_seconds=240):
        assert found["alike"] is True and found["step"] == 0 and found["anchors"]
        for case, what in (("moments", "optimizer states, schedules"), ("weights", "weights from")):
            assert f"the clusters have loaded different {what}" in found[case]
            assert "--load there" in found[case]
