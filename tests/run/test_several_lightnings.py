"""What Lightning's Trainers of several clusters agree on, with fakes for Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsx.config.files import ConfigError
from dsx.run.block import RunBlock
from dsx.run.lightning import data, metrics
from dsx.run.lightning.callbacks import make_callbacks
from dsx.run.lightning.checkpoints import _save
from dsx.run.lightning.data import _pass_over, _prepare, _requires_sampler, _sampler
from dsx.run.lightning.fit import Fit, set_fit
from dsx.run.lightning.hooks import around
from dsx.run.lightning.places import own_devices, own_place, share_log_versions
from dsx.run.lightning.refusals import refuse
from dsx.run.lightning.trainer import _get_stop, _set_stop
from dsx.run.session import RouteNotTaken, Session
from dsx.telemetry.progress import Progress

BLOCK = '{"dsx": {"preset": "diloco", "clusters": {"num_clusters": 2}%s}}'


class Handle:
    """A handle whose other cluster tells `theirs`; `done` is what was asked of it."""

    step, cluster_id = 0, 1

    def __init__(self, theirs: Callable[[Any], Any] = lambda value: value) -> None:
        self.theirs, self.stops = theirs, False
        self.done: list[str] = []
        self.preemption = SimpleNamespace(is_saving=False)
        self.progress = Progress(1, 10.0, False)

    def gather(self, value: Any) -> list[Any]:
        return [self.theirs(value), value]

    def request_stop(self, why: str) -> None:
        self.done.append("stop")

    def should_stop(self) -> bool:
        return self.stops

    def skip_inner_step(self) -> None:
        self.step += 1
        self.done.append("skip")

    def log_step(self, **fields: Any) -> None:
        self.done.append("log")


class Rendezvous:
    """Meets one other cluster, which tells `theirs`."""

    def __init__(self, theirs: Callable[[Any], Any]) -> None:
        self.theirs = theirs

    def gather(self, name: str, value: Any) -> list[Any]:
        return [self.theirs(value), value]


def make_fit(more: str = "", theirs: Callable[[Any], Any] = lambda value: value) -> Fit:
    world: Any = SimpleNamespace(
        cluster_id=1, num_clusters=2, rank=0, world_size=2, rendezvous=Rendezvous(theirs)
    )
    return Fit(Session(RunBlock([], {}, [BLOCK % more])), world)


class DDPStrategy:
    """As Lightning's."""

    _start_method, _model_averaging_period, checkpoint_io = "popen", None, None

    def __init__(self, **more: Any) -> None:
        vars(self).update(more)


class FSDPStrategy(DDPStrategy):
    """As Lightning's."""


class ModelParallelStrategy:
    """As Lightning's."""

    checkpoint_io, _tensor_parallel_size = None, "auto"


class XLAStrategy:
    """As Lightning's."""


def make_callback(name: str) -> Any:
    return type(name, (), {"__module__": "lightning.pytorch.callbacks"})()


def make_trainer(strategy: Any = None, **more: Any) -> Any:
    given = {
        "callbacks": [], "_val_check_time_interval": None, "default_root_dir": "runs",
        "loggers": [], **more,
    }  # fmt: skip
    return SimpleNamespace(strategy=strategy or DDPStrategy(), **given)


@pytest.mark.parametrize(
    ("trainer", "more", "kind", "said"),
    [
        (make_trainer(FSDPStrategy()), "", RouteNotTaken, "FSDPStrategy shards with FSDP1, which"),
        (make_trainer(ModelParallelStrategy()), "", RouteNotTaken, r"_size='auto'\) is not"),
        (make_trainer(XLAStrategy()), "", RouteNotTaken, "XLAStrategy is not served by dsx.run"),
        (make_trainer(DDPStrategy(_start_method="fork")), "", RouteNotTaken, "its ranks by 'fork'"),
        (
            make_trainer(callbacks=[make_callback("StochasticWeightAveraging")]), "", ConfigError,
            "the callback StochasticWeightAveraging is not served",
        ),
        (
            make_trainer(callbacks=[SimpleNamespace(_train_time_interval=1)]), "", ConfigError,
            r"train_time_interval=...\) saves by each cluster's own clock",
        ),
        (
            make_trainer(callbacks=[SimpleNamespace(save_on_exception=True)]), "", ConfigError,
            r"save_on_exception=True\) saves in the midst",
        ),
        (
            make_trainer(callbacks=[SimpleNamespace(dirpath="s3://a/b")]), "", ConfigError,
            r"dirpath='s3://a/b'\) is not on a file system",
        ),
        (make_trainer(default_root_dir="s3://a"), "", ConfigError, "'s3://a'.*not on a file sys"),
        (make_trainer(_val_check_time_interval=3.0), "", ConfigError, "each cluster's own clock"),
        (
            make_trainer(DDPStrategy(checkpoint_io=make_callback("AsyncCheckpointIO"))), "",
            ConfigError, "AsyncCheckpointIO writes a checkpoint after",
        ),
        (make_trainer(), ', "checkpoints": {"keep": 2}', ConfigError, "set ModelCheckpoint"),
        (
            make_trainer(), ', "divergence": {"max_rollbacks": 1}', ConfigError,
            "is not served with Lightning",
        ),
    ],
)  # fmt: skip
def test_what_one_cluster_would_do_alone_is_refused_by_name(
    trainer: Any, more: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        refuse(trainer, make_fit(more))


def test_a_trainer_fits_once() -> None:
    fit = make_fit()
    refuse(make_trainer(), fit)
    fit.has_begun = True
    with pytest.raises(ConfigError, match=r"Trainer.fit\(\) is called a second time"):
        refuse(make_trainer(), fit)


def test_a_method_that_a_version_has_not_is_named() -> None:
    with pytest.raises(RouteNotTaken, match=r"has no .*DDPStrategy.no_such, which dsx"):
        around(DDPStrategy, "no_such", lambda: None)


def cuda(*numbers: int) -> list[torch.device]:
    return [torch.device("cuda", number) for number in numbers]


@pytest.mark.parametrize(
    ("named", "own"),
    [
        (cuda(0, 1, 2, 3), cuda(2, 3)),  # of all that the launcher has started
        (cuda(0, 1), cuda(2, 3)),  # of one cluster
        ([torch.device("cpu")], [torch.device("cpu")] * 2),  # by default
        ([torch.device("cpu")] * 2, [torch.device("cpu")] * 2),
    ],
)
def test_a_clusters_ranks_have_devices_of_their_own(named: list[Any], own: list[Any]) -> None:
    local: Any = SimpleNamespace(offset=2, count=2, started=4)
    assert own_devices(named, local) == own


def test_devices_of_neither_number_are_refused() -> None:
    local: Any = SimpleNamespace(offset=2, count=2, started=4)
    with pytest.raises(ConfigError, match=r"devices=3\): the launcher has started 4 rank"):
        own_devices(cuda(0, 1, 2), local)


def test_each_cluster_has_a_place_for_what_the_script_names(tmp_path: Path) -> None:
    own = tmp_path / "cluster_1" / "last.ckpt"
    assert own_place(tmp_path / "last.ckpt", 1) == own
    assert own_place(tmp_path / "cluster_0" / "last.ckpt", 1) == own
    assert own_place(own, 1) == own


def test_loggers_of_all_clusters_share_a_version() -> None:
    logger = SimpleNamespace(_root_dir="logs", _version=None, version=3)
    share_log_versions([logger, object()], make_fit(theirs=lambda told: [5]).world)
    assert logger._version == "version_5/cluster_1"


def test_a_checkpoint_is_chosen_and_named_by_cluster_0s_metrics() -> None:
    fit, trainer = make_fit(), SimpleNamespace()
    handle: Any = Handle(lambda value: {**value, "score": 1.5})
    fit.handle = handle
    set_fit(trainer, fit)
    found = {"score": torch.tensor(9.0), "epoch": torch.tensor(2), "table": torch.zeros(3)}
    agreed = metrics._candidates(lambda _: dict(found), None, trainer)
    assert (agreed["score"].item(), agreed["epoch"].item()) == (1.5, 2)
    assert agreed["epoch"].dtype == torch.int64 and agreed["table"].shape == (3,)
    handle.preemption.is_saving = True  # at a step of its own: nobody else is there
    assert metrics._candidates(lambda _: dict(found), None, trainer)["score"] == 9


def test_whoever_sets_should_stop_asks_all_clusters() -> None:
    fit, trainer = make_fit(), SimpleNamespace()
    handle: Any = Handle()
    set_fit(trainer, fit)
    _set_stop(trainer, False)
    fit.handle = handle
    _set_stop(trainer, True)
    assert (handle.done, _get_stop(trainer)) == (["stop"], False)
    fit.is_agreed = True
    _set_stop(trainer, True)
    assert (handle.done, _get_stop(trainer)) == (["stop"], True)


class Stepping:
    """A Trainer at a step."""

    def __init__(self, fit: Fit) -> None:
        self.global_step, self.log_every_n_steps, self.should_stop = 0, 2, False
        self.strategy = SimpleNamespace()
        self.lr_scheduler_configs: list[Any] = []
        self.checkpoint_callbacks: list[Any] = []
        self.loggers: list[Any] = []
        self.max_steps, self.max_epochs, self.num_training_batches = 8, -1, 4
        self.enable_validation = True
        self.accumulate_grad_batches, self.val_check_batch, self.check_val_every_n_epoch = 1, 4, 1


def test_a_step_that_a_scaler_has_skipped_is_counted_and_a_stop_is_taken_at_a_step() -> None:
    fit = make_fit()
    handle: Any = Handle()
    fit.handle = handle
    trainer, module = Stepping(fit), SimpleNamespace(automatic_optimization=True)
    _, last = make_callbacks(object, trainer, fit)
    last.on_train_batch_end(None, module, {"loss": torch.tensor(1.0)})  # accumulates
    assert handle.done == []
    trainer.global_step = 1
    last.on_train_batch_end(None, module, None)
    assert (handle.done, handle.step) == (["skip"], 1)
    trainer.global_step, handle.step, handle.stops = 2, 2, True
    last.on_train_batch_end(None, module, {"loss": torch.tensor(1.0)})
    assert handle.done == ["skip", "log"]
    assert fit.is_agreed and trainer.should_stop


@pytest.mark.parametrize(("name", "value"), [("batches per epoch", 7), ("validation", False)])
def test_clusters_whose_epochs_differ_are_refused(name: str, value: Any) -> None:
    fit = make_fit()
    handle: Any = Handle(lambda own: {**own, name: value})
    fit.handle = handle
    first, _ = make_callbacks(object, Stepping(fit), fit)
    with pytest.raises(ConfigError, match=rf"different {name} \(cluster 0: {value}, cluster 1"):
        first.on_train_start()


def test_saving_in_training_where_no_outer_state_can_be_is_refused() -> None:
    fit, trainer = make_fit(), SimpleNamespace()
    handle: Any = Handle()
    set_fit(trainer, fit)
    saved: list[Any] = []
    _save(lambda *given: saved.append(given), trainer, "s3://a/b.ckpt")
    fit.handle = handle
    with pytest.raises(ConfigError, match=r"save_checkpoint\('s3://a/b.ckpt'\) in training is not"):
        _save(lambda *given: saved.append(given), trainer, "s3://a/b.ckpt")
    assert len(saved) == 1


@pytest.mark.parametrize("is_own", [False, True])
def test_a_training_loader_that_nobody_cuts_is_refused(
    is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where each cluster has data of its own, its order is that of a sampler with a seed."""
    fit = make_fit()
    accelerator = SimpleNamespace(use_distributed_sampler=False, is_distributed=False)
    trainer = SimpleNamespace(_accelerator_connector=accelerator)
    connector = SimpleNamespace(trainer=trainer)
    set_fit(trainer, fit)
    loader: Any = torch.utils.data.DataLoader(list(range(8)), shuffle=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="and all clusters would read the same: leave it out"):
        _prepare(lambda *_: None, connector, loader, True, "train")
    accelerator.use_distributed_sampler = True
    monkeypatch.setattr(data, "share_data", lambda *_: not is_own)
    seen: list[Any] = []

    def original(given: Any, shuffle: bool, mode: Any) -> None:
        seen.append((_sampler(None, trainer), shuffle, _requires_sampler(None, connector, given)))

    _prepare(original, connector, loader, True, "train")
    number = {"num_replicas": 2, "rank": 0} if is_own else {"num_replicas": 4, "rank": 2}
    assert seen == [(number, True, True)]
    assert fit.session.has_own_data is is_own


def test_streams_of_different_lengths_are_told_at_the_end_of_an_epoch() -> None:
    fit = make_fit()
    handle: Any = Handle(lambda value: value + 1)
    fit.handle = handle
    trainer = Stepping(fit)
    first, _ = make_callbacks(object, trainer, fit)
    first.on_train_epoch_end()  # whose length is known was compared at the start
    trainer.num_training_batches = float("inf")  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"different steps \(cluster 0: 1, cluster 1: 0\)"):
        first.on_train_epoch_end()


@pytest.mark.parametrize("is_sized", [True, False])
def test_an_epoch_goes_on_behind_the_batches_that_were_taken(is_sized: bool) -> None:
    numbers = iter(range(6))
    loader = SimpleNamespace(flattened=[object()])
    fetcher: Any = SimpleNamespace(combined_loader=loader, iterator=numbers)
    if not is_sized:

        class Fetcher:
            combined_loader, batches = loader, [next(numbers)]

            def __next__(self) -> int:
                self.batches.append(next(numbers))
                return self.batches.pop(0)

        fetcher = Fetcher()
    trainer = SimpleNamespace()
    set_fit(trainer, make_fit())
    progress = SimpleNamespace(current=SimpleNamespace(ready=3))
    loop = SimpleNamespace(trainer=trainer, batch_progress=progress)
    _pass_over(lambda _: None, loop, fetcher)
    assert next(numbers if is_sized else fetcher) == 3
