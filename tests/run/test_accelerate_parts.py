"""What dsx.run does for a loop over Accelerate, part by part, without accelerate."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dsx.config.files import ConfigError
from dsx.config.schema import load_config
from dsx.engines.torch import TorchAdapter
from dsx.method.fragments import WholeModel
from dsx.run import versions
from dsx.run.accelerate import loaders
from dsx.run.accelerate import loop as loop_module
from dsx.run.accelerate.loaders import (
    replace_loader,
    require_cut,
    require_not_made_before,
    require_shared,
)
from dsx.run.accelerate.loop import Trained, replace_accelerator
from dsx.run.accelerate.refusals import (
    refuse_launchers,
    refuse_local_sgd,
    refuse_search_of_batch_size,
    refuse_settings,
)
from dsx.run.block import RunBlock
from dsx.run.first_step import FirstStep
from dsx.run.replace import around
from dsx.run.session import RouteNotTaken, Session
from dsx.training.data_sources import Source
from tests.checkpoint.test_tags import write

BLOCK = {"preset": "diloco", "clusters": {"num_clusters": 2}}


def make_session(**clusters: Any) -> Session:
    block = {**BLOCK, "clusters": {**BLOCK["clusters"], **clusters}}  # type: ignore[dict-item]
    return Session(RunBlock([], {}, [json.dumps({"dsx": block})]))


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lets loaders be cut for cluster 1 of 2, until the test's end."""
    for name in ("__init__", "__iter__"):
        monkeypatch.setattr(DataLoader, name, getattr(DataLoader, name))
    world = SimpleNamespace(cluster_id=1, num_clusters=2, rank=0)

    def start(session: Session) -> Session:
        session.has_accelerator = True
        monkeypatch.setattr(loaders, "current_world", lambda: world)
        replace_loader(session)
        return session

    return start


DATA = TensorDataset(torch.arange(11))


def read(loader: Any) -> list[int]:
    return [number for (batch,) in loader for number in batch.tolist()]


def test_a_loader_that_shuffles_reads_this_clusters_part_and_no_other_does(cut: Any) -> None:
    session = cut(make_session())
    batches = BatchSampler(RandomSampler(DATA), 2, drop_last=False)
    for given in (
        {"batch_size": 2, "shuffle": True},
        {"batch_size": 2, "sampler": RandomSampler(DATA)},
        {"batch_sampler": batches},
    ):
        loader: Any = DataLoader(DATA, **given)  # type: ignore[arg-type]
        assert sorted(read(loader)) == [1, 3, 5, 7, 9]
        assert len(loader) == 3
        require_cut(session, [loader])
        again = DataLoader(loader.dataset, shuffle=True)
        assert sorted(read(again)) == [1, 3, 5, 7, 9]
    positional: Any = DataLoader(DATA, 3, True)
    assert (positional.batch_size, len(positional.dataset)) == (3, 5)
    assert positional.dataset.tensors is DATA.tensors
    weights = WeightedRandomSampler([1.0] * 11, 11)
    for whole in (DataLoader(DATA, 4), DataLoader(DATA, 4, sampler=weights)):
        assert len(whole) == 3 and whole.dataset is DATA
        with pytest.raises(ConfigError, match=r"reads the whole of TensorDataset, as for eval"):
            require_cut(session, [whole])
        require_cut(session, [positional, whole])  # an evaluation that was left early


@pytest.mark.parametrize("why", ["own", "trainer", "no Accelerator"])
def test_sites_with_data_of_their_own_and_trainers_keep_theirs(cut: Any, why: str) -> None:
    session = make_session(data="own") if why == "own" else make_session()
    cut(session)
    session.has_arguments = why == "trainer"
    session.has_accelerator = why != "no Accelerator"
    loader: Any = DataLoader(DATA, shuffle=True)
    assert loader.dataset is DATA
    if why == "own":
        require_cut(session, [loader])


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return ((torch.tensor(i),) for i in range(7))


def test_a_stream_is_cut_where_the_model_trains(cut: Any) -> None:
    session = cut(make_session())
    model = torch.nn.Linear(1, 1)
    session.models.append(model)
    loader: Any = DataLoader(Numbers(), batch_size=None)
    again: Any = DataLoader(loader.dataset, batch_size=None)  # as of a loader that skips batches
    for mode in (True, False, True):
        model.train(mode)
        expected = [1, 3, 5] if mode else list(range(7))
        assert [number.item() for (number,) in loader] == expected
        assert [number.item() for (number,) in again] == expected


def test_a_loader_that_was_made_too_early_is_refused(cut: Any) -> None:
    early = [DataLoader(DATA, shuffle=True), DataLoader(Numbers()), DataLoader(DATA)]
    session = cut(make_session())
    for loader in early[:2]:
        with pytest.raises(ConfigError, match="make the Accelerator first, then the loader"):
            require_not_made_before(session, (loader,))
    later = (early[2], DataLoader(DATA, shuffle=True), DataLoader(Numbers()))
    require_not_made_before(session, later)


@pytest.mark.parametrize("wanted", ["auto", "split"])
def test_data_of_each_sites_own_is_told_apart_where_it_is_prepared(cut: Any, wanted: str) -> None:
    session = cut(make_session(data=wanted))
    given = (DataLoader(DATA, shuffle=True), DataLoader(DATA), torch.nn.Linear(1, 1))

    def world(*others: Any) -> Any:
        def gather(what: str, own: Any) -> list[Any]:
            return [own, *others] if others else [own, own]

        return SimpleNamespace(num_clusters=2, rendezvous=SimpleNamespace(gather=gather))

    require_shared(session, world(), given)
    require_shared(session, world(None), given[1:])  # nothing was cut, and nobody is asked
    other = [asdict(Source("TensorDataset of 11 samples", "another"))]
    if wanted == "split":
        require_shared(session, world(other), given)
        return
    with pytest.raises(ConfigError, match=r"different training data.*set clusters.data='own'"):
        require_shared(session, world(other), given)


@pytest.mark.parametrize("by", ["load_state_dict", "load_state", "nobody"])
def test_weights_loaded_behind_prepare_are_refused_at_the_first_step(by: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adapter = TorchAdapter(model, optimizer, WholeModel())
    first = FirstStep(adapter, [optimizer], "prepare()", "load them before")
    if by != "nobody":
        model.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    if by == "load_state":
        first.release()
    model(torch.ones(1, 2)).sum().backward()
    if by == "load_state_dict":
        with pytest.raises(
            RouteNotTaken, match=r"between prepare\(\) and the first.*load them bef"
        ):
            optimizer.step()
        assert model.weight.eq(1).all()
        return
    for _ in range(2):
        optimizer.step()


def test_a_step_of_torchs_own_to_make_an_optimizers_state_is_no_inner_step() -> None:
    """Nor the first one, which follows with the weights that were loaded before."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    adapter, steps = TorchAdapter(model, optimizer, WholeModel()), list[bool]()
    adapter.on_inner_step(steps.append)
    FirstStep(adapter, [optimizer], "prepare()", "load them before")
    model.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state and not steps and model.weight.eq(1).all()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RouteNotTaken):
        optimizer.step()
    optimizer.step()
    assert steps == [False]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_step_inside_the_backward_is_a_first_step_and_no_inner_step(is_loaded: bool) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adapter, steps = TorchAdapter(model, optimizer, WholeModel()), list[bool]()
    adapter.on_inner_step(steps.append)
    adapter.watch_backward(lambda fragment: None, "after")
    FirstStep(adapter, [optimizer], "prepare()", "load them before")
    if is_loaded:
        model.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
        with pytest.raises(RouteNotTaken):
            model(torch.ones(1, 2)).sum().backward()
        assert model.weight.eq(1).all()
        return
    before = model.weight.detach().clone()
    for count in range(1, 3):
        model(torch.ones(1, 2)).sum().backward()
        assert len(steps) == count - 1
        optimizer.step()
        assert len(steps) == count and torch.allclose(model.weight, before - 0.1 * count)


def make_accelerator(kind: str = "MULTI_CPU", version: int = 2, **project: Any) -> Any:
    return SimpleNamespace(
        distributed_type=f"DistributedType.{kind}",
        state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version)),
        project_configuration=SimpleNamespace(**{"save_on_each_node": False, **project}),
    )


@pytest.mark.parametrize(
    ("accelerator", "block", "said"),
    [
        (make_accelerator("MEGATRON_LM"), {}, "Accelerate with MEGATRON_LM is not served"),
        (make_accelerator("FSDP", 1), {}, "fsdp_version=1 is not served by dsx.run"),
        (make_accelerator(save_on_each_node=True), {}, "save_on_each_node=True"),
        (make_accelerator(), {"checkpoints": {"keep": 2}}, "dsx.checkpoints.keep=2 would"),
        (make_accelerator(), {"divergence": {"max_rollbacks": 1}}, "max_rollbacks=1 is not"),
    ],
)
def test_what_is_not_served_is_refused_by_name(accelerator: Any, block: Any, said: str) -> None:
    refuse_settings(make_accelerator("FSDP"), load_config({"dsx": BLOCK}))
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        refuse_settings(accelerator, load_config({"dsx": {**BLOCK, **block}}))


def test_launchers_inside_a_script_and_local_sgd_are_refused() -> None:
    module = ModuleType("accelerate.launchers")
    module.__dict__.update(notebook_launcher=lambda f: f, debug_launcher=lambda f: f)
    module.__dict__["LocalSGD"] = type("LocalSGD", (), {"__init__": lambda self: None})
    module.__dict__["find_executable_batch_size"] = lambda f: f
    refuse_launchers(module)
    refuse_local_sgd(module)
    refuse_search_of_batch_size(module)
    of_utils = "utils.find_executable_batch_size"
    for name in ("notebook_launcher", "debug_launcher", "LocalSGD", of_utils):
        with pytest.raises(RouteNotTaken, match=f"accelerate.{name}"):
            getattr(module, name.removeprefix("utils."))(print)


def test_a_function_that_a_version_lacks_is_named() -> None:
    module = ModuleType("torch.of_another_version")
    with pytest.raises(RouteNotTaken) as caught:
        around(module, "no_such", print)
    said = f"torch {torch.__version__.partition('+')[0]}"
    assert said in str(caught.value)
    assert "has no torch.of_another_version.no_such, which dsx.run replaces" in str(caught.value)


@pytest.mark.parametrize("package", ["transformers", "pytorch_lightning"])
def test_another_version_is_tried_and_said_once(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda name: "4.56.1")
    named = package.replace("_", "-")
    needs = [f'{named}<6,>=4.57; extra == "clients"']
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    monkeypatch.setattr(versions, "_told", set())
    monkeypatch.setenv("RANK", "1")
    versions.tell_of_version(package)
    assert caplog.text == ""
    monkeypatch.setenv("RANK", "0")
    for _ in range(2):
        versions.tell_of_version(package)
    (record,) = caplog.records
    said = f"dsx: {named} 4.56.1 is tried; dsx.run is tested with {named}<6,>=4.57"
    assert record.getMessage() == said


class Handle:
    def __init__(self) -> None:
        self.done: list[str] = []
        self.stops = False
        self.preemption = SimpleNamespace(end_if_due=lambda: None, engine=None)
        self.loop = None

    def request_stop(self, why: str) -> None:
        self.done.append(why)

    def should_stop(self) -> bool:
        return self.stops

    def skip_inner_step(self) -> None:
        self.done.append("skipped")


def make_loop() -> tuple[ModuleType, Any, Handle]:
    module = ModuleType("accelerate.accelerator")

    class Accelerator:
        is_set = False
        accelerator = None

        def prepare(self, *given: Any) -> Any:
            return given

        def backward(self, loss: Any) -> None: ...
        def check_trigger(self) -> bool:
            return self.is_set

        def end_training(self) -> None: ...
        def free_memory(self) -> None: ...
        def join_uneven_inputs(self) -> None: ...

    class AcceleratedOptimizer:
        scaler, step_was_skipped = object(), False
        gradient_state = SimpleNamespace(sync_gradients=True)

        def step(self) -> None: ...

    module.__dict__.update(Accelerator=Accelerator, AcceleratedOptimizer=AcceleratedOptimizer)
    loop = replace_accelerator(make_session(), module)
    accelerator, optimizer, handle = Accelerator(), AcceleratedOptimizer(), Handle()
    trained: Any = handle
    loop.trained.append(Trained(accelerator, None, [optimizer], trained, is_engine=False))
    return module, loop, handle


def test_a_trigger_asks_all_clusters_and_a_skipped_step_is_told() -> None:
    _, loop, handle = make_loop()
    accelerator, (optimizer,) = loop.trained[0].accelerator, loop.trained[0].optimizers
    assert not accelerator.check_trigger()
    accelerator.is_set = True
    assert not accelerator.check_trigger()
    assert handle.done == ["accelerator.set_trigger()"]
    handle.stops, accelerator.is_set = True, False
    assert accelerator.check_trigger()
    optimizer.step()
    optimizer.step_was_skipped = True
    optimizer.step()
    assert handle.done[1:] == ["skipped"]


def test_a_rank_that_waits_for_others_says_what_they_have_to_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = threading.Event()
    monkeypatch.setattr(loop_module.logger, "warning", lambda *given: said.set())
    with loop_module.on_all_ranks("get_state_dict"):
        pass
    assert not said.is_set()
    monkeypatch.setattr(loop_module, "_ALONE_SECONDS", 0.0)
    with loop_module.on_all_ranks("get_state_dict"):
        assert said.wait(30)


def test_a_loop_beside_training_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module, loop, _ = make_loop()
    session = loop.session
    session.has_arguments = True
    monkeypatch.setattr(session, "join", lambda: object())
    accelerator = module.__dict__["Accelerator"]()
    model = torch.nn.Linear(1, 1)
    assert accelerator.prepare(model) == (model,)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RouteNotTaken, match="in a loop beside TrainingArguments"):
        accelerator.prepare(model, optimizer)


def test_folders_of_automatic_names(tmp_path: Path) -> None:
    from dsx.run.accelerate import saves, states

    world: Any = SimpleNamespace(cluster_id=1, rank=0)
    for number in (2, 9, 10):
        (tmp_path / f"checkpoint_{number}" / "cluster_1" / "accelerate").mkdir(parents=True)
    (tmp_path / "checkpoint_2" / "cluster_0").mkdir()
    for folder in saves.older(tmp_path / "checkpoint_10", 1, 1):
        saves.remove_part(folder / "cluster_1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_10", "checkpoint_2"]
    assert not (tmp_path / "checkpoint_2" / "cluster_1").exists()
    base = tmp_path / "checkpoints"
    for number, tags in {2: {"accelerate": 4, "pytorch_model": 4}, 3: {"accelerate": 6}}.items():
        for tag, step in tags.items():
            folder = base / f"checkpoint_{number}" / "cluster_1" / tag
            folder.mkdir(parents=True)
            (folder / "dsx.json").write_text(json.dumps({"step": step}))
    accelerator = SimpleNamespace(project_dir=tmp_path)  # killed behind Accelerate's part of 3
    assert [sorted(states._checkpoints(accelerator, world, n)) for n in (0, 1)] == [[2, 3], [2]]
    assert states._of_run(tmp_path / "step_3" / "cluster_1", world) == tmp_path / "step_3"
    assert states._of_run(tmp_path / "step_3", world) == tmp_path / "step_3"


@pytest.mark.parametrize("num_engines", [1, 2])
def test_what_was_killed_between_two_parts_leaves_the_state_that_they_were_to_replace(
    tmp_path: Path, num_engines: int, caplog: pytest.LogCaptureFixture
) -> None:
    from dsx.run.accelerate import parts

    engines = ["pytorch_model", "pytorch_model_1"][:num_engines]
    told: list[Any] = []
    for cluster, ended in enumerate((1, 0)):  # how many engines have got as far
        held = {"accelerate": 8, "accelerate.replaced": 4}
        for i, name in enumerate(engines):
            held |= {name: 8, f"{name}.replaced": 4} if i < ended else {name: 4}
        for tag, step in held.items():
            folder = tmp_path / f"cluster_{cluster}" / tag
            folder.mkdir(parents=True)
            (folder / "dsx.json").write_text(json.dumps({"step": step, "session": "a"}))
        world: Any = SimpleNamespace(cluster_id=cluster, rank=0)
        told.append(parts.whole_states(parts.complete_in(tmp_path, world), num_engines))
    handle: Any = SimpleNamespace(gather=lambda own: told)
    first: Any = SimpleNamespace(cluster_id=0, rank=0)
    wanted = {"accelerate": "accelerate.replaced", "pytorch_model": "pytorch_model.replaced"}
    found = parts.parts_to_load(handle, first, tmp_path, num_engines)
    assert found == wanted | ({"pytorch_model_1": "pytorch_model_1"} if num_engines == 2 else {})
    assert "that of step 4, which it was to replace, is loaded" in caplog.text
    assert [step for step, *_ in told[1]] == [4]
    second: Any = SimpleNamespace(cluster_id=1, rank=0)
    for _ in range(2):  # saved there again, and killed in the same place
        parts.put_back_whole(tmp_path, second, num_engines)
        write(tmp_path, 1, 8, tag="accelerate")
    held = parts.complete_in(tmp_path, second)
    assert [step for step, *_ in parts.whole_states(held, num_engines)] == [4]
    told[1] = []
    assert parts.parts_to_load(handle, first, tmp_path, num_engines) is None
    (tmp_path / "cluster_0" / "accelerate" / "dsx.json").write_text("{")
    handle.gather = lambda own: told.append(own) or [own, own]
    assert parts.parts_to_load(handle, first, tmp_path, num_engines) is None and told[-1] == []


@pytest.mark.parametrize("steps", [(4, 4), (4, 6)])
def test_a_newer_folder_on_a_disk_that_hides_the_common_one_is_named(
    steps: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    from dsx.run.accelerate import saves

    def differs(*given: Any) -> None:
        raise ValueError("no complete checkpoint 'last' that all clusters hold")

    def gather(own: list[Any]) -> list[Any]:
        return [own, [{}, {"last": [steps[1], "a"]}, ""]]  # whose disk is lost

    monkeypatch.setattr(saves, "from_first", lambda value: value)
    monkeypatch.setattr(saves, "_fetch", differs)
    tags = {"last": {"step": steps[0], "session": "a"}}
    remote = SimpleNamespace(url="file:///far", tags=lambda cluster: tags)
    handle: Any = SimpleNamespace(remote=remote, gather=gather)
    world: Any = SimpleNamespace(rank=0, cluster_id=0)
    states = {"last": [(steps[0], "a", ["accelerate"])]}
    saves.bring(handle, world, tmp_path, states, "last")
    assert "last is not taken: no complete checkpoint 'last'" in caplog.text
    said = f"all clusters have it as of step 4: to load that, move {tmp_path / 'last'} away"
    assert (said in caplog.text) == (steps == (4, 4))


@pytest.mark.parametrize("wanted", ["checkpoint_1", None])
@pytest.mark.parametrize("steps", [[(8, "a"), (4, "a")], [(8, "a")], [(4, "b")]])
def test_a_folder_of_which_clusters_hold_no_common_state_is_fetched(
    steps: list[tuple[int, str]], wanted: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    from dsx.run.accelerate import saves

    fetched: list[str] = []
    monkeypatch.setattr(saves, "from_first", lambda value: value)
    monkeypatch.setattr(saves, "_fetch", lambda handle, world, base, name: fetched.append(name))
    remote = SimpleNamespace(url="file:///far", tags=lambda cluster: {})
    others = {"checkpoint_1": [[4, "a", ["accelerate"]]]}
    handle: Any = SimpleNamespace(remote=remote, gather=lambda own: [own, [others, {}, ""]])
    world: Any = SimpleNamespace(rank=0, cluster_id=0)
    own = {"checkpoint_1": [(*one, ["accelerate"]) for one in steps]}
    saves.bring(handle, world, tmp_path, own, wanted)
    assert fetched == ([] if (4, "a") in steps else ["checkpoint_1"])


def test_the_newest_of_automatic_names_is_of_one_step_and_run_in_all_clusters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from dsx.run.accelerate import states

    for cluster, runs in enumerate(("aaa", "aab")):
        for number, run in enumerate(runs):
            write(
                tmp_path / "checkpoints" / f"checkpoint_{number}", cluster, 4, run, tag=states.TAG
            )
    accelerator = SimpleNamespace(project_dir=tmp_path)
    second: Any = SimpleNamespace(cluster_id=1, rank=0)
    told = json.loads(json.dumps(sorted(states._checkpoints(accelerator, second, 0).items())))
    handle = SimpleNamespace(gather=lambda own: [json.loads(json.dumps(own)), told])
    trained: Any = [SimpleNamespace(handle=handle, is_engine=False)]
    first: Any = SimpleNamespace(cluster_id=0, rank=0)
    found = states._newest(accelerator, trained, first)
    assert found == tmp_path / "checkpoints" / "checkpoint_1"
    assert "checkpoints [2] are not of one step and run" in caplog.text
