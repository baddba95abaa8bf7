"""What the Trainers of several clusters agree on, with fakes for transformers and the others."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from dsx.config.files import ConfigError
from dsx.run import samplers
from dsx.run.block import RunBlock
from dsx.run.data import cut_for_cluster
from dsx.run.hugging_face import checkpoints
from dsx.run.hugging_face import trainer as replaced
from dsx.run.hugging_face.arguments import replace_arguments
from dsx.run.hugging_face.callback import make_callbacks
from dsx.run.hugging_face.checkpoints import common_checkpoint
from dsx.run.session import Session
from dsx.telemetry.progress import Progress

CALLBACKS = ModuleType("transformers.trainer_callback")
CALLBACKS.__dict__["TrainerCallback"] = object


class Handle:
    """A handle whose other cluster tells `theirs`; `done` is what was asked of it."""

    cluster_id, step, loop, is_finished = 1, 3, None, False

    def __init__(self, theirs: Callable[[Any], Any] = lambda value: value) -> None:
        self.theirs = theirs
        self.done: list[str] = []
        self.preemption = SimpleNamespace(follow=lambda path: None, is_saving=False)
        self.progress = Progress(1, 10.0, False)

    def gather(self, value: Any) -> list[Any]:
        return [self.theirs(value), value]

    def request_stop(self, why: str) -> None:
        self.done.append("stop")

    def finish(self) -> None:
        self.done.append("finish")

    def averaged(self) -> Any:
        self.done.append("average")
        return nullcontext()


def state_of(step: int) -> tuple[Any, Any]:
    state = SimpleNamespace(global_step=step, max_steps=40)
    return state, SimpleNamespace(should_training_stop=False, should_epoch_stop=False)


def test_a_stream_that_has_run_out_is_an_error_and_no_epoch_without_end() -> None:
    handle = Handle()
    _, callback = make_callbacks(CALLBACKS, None, lambda _: handle, lambda _: None)  # type: ignore
    state, control = state_of(5)
    callback.on_epoch_begin(None, state, control)
    control.should_training_stop = True  # as the Trainer does behind an epoch without a batch
    with pytest.raises(RuntimeError, match=r"step 5 of 40: the training data gave this cluster no"):
        callback.on_epoch_end(None, state, control)
    state.global_step = 6  # one was taken: a callback asks for the stop, and all clusters take it
    callback.on_epoch_end(None, state, control)
    assert handle.done == ["stop"]
    assert not control.should_training_stop


def test_a_stop_is_held_wherever_a_callback_asks_and_an_epochs_end_is_refused() -> None:
    handle = Handle()
    _, callback = make_callbacks(CALLBACKS, None, lambda _: handle, lambda _: None)  # type: ignore
    for name in ("step_begin", "substep_end", "pre_optimizer_step", "optimizer_step"):
        state, control = state_of(5)
        control.should_training_stop = True
        getattr(callback, f"on_{name}")(None, state, control)
        assert not control.should_training_stop
    assert handle.done == ["stop"] * 4
    for event in (callback.on_step_end, callback.on_substep_end):
        state, control = state_of(5)
        control.should_epoch_stop = True
        with pytest.raises(ConfigError, match=r"should_epoch_stop, at step 5\), which is not"):
            event(None, state, control)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({}, None),
        ({"max_steps": 20}, r"different max_steps \(cluster 0: 20, cluster 1: 40\)"),
        ({"lr_scheduler_type": "cosine"}, r"lr_scheduler_type \(cluster 0: cosine, cluster 1: lin"),
        ({"warmup_steps": 3}, r"different warmup_steps \(cluster 0: 3, cluster 1: 2\)"),
        ({"learning_rate": 0.5}, r"different learning_rate \(cluster 0: 0.5, cluster 1: 0.1\)"),
    ],
)
def test_clusters_that_would_train_for_different_times_are_refused(
    theirs: dict[str, Any], said: str | None
) -> None:
    handle = Handle(lambda value: {**value, **theirs})
    _, callback = make_callbacks(CALLBACKS, None, lambda _: handle, lambda _: None)  # type: ignore
    arguments = SimpleNamespace(
        lr_scheduler_type=SimpleNamespace(value="linear"), learning_rate=0.1, output_dir="runs",
        get_warmup_steps=lambda steps: steps // 20,
    )  # fmt: skip
    refused = pytest.raises(ConfigError, match=said) if said else nullcontext()
    with refused:
        callback.on_train_begin(arguments, *state_of(0))


def make_trainer(callbacks: list[Any], handle: Handle) -> tuple[ModuleType, Any]:
    """Return a module with a Trainer in the manner of transformers, and one of it."""
    module = ModuleType("transformers.trainer")

    class Trainer:
        is_deepspeed_enabled, is_in_train, train_dataset = True, True, None
        args = SimpleNamespace(
            auto_find_batch_size=False, save_on_each_node=False, output_dir="runs"
        )
        deepspeed = SimpleNamespace(dsx=handle)
        callback_handler = SimpleNamespace(callbacks=callbacks)

        def add_callback(self, callback: Any) -> None:
            callbacks.append(callback)

        def train(self, resume_from_checkpoint: Any = None) -> Any:
            for callback in callbacks:
                getattr(callback, "on_train_end", lambda *_: None)(None, None, None)
            return resume_from_checkpoint

        def evaluate(self) -> dict[str, Any]:
            return {"eval_loss": 2.0, "epoch": 1, "note": "own"}

        def create_optimizer(self) -> Any:
            return SimpleNamespace(param_groups=[{"params": [1]}, {"params": []}])

        def save_model(self) -> None: ...
        def _save_checkpoint(self) -> None: ...
        def _load_best_model(self) -> None: ...

    module.__dict__.update(Trainer=Trainer, deepspeed_load_checkpoint=lambda engine, path: path)
    return module, Trainer()


BLOCK = {"preset": "diloco", "clusters": {"num_clusters": 2}}


def make_session() -> Session:
    return Session(RunBlock([], {}, [json.dumps({"dsx": BLOCK})]))


def test_the_trainer_decides_by_cluster_0s_evaluation_while_it_trains() -> None:
    handle = Handle(lambda value: {**value, "eval_loss": 1.5})
    module, trainer = make_trainer([], handle)
    replaced.replace_trainer(make_session(), module, CALLBACKS)
    assert trainer.evaluate() == {"eval_loss": 1.5, "epoch": 1.0, "note": "own"}
    assert handle.done == ["average"]
    trainer.is_in_train = False
    assert trainer.evaluate()["eval_loss"] == 2.0


@pytest.mark.parametrize("is_across", [True, False])
def test_a_schedule_is_made_for_the_groups_that_deepspeed_keeps(
    is_across: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, trainer = make_trainer([], Handle())
    monkeypatch.setattr(replaced, "current_world", lambda: object() if is_across else None)
    replaced.replace_trainer(make_session(), module, CALLBACKS)
    assert len(trainer.create_optimizer().param_groups) == (1 if is_across else 2)


class Rendezvous:
    """Meets one other cluster, which tells `theirs`."""

    is_speaker = False

    def __init__(self, theirs: Callable[[Any], Any]) -> None:
        self.theirs = theirs

    def gather(self, name: str, value: Any) -> list[Any]:
        return [self.theirs(value), value]


def make_world(theirs: Callable[[Any], Any] = lambda value: value) -> Any:
    return SimpleNamespace(
        cluster_id=1, num_clusters=2, rank=0, world_size=2, rendezvous=Rendezvous(theirs)
    )


def test_all_callbacks_of_the_scripts_see_the_finished_model_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    handle = Handle()
    theirs = SimpleNamespace(on_train_end=lambda *_: handle.done.append("theirs"))
    module, trainer = make_trainer([theirs], handle)
    trainer.args.output_dir = str(tmp_path)
    session = make_session()
    monkeypatch.setattr(session, "join", make_world)
    monkeypatch.setattr(replaced, "keep_exported", lambda loop: handle.done.append("average"))
    replaced.replace_trainer(session, module, CALLBACKS)
    assert trainer.train() is None
    assert handle.done == ["finish", "average", "theirs"]
    assert session.ended == [handle]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster's folder with `checkpoint-4`, of a run of two clusters."""
    folder = tmp_path / "cluster_1" / "checkpoint-4"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").touch()
    manifest = {"step": 4, "session": "run a", "num_clusters": 2}
    monkeypatch.setattr(checkpoints, "complete_tags", lambda _: {"global_step4": manifest})
    return folder


@pytest.mark.parametrize("asked", [True, "True", "true", None])
def test_where_one_cluster_resumes_all_do(saved: Path, asked: Any) -> None:
    other = make_world(lambda told: [True, *told[1:]])
    assert common_checkpoint(str(saved.parent), asked, other) == saved


def test_where_nobody_resumes_all_begin(saved: Path) -> None:
    assert common_checkpoint(str(saved.parent), None, make_world()) is None


def test_a_run_of_another_number_of_clusters_is_not_gone_on_with(saved: Path) -> None:
    world = make_world()
    world.num_clusters = 3
    with pytest.raises(ValueError, match=r"checkpoint-4 is of a run of 2 clusters, and its data"):
        common_checkpoint(str(saved.parent), True, world)


@pytest.mark.parametrize(
    ("given", "pushes", "name"),
    [(None, True, "clm"), ("me/mine", True, "me/mine"), (None, False, None)],
)
def test_a_hub_gets_the_runs_name_and_not_a_clusters(
    given: str | None, pushes: bool, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("transformers.training_args")

    class TrainingArguments:
        deepspeed, output_dir, run_name = None, "runs/clm", None
        push_to_hub, hub_model_id = pushes, given

        def __post_init__(self) -> None: ...

    module.__dict__["TrainingArguments"] = TrainingArguments
    session = make_session()
    monkeypatch.setattr(session, "show", lambda *_: make_world())
    replace_arguments(session, module)
    arguments: Any = TrainingArguments()
    arguments.__post_init__()
    arguments.__post_init__()  # as they are copied
    assert arguments.output_dir == "runs/clm/cluster_1"
    assert arguments.hub_model_id == name


def test_a_package_of_the_scripts_named_datasets_is_not_hugging_faces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))
    world = make_world()
    assert len(cut_for_cluster([1, 2, 3, 4], world, "split")) == 2


def test_what_a_trainer_has_cut_is_not_cut_again_by_a_sampler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DistributedSampler, "__init__", DistributedSampler.__init__)
    monkeypatch.setattr(samplers, "current_world", make_world)
    session = make_session()
    samplers.replace_sampler(session)
    whole = DistributedSampler(range(20), 2, 1)  # type: ignore[arg-type]
    assert (whole.num_replicas, whole.rank, len(whole)) == (4, 3, 5)
    of_fewer = DistributedSampler(range(20), 1, 0)  # type: ignore[arg-type]
    assert (of_fewer.num_replicas, of_fewer.rank) == (2, 1)
    counted_by_the_script = DistributedSampler(range(20), 4, 2)  # type: ignore[arg-type]
    assert (counted_by_the_script.num_replicas, counted_by_the_script.rank) == (4, 2)
    session.trainers.append(object())
    cut = DistributedSampler(range(20), 2, 1)  # type: ignore[arg-type]
    assert (cut.num_replicas, cut.rank, len(cut)) == (2, 1, 10)
