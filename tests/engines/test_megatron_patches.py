"""The wraps around Megatron's training loop, on stand-ins of its shape: no tree is needed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsx.config.divergence import DivergenceConfig
from megatron_patches import data, joining, losses, probe, training_end, validation

TOTAL, MICRO_BATCH, RANKS, CLUSTERS = 48, 2, 2, 3


class MegatronPretrainingSampler:
    """Megatron's own, shortened."""

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        self.range = range(consumed_samples, total_samples)
        self.size, self.rank = micro_batch_size, data_parallel_rank
        self.whole = micro_batch_size * data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, len(self.range) - self.whole + 1, self.whole):
            start = first + self.rank * self.size
            yield list(self.range[start : start + self.size])


class MegatronPretrainingRandomSampler(MegatronPretrainingSampler):
    """Of the same parameters."""


def patched(monkeypatch: pytest.MonkeyPatch, cluster: int, run: Any = None) -> tuple[Any, Any]:
    """Return the sampler and the training module as a cluster's processes have them."""
    kinds = (MegatronPretrainingSampler, MegatronPretrainingRandomSampler)
    copies = {kind.__name__: type(kind.__name__, (kind,), {}) for kind in kinds}
    for copy in copies.values():
        copy.__init__ = MegatronPretrainingSampler.__init__
    samplers = SimpleNamespace(__name__="data_samplers", **copies)

    def build_pretraining_data_loader(dataset: list[int], consumed_samples: int) -> list[Any]:
        kind = samplers.MegatronPretrainingSampler
        return [list(kind(TOTAL, consumed_samples, MICRO_BATCH, r, RANKS)) for r in range(RANKS)]

    training = SimpleNamespace(
        __name__="training",
        get_train_valid_test_num_samples=lambda: (TOTAL, None, 0),
        build_train_valid_test_datasets=lambda: ([1], [2], [3]),
        build_pretraining_data_loader=build_pretraining_data_loader,
    )
    monkeypatch.setattr(probe, "module", lambda new, old: samplers)  # pyright: ignore
    monkeypatch.setattr(probe, "training", lambda: training)
    run = SimpleNamespace() if run is None else run
    run.world = SimpleNamespace(num_clusters=CLUSTERS, cluster_id=cluster)
    data.patch(run)
    return samplers.MegatronPretrainingSampler, training


def test_clusters_read_every_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    for cluster in range(CLUSTERS):
        kind, training = patched(monkeypatch, cluster)
        assert training.get_train_valid_test_num_samples() == (CLUSTERS * TOTAL, None, 0)
        for rank in range(RANKS):
            batches = list(kind(TOTAL, 0, MICRO_BATCH, rank, RANKS))
            consumed = 2 * MICRO_BATCH * RANKS  # of this cluster, after two batches
            assert list(kind(TOTAL, consumed, MICRO_BATCH, rank, RANKS)) == batches[2:]
            assert list(kind(TOTAL, consumed, MICRO_BATCH, rank, data_parallel_size=RANKS))
            read += [sample for batch in batches for sample in batch]
    assert sorted(read) == list(range(TOTAL))


def load(training: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the batches of the training, validation and test loaders, as Megatron builds them."""
    datasets = training.build_train_valid_test_datasets()
    return tuple(training.build_pretraining_data_loader(dataset, 0) for dataset in datasets)


def test_validation_is_of_the_same_samples_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    train: list[Any] = []
    for cluster in range(CLUSTERS):
        own, *others = load(patched(monkeypatch, cluster)[1])
        train.append(own)
        whole = [s for rank in others[0] for batch in rank for s in batch]
        assert sorted(whole) == list(range(TOTAL)) and others[0] == others[1]
    assert len({str(own) for own in train}) == CLUSTERS


def test_data_of_its_own_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = SimpleNamespace()
    _, training = patched(monkeypatch, 1, run)
    run.division.is_split = False
    assert training.get_train_valid_test_num_samples() == (TOTAL, None, 0)
    train, valid, _ = load(training)
    assert train == valid
    assert sorted(s for rank in train for batch in rank for s in batch) == list(range(TOTAL))


class Averaging(list[str]):
    """A handle that notes when it holds the average."""

    preemption = SimpleNamespace(is_due=False)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        self.append("averaged")
        yield
        self.append("own again")


def test_a_line_says_whether_a_script_s_own_data_is_divided() -> None:
    told = SimpleNamespace(
        dataloader_type="single", train_samples=None, train_iters=10, global_batch_size=4,
        seq_length=8,
    )  # fmt: skip
    division = data.Division(CLUSTERS, 1)
    line = data._training_line(division, [], told)
    assert "data of the script's own, shared by all clusters" in line
    assert "reads part 2; 40 samples, 320 tokens" in line
    told.step_batch_size_schedule = "0:4 20:8"
    assert "reads part 2; 10 steps in this run, of" in data._training_line(division, [], told)
    told.step_batch_size_schedule = None
    told.dataloader_type = "external"
    assert "which divides it itself; 40 samples" in data._training_line(division, [], told)


@pytest.mark.parametrize("wanted", ["own", "average", "both"])
def test_whose_loss_a_validation_prints(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    arguments = SimpleNamespace(consumed_valid_samples=10)
    handle = Averaging()

    def evaluate_and_print_results(
        prefix: str, data_iterator: Any, write_to_tensorboard: bool = True
    ) -> None:
        parts = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        read = [next(part) for part in parts if part is not None for _ in range(2)]
        arguments.consumed_valid_samples += 4
        handle.append(f"{prefix}: {read} {write_to_tensorboard}")

    training = SimpleNamespace(
        __name__="training", evaluate_and_print_results=evaluate_and_print_results
    )
    monkeypatch.setattr(probe, "training", lambda: training)
    monkeypatch.setattr(probe, "arguments_in_force", lambda: arguments)
    run: Any = SimpleNamespace(handle=handle, validation=wanted)
    validation.patch(run)
    whole = [iter(range(9)), None]
    for step in (1, 2):
        training.evaluate_and_print_results(f"step {step}", data_iterator=whole)
    average = f" {validation.AVERAGE}: "
    assert (
        handle
        == {
            "own": ["step 1: [0, 1] True", "step 2: [2, 3] True"],
            "average": ["averaged", f"step 1{average}[0, 1] True", "own again"]
            + ["averaged", f"step 2{average}[2, 3] True", "own again"],
            "both": ["step 1: [0, 1] True", "averaged", f"step 1{average}[0, 1] False", "own again"]
            + ["step 2: [2, 3] True", "averaged", f"step 2{average}[2, 3] False", "own again"],
        }[wanted]
    )
    assert arguments.consumed_valid_samples == 18


def test_the_bounds_of_divergence_see_megatrons_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [
        ({"lm loss": torch.tensor(2.5), "mtp loss": torch.tensor(9.0)}, 0, False),
        ({}, 0, False),  # of another stage
        ({"a": torch.tensor(1.0), "b": torch.tensor(float("nan"))}, 0, False),
        ({"a": torch.tensor(1.0), "b": torch.tensor(3.0)}, 1, False),
        [1, 2],
    ]
    returned = iter(results)
    training = SimpleNamespace(__name__="training", train_step=lambda *args: next(returned))
    monkeypatch.setattr(probe, "training", lambda: training)
    told: list[float] = []
    handle = SimpleNamespace(log_step=lambda loss: told.append(loss))
    original = training.train_step
    run: Any = SimpleNamespace(
        handle=handle, config=SimpleNamespace(divergence=DivergenceConfig(max_loss=None))
    )
    losses.patch(run)
    assert training.train_step is original  # without a bound it is not touched
    run.config.divergence = DivergenceConfig(max_loss=5.0)
    losses.patch(run)
    assert [training.train_step("data", 1) for _ in range(4)] == results[:4]
    assert told == [2.5, pytest.approx(math.nan, nan_ok=True), 3.0]
    with pytest.raises(probe.UnknownMegatron, match="train_step returned something else"):
        training.train_step("data", 1)


def test_another_shape_is_refused() -> None:
    def train(forward_step: Any) -> None: ...

    owner = SimpleNamespace(__name__="training", train=train)
    assert probe.function(owner, "train", ["forward_step"])
    with pytest.raises(probe.UnknownMegatron, match=r"training has no setup.*; checked: "):
        probe.function(owner, "setup")
    with pytest.raises(probe.UnknownMegatron, match=r"takes \(forward_step\) and not iteration"):
        probe.function(owner, "train", ["iteration"])
    with pytest.raises(probe.UnknownMegatron, match="first on PYTHONPATH"):
        probe.module("no_such_module.training")


class Handle:
    """What the end of training asks of a handle."""

    step = 4

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_due = False
        self.joining = SimpleNamespace(is_due=False)
        self.preemption = SimpleNamespace(is_due=False, is_saving=False, end_saved=self.end_saved)
        self.ended: list[Any] = []

    def preempt(self) -> None:
        self.asked.append("preempt")

    def end_saved(self, path: Path | None, seconds: float) -> None:
        self.ended.append(path)
        raise SystemExit(143)

    def request_stop(self, reason: str) -> None:
        self.asked.append(reason)

    def should_stop(self) -> bool:
        return self.is_due


@pytest.mark.parametrize(("minutes", "asks"), [(1, True), (3, False), (None, False)])
def test_a_time_limit_asks_all_clusters(
    monkeypatch: pytest.MonkeyPatch, minutes: int | None, asks: bool
) -> None:
    own = {"exit_duration_in_mins": minutes, "exit_signal_handler": True}
    arguments = SimpleNamespace(**own, exit_interval=None, log_interval=100, train_iters=50)
    seen: list[Any] = []

    def decide(model: Any, optimizer: Any, scheduler: Any, iteration: int) -> bool:
        seen.append((arguments.exit_duration_in_mins, arguments.exit_signal_handler))
        return bool(arguments.exit_interval) and iteration % arguments.exit_interval == 0

    training = SimpleNamespace(
        __name__="training",
        _TRAIN_START_TIME=time.time() - 90,
        train=lambda train_data_iterator, valid_data_iterator: None,
        checkpoint_and_decide_exit=decide,
        get_signal_handler=lambda: SimpleNamespace(signals_received=lambda: [False]),
    )
    monkeypatch.setattr(probe, "training", lambda: training)
    monkeypatch.setattr(probe, "arguments_in_force", lambda: arguments)
    handle = Handle()
    run: Any = SimpleNamespace(handle=handle)
    training_end.patch(run)
    assert training.checkpoint_and_decide_exit(None, None, None, 4) is False
    assert bool(handle.asked) == asks
    assert seen == [(None, False)]  # one cluster alone does not leave
    assert vars(arguments) | own == vars(arguments)
    handle.is_due = True
    assert training.checkpoint_and_decide_exit(None, None, None, 5) is True


class EndingHandle(Handle):
    """One that notes the order of what is asked of it."""

    totals = SimpleNamespace(syncs=1, bytes_sent=0, wait_seconds=0.0)

    def __init__(self, order: list[Any]) -> None:
        super().__init__()
        self._order = order

    def finish(self) -> None:
        self._order.append("finish")

    def gather(self, value: Any) -> None:
        self._order.append(value)

    def close(self) -> None:
        self._order.append("close")


def ending(
    monkeypatch: pytest.MonkeyPatch,
    order: list[Any],
    exit_interval: int | None,
    saved: int | None = None,
) -> Any:
    """A training loop of six iterations, as Megatron's: it exits, or returns."""
    arguments = SimpleNamespace(
        exit_duration_in_mins=None, exit_signal_handler=False, exit_interval=exit_interval,
        log_interval=100, train_iters=6,
    )  # fmt: skip

    def decide(model: Any, optimizer: Any, scheduler: Any, iteration: int) -> bool:
        order.append(f"save {iteration}")
        every = arguments.exit_interval
        return bool(every) and iteration % every == 0

    def train(train_data_iterator: Any = None, valid_data_iterator: Any = None) -> None:
        for iteration in range(1, 7):
            if training.checkpoint_and_decide_exit(None, None, None, iteration):
                raise SystemExit(0)

    training: Any = SimpleNamespace(
        __name__="training",
        _TRAIN_START_TIME=time.time(),
        train=train,
        checkpoint_and_decide_exit=decide,
        get_signal_handler=lambda: SimpleNamespace(signals_received=lambda: [False, True]),
        handle=EndingHandle(order),
    )
    monkeypatch.setattr(probe, "training", lambda: training)
    monkeypatch.setattr(probe, "arguments_in_force", lambda: arguments)
    monkeypatch.setattr(training_end.atexit, "register", lambda function: None)
    run: Any = SimpleNamespace(
        handle=training.handle,
        tell=lambda text: None,
        saved_iteration=saved,
    )
    training_end.patch(run)
    return training


def test_the_last_checkpoint_is_of_the_finished_model(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    ending(monkeypatch, order, None).train()
    assert order == [*(f"save {i}" for i in range(1, 6)), "finish", "save 6"]


def test_clusters_that_exit_together_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    with pytest.raises(SystemExit):
        ending(monkeypatch, order, 4).train()
    assert order == [*(f"save {i}" for i in range(1, 5)), "exit", "close"]


@pytest.mark.parametrize("saved", [2, 1, None])
@pytest.mark.parametrize("save", ["checkpoints/0", None])
def test_a_cluster_that_is_told_to_end_saves_and_leaves_alone(
    monkeypatch: pytest.MonkeyPatch, save: str | None, saved: int | None
) -> None:
    order: list[Any] = []
    training = ending(monkeypatch, order, None, saved)
    arguments = probe.arguments_in_force()
    arguments.save, arguments.exit_signal_handler = save, True
    handle = training.handle
    handle.should_stop = lambda: setattr(handle.preemption, "is_due", True)  # at the next step
    with pytest.raises(SystemExit) as left:
        training.train()
    assert left.value.code == 143 and handle.preemption.is_saving
    assert order == ["save 1", "save 2"]  # no other cluster is waited for
    assert handle.asked[0] == "preempt"
    is_saved = save is not None and saved == 2
    assert handle.ended == [Path("checkpoints/0/iter_0000002") if is_saved else None]


def test_who_joins_goes_on_where_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one tells within iteration 7 is what the other begins with: iteration, data, rate."""
    kind, training = patched(monkeypatch, 1, run := SimpleNamespace())
    told = SimpleNamespace(
        curr_iteration=6, consumed_train_samples=48, skipped_train_samples=0,
        consumed_valid_samples=16, eval_interval=7, eval_iters=2, global_batch_size=8,
        micro_batch_size=2, dataloader_type="single", train_iters=100,
    )  # fmt: skip
    steps: list[int] = []
    scheduler: Any = SimpleNamespace(num_steps=48, step=lambda increment: steps.append(increment))
    monkeypatch.setattr(joining.Counters, "_batch", lambda self, arguments: 8)
    monkeypatch.setattr(joining, "_draw_anew", steps.append)
    monkeypatch.setattr(joining, "left_out", lambda: 3)
    counted: list[int] = []
    monkeypatch.setattr(
        joining, "count_by_own", lambda arguments: counted.append(arguments.consumed_train_samples)
    )
    monkeypatch.setattr(probe, "arguments_in_force", lambda: told)
    place = joining.Counters(run, scheduler).place_here()
    assert place == {
        "iteration": 7, "consumed_train_samples": 56, "skipped_train_samples": 3,
        "consumed_valid_samples": 32, "scheduled": 56,
    }  # fmt: skip
    ours = SimpleNamespace(dataloader_type="single", train_iters=100)
    monkeypatch.setattr(probe, "arguments_in_force", lambda: ours)
    training.num_floating_point_operations = lambda args, samples: 3.0 * samples
    scheduler.num_steps = 0
    counters = joining.Counters(run, scheduler)
    totals: list[Any] = []
    run.handle = SimpleNamespace(
        joining=SimpleNamespace(is_due=True), step=7, progress=SimpleNamespace(note=totals.append),
        settle=lambda: counters.go_where_others_are(place),
    )  # fmt: skip
    run.tell = totals.append
    run.division.loaders = ([Loader()], [Loader()], [Loader()])
    train, valid = SimpleNamespace(iterable=iter([])), SimpleNamespace(iterable=iter([]))
    joining.join_if_due(run, [train, None], valid)
    assert steps == [56, 7] and ours.iteration == 7 and ours.consumed_train_samples == 56
    assert counted == [56]  # behind it, and not at the place in the data
    assert ours.num_floating_point_operations_so_far == 3.0 * 53
    assert next(train.iterable) == CLUSTERS * 56 and next(valid.iterable) == 32
    assert totals[0] == {"total_steps": 100}
    with pytest.raises(probe.UnknownMegatron, match="2 data iterators of 1 loaders"):
        joining.join_if_due(run, [train, train], valid)


class Loader:
    """Reads from where its sampler is."""

    def __init__(self) -> None:
        self.batch_sampler = SimpleNamespace(consumed_samples=0)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.batch_sampler.consumed_samples, 1000))


@pytest.mark.parametrize("flag", ["dataloader_type", "phase_transition_iterations"])
def test_what_cannot_join_is_named(flag: str) -> None:
    arguments = SimpleNamespace(dataloader_type="single", phase_transition_iterations=None)
    run: Any = SimpleNamespace(world=SimpleNamespace(joins=object(), cluster_id=2))
    joining.refuse_what_cannot_join(run, arguments)
    setattr(arguments, flag, "external" if flag == "dataloader_type" else [3])
    name = "--" + flag.replace("_", "-")
    with pytest.raises(ValueError, match=f"which cluster 2 would join: {name}"):
        joining.refuse_what_cannot_join(run, arguments)
    run.world.joins = None
    joining.refuse_what_cannot_join(run, arguments)
