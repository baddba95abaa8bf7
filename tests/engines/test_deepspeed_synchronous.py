"""From plain DeepSpeed into a run across clusters and back, bit for bit at the moment of change."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint
from torch.utils.data import DistributedSampler

import dsx
from dsx.comm.world import current_world
from dsx.data.cluster_batches import ClusterShard
from dsx.engines.deepspeed.engine import adopt_world
from dsx.engines.deepspeed.loader import rest_of_epoch
from tests.distributed import run_distributed
from tests.engines import engines, pipelines, test_deepspeed_data
from tests.engines.engines import Kind, quiet
from tests.engines.resumes import differences, inner_snapshot
from tests.engines.test_deepspeed_resharding import convert
from tests.installed import needs

pytestmark = needs("deepspeed")

CHANGE, MORE = 3, 3  # steps of the plain run, and of either before the first outer step at H = 4
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 7}}
ZERO_1 = Kind(1, "bf16", "two", "adamw", "diloco")
KINDS = [
    Kind(0, "fp32", "two", "adamw", "diloco"),
    Kind(0, "bf16", "two", "adamw", "diloco"),
    Kind(2, "bf16", "frozen", "adamw", "diloco"),
    Kind(3, "fp32", "two", "adamw", "diloco", zero=("none_persistent",)),
    Kind(3, "bf16", "two", "adamw", "diloco", zero=("sub_groups", "some_persistent")),
    pipelines.Kind(0, is_tied=True, groups="two", optimizer="adamw", preset="diloco"),
    pipelines.Kind(1, "bf16", is_tied=True, optimizer="adamw", preset="diloco"),
]


def arguments(kind: Any, schedule: bool = True) -> dict[str, Any]:
    of_pipeline = isinstance(kind, pipelines.Kind)
    given = (pipelines if of_pipeline else engines).engine_arguments(kind)
    if schedule:
        given["config"]["scheduler"] = SCHEDULE
    return given


def plain(kind: Any, schedule: bool = True, **changes: Any) -> Any:
    """Return DeepSpeed's own engine, over the ranks of this cluster; of cluster 0's weights."""
    import deepspeed

    given = arguments(kind, schedule)
    of_pipeline = isinstance(kind, pipelines.Kind)
    first = (
        pipelines.make_module(kind, 0, pipelines.NUM_STAGES) if of_pipeline else engines.OddNet(0)
    )
    given["model"].load_state_dict(first.state_dict())
    config = {k: v for k, v in given.pop("config").items() if k != "dsx"}
    with contextlib.redirect_stdout(io.StringIO()):
        return deepspeed.initialize(
            config={**config, **changes}, dist_init_required=False, **given
        )[0]


def held(engine: Any) -> dict[str, Any]:
    return {**inner_snapshot(engine), "schedule": engine.lr_scheduler.state_dict()}


def take(engine: Any, kind: Any, step: int, cluster: int = 0) -> None:
    of_pipeline = isinstance(kind, pipelines.Kind)
    train = pipelines.train_batch if of_pipeline else engines.train_step
    train(engine, step, cluster=cluster)


def end(engine: Any) -> None:
    if hasattr(engine, "dsx"):
        engine.dsx.close()
    engine.destroy()


def there_and_back(kind: Any, base: str) -> dict[str, list[str]]:
    """Train in one world; go on from its checkpoint across clusters, and without dsx from theirs.

    Returns what differs between either side of a change, and some steps behind it.
    """
    engine = plain(kind)
    cluster = current_world().cluster_id
    for step in range(1, CHANGE + 1):
        take(engine, kind, step)
    before = held(engine)
    if cluster == 0:
        engine.save_checkpoint(f"{base}/plain", client_state={"mine": 5})
    for step in range(CHANGE + 1, CHANGE + MORE + 1):
        take(engine, kind, step)
    gone_on = held(engine)
    end(engine)

    engine = dsx.initialize(**arguments(kind))[0]
    engine.dsx.gather("saved")
    _, state = engine.load_checkpoint(f"{base}/plain")
    assert state["mine"] == 5 and engine.dsx.step == 0 and engine.global_steps == CHANGE
    found = {"in": differences(held(engine), before), "anchors": wrong_anchors(engine)}
    for step in range(CHANGE + 1, CHANGE + MORE + 1):
        take(engine, kind, step)
    found["in, later"] = differences(held(engine), gone_on)
    for step in range(CHANGE + MORE + 1, CHANGE + MORE + 3):  # with an outer step, each its own
        take(engine, kind, step, cluster)
    engine.save_checkpoint(f"{base}/across")
    before = held(engine)
    take(engine, kind, CHANGE + MORE + 3, cluster)
    gone_on = held(engine)
    end(engine)

    engine = plain(kind)
    engine.load_checkpoint(f"{base}/across/cluster_{cluster}")
    found["out"] = differences(held(engine), before)
    take(engine, kind, CHANGE + MORE + 3, cluster)
    found["out, later"] = differences(held(engine), gone_on)
    end(engine)
    return found


def wrong_anchors(engine: Any) -> list[str]:
    """Return the fragments whose outer state is not that of a start from these masters."""
    loop, wrong = engine.dsx.loop, []
    for fragment in loop.adapter.fragments:
        own = torch.empty(fragment.numel)
        loop.adapter.read(fragment.id, own)
        state = loop.state.named_state(fragment.id)
        others = [t for name, t in state.items() if name != "anchor" and t.is_floating_point()]
        if not torch.equal(loop.state.anchor[fragment.id], own) or any(t.any() for t in others):
            wrong.append(f"fragment {fragment.id}: {sorted(state)}")
    return wrong


def there_and_back_all(kinds: list[Any], base: str) -> list[dict[str, list[str]]]:
    quiet()
    return [there_and_back(kind, f"{base}/{index}") for index, kind in enumerate(kinds)]


@pytest.mark.ci
@pytest.mark.parametrize(
    "kinds", [[ZERO_1], pytest.param(KINDS, marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_nothing_changes_where_the_engine_does(kinds: list[Any], tmp_path: Path) -> None:
    parts = ("in", "anchors", "in, later", "out", "out, later")
    everyone = run_distributed(there_and_back_all, 4, kinds, str(tmp_path), timeout_seconds=280)
    for results in everyone:
        for kind, found in zip(kinds, results, strict=True):
            assert found == {part: [] for part in parts}, kind
    for path in tmp_path.rglob("*.pt"):  # plain DeepSpeed reads them where there is no dsx
        assert not [n for n in get_unsafe_globals_in_checkpoint(path) if n.startswith("dsx")]


def refusal(load: Any) -> str:
    try:
        load()
    except (ValueError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def refused(base: str) -> dict[str, str]:
    quiet()
    kind, found = ZERO_1, {}
    engine = plain(kind)
    cluster = current_world().cluster_id
    take(engine, kind, 1)
    if cluster == 0:
        engine.save_checkpoint(f"{base}/plain", tag="a")
        engine.save_checkpoint(f"{base}/alone_0", tag="a")
    before = held(engine)
    take(engine, kind, 2, cluster)  # at a rate of 0
    engine.save_checkpoint(f"{base}/moments_{cluster}", tag="a")
    take(engine, kind, 3)
    engine.save_checkpoint(f"{base}/weights_{cluster}", tag="a")
    end(engine)
    engine = plain(kind, schedule=False)
    take(engine, kind, 1)
    if cluster == 0:
        engine.save_checkpoint(f"{base}/unscheduled")
    end(engine)

    engine = dsx.initialize(**arguments(kind._replace(stage=3)))[0]
    found["stage"] = refusal(lambda: engine.load_checkpoint(f"{base}/plain"))
    end(engine)
    engine = dsx.initialize(**arguments(kind._replace(stage=2)))[0]
    found["stage 2"] = refusal(lambda: engine.load_checkpoint(f"{base}/plain"))
    assert not differences(held(engine), before)
    end(engine)
    engine = dsx.initialize(**arguments(kind))[0]
    engine.dsx.gather("saved")
    found["moments"] = refusal(lambda: engine.load_checkpoint(f"{base}/moments_{cluster}"))
    found["weights"] = refusal(lambda: engine.load_checkpoint(f"{base}/weights_{cluster}"))
    found["alone"] = refusal(lambda: engine.load_checkpoint(f"{base}/alone_{cluster}"))
    found["unscheduled"] = refusal(lambda: engine.load_checkpoint(f"{base}/unscheduled"))
    found["named"] = refusal(lambda: engine.load_checkpoint(f"{base}/plain", tag="b"))
    found["in order"] = refusal(lambda: engine.load_checkpoint(f"{base}/plain", tag="a"))
    take(engine, kind, 2, cluster)
    engine.save_checkpoint(f"{base}/plain", tag="b")
    found["late"] = refusal(lambda: engine.load_checkpoint(f"{base}/plain", tag="a"))
    engine.dsx.gather("saved")
    found["of dsx"] = refusal(lambda: engine.load_checkpoint(f"{base}/plain/cluster_0"))
    end(engine)
    if engine.global_rank == 0 and cluster == 1:
        shutil.rmtree(f"{base}/plain/cluster_1")
    engine = dsx.initialize(**arguments(kind))[0]
    engine.dsx.gather("removed")
    found["half"] = refusal(lambda: engine.load_checkpoint(f"{base}/plain"))
    found["once more"] = refusal(lambda: engine.load_checkpoint(f"{base}/plain", tag="a"))
    end(engine)
    return found


@pytest.mark.ci
def test_what_cannot_be_entered_is_refused_in_all_clusters(tmp_path: Path) -> None:
    everyone = run_distributed(refused, 4, str(tmp_path), timeout_seconds=240)
    expected = {
        "stage": "saved with ZeRO-1 or 2, and this run has zero_optimization.stage=3",
        "stage 2": "loaded",
        "moments": "have loaded different optimizer states, schedules or counters from",
        "weights": "the clusters have loaded different weights from",
        "alone": "do not find one checkpoint of plain DeepSpeed",
        "unscheduled": "holds no learning rate schedule, and this run has one",
        "named": "no complete checkpoint 'b' that all clusters hold",
        "in order": "loaded",
        "late": "this one has taken 1 step(s) across clusters",
        "of dsx": "is a checkpoint that dsx has saved, of one cluster: load",
        "half": "is of plain DeepSpeed: to begin from it once more, name it (tag='a')",
        "once more": "loaded",
    }
    for found in everyone:
        assert {k: expected[k] in v for k, v in found.items()} == dict.fromkeys(expected, True), (
            json.dumps(found, indent=1)
        )


class More(test_deepspeed_data.Samples):
    """So many that both runs end within the epoch."""

    def __len__(self) -> int:
        return 36


def read_on(base: str) -> list[Any]:
    """Return by number of stages what the plain run has read, and each cluster then, resumed once.

    Of 36 samples plain DeepSpeed reads 12, and a cluster the next 12 in halves, and one epoch more.
    """
    quiet()
    test_deepspeed_data.read_in_this_process()
    build, steps = test_deepspeed_data.build, test_deepspeed_data.steps
    found = []
    for num_stages in (0, 2):
        per_step = 3 if num_stages else 6
        engine, _, loader, _ = build(num_stages, More(), is_plain=True)
        before = list(islice(steps(engine, loader, num_stages), 12 // per_step))
        cluster = current_world().cluster_id
        if cluster == 0:
            engine.save_checkpoint(f"{base}/{num_stages}")
        end(engine)
        engine, _, loader, _ = build(num_stages, More())
        engine.dsx.gather("saved")
        engine.load_checkpoint(f"{base}/{num_stages}")
        taken = steps(engine, loader, num_stages)
        half = list(islice(taken, 6 // per_step))
        engine.save_checkpoint(f"{base}/{num_stages}")
        behind = list(islice(taken, 24 // per_step))
        end(engine)
        engine, _, loader, _ = build(num_stages, More())
        engine.load_checkpoint(f"{base}/{num_stages}")
        resumed = list(islice(steps(engine, loader, num_stages), 24 // per_step))
        end(engine)
        found.append((before, half, behind, resumed, cluster))
    return found


@pytest.mark.ci
def test_training_data_goes_on_where_the_plain_run_was(tmp_path: Path) -> None:
    everyone = run_distributed(read_on, 4, str(tmp_path), timeout_seconds=240)
    for of_ranks in zip(*everyone, strict=True):
        plain_run: set[int] = set()
        rest: list[list[int]] = [[], []]
        epoch: list[list[int]] = [[], []]
        for before, half, behind, resumed, cluster in of_ranks:
            assert resumed == behind
            samples = [i for step in half + behind for i in step]
            own = len(samples) * 12 // 30
            plain_run |= {i for step in before for i in step}
            rest[cluster] += samples[:own]
            epoch[cluster] += samples[own:]
        if len(of_ranks[0][0][0]) * len(of_ranks[0][0]) == 12:  # both ends of a pipeline read it
            rest, epoch = [own[:12] for own in rest], [own[:18] for own in epoch]
        assert [len(own) for own in rest] == [12, 12]
        assert sorted([*plain_run, *rest[0], *rest[1]]) == list(range(36))
        assert [sorted(own) for own in epoch] == [list(range(m, 36, 2)) for m in range(2)]


@pytest.mark.parametrize(
    ("micro", "samples", "drops", "place"),
    [
        (2, 24, False, (0, 24)),  # as six steps of 4, or as four of 4 and one of 8
        (2, 28, False, (1, 0)),  # the last micro-batch of an epoch of 26 has one sample a rank
        (2, 28, True, (1, 4)),
        (4, 40, False, (1, 8)),
        (3, 28, False, "read 14 samples on each of 2 rank.*no whole number of micro-batches of 3"),
    ],
)
def test_the_place_of_a_plain_run_in_its_data(
    micro: int, samples: int, drops: bool, place: Any
) -> None:
    from dsx.engines.deepspeed.synchronous import samples_read

    engine = SimpleNamespace(
        train_micro_batch_size_per_gpu=lambda: micro,
        dataloader_drop_last=lambda: drops,
        sequence_parallel_size=1,
    )
    facts: dict[str, Any] = {"dp_world_size": 2, "global_steps": 5, "global_samples": samples}
    facts["config"] = {"train_micro_batch_size_per_gpu": micro}
    if isinstance(place, str):
        with pytest.raises(ValueError, match=place):
            samples_read(26, engine, facts)
    else:
        assert samples_read(26, engine, facts) == place


@pytest.mark.parametrize(("total", "read", "ranks"), [(26, 12, 2), (100, 33, 3), (8, 7, 2)])
def test_clusters_read_what_a_plain_run_has_left(total: int, read: int, ranks: int) -> None:
    data: Any = list(range(total))
    whole = DistributedSampler(data, 1, 0, seed=0)
    whole.set_epoch(2)
    left = list(whole)[read:]
    found = []
    for cluster in range(2):
        shard = ClusterShard(data, cluster, 2)
        own = []
        for rank in range(ranks):
            sampler = DistributedSampler(shard, ranks, rank, seed=0)
            sampler.set_epoch(2)
            own.append([int(shard[i]) for i in rest_of_epoch(sampler, shard, read)])
        assert len({len(one) for one in own}) == 1
        found.append({sample for one in own for sample in one})
    assert not found[0] & found[1] and found[0] | found[1] <= set(left)
    assert [len(one) for one in found] == [len(left) // 2] * 2


OTHER_RANKS = Kind(1, "fp32", "two", "adamw", "diloco")


def in_one_world(base: str, source: str | None = None) -> None:
    """Plain DeepSpeed over all ranks: trains, or loads what was converted; saves, and converts."""
    import deepspeed

    quiet()
    torch.distributed.init_process_group("gloo")
    adopt_world()  # without a build of minutes
    config = engines.ds_config(1, "fp32", "diloco")
    del config["dsx"]
    config["checkpoint"] = {"load_universal": source is not None}
    model = engines.OddNet(0)
    optimizer = engines.make_optimizer("adamw", engines.GROUPS["two"](model))
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )[0]
    if source is not None:
        engine.load_checkpoint(source, "a_universal")
        assert engine.global_steps == 8
    else:
        for step in range(1, CHANGE + 1):
            engines.train_step(engine, step, cluster=0)
    save_and_convert(engine, base, Path(base))


def across(base: str, out: str) -> None:
    """Begin there with clusters of two ranks, save at once, and five steps later."""
    quiet()
    engine = engines.build_engine(OTHER_RANKS, checkpoint={"load_universal": True})
    engine.load_checkpoint(base)
    save_and_convert(engine, f"{out}/begun", Path(out) / "begun" / "cluster_0")
    for step in range(1, 6):
        engines.train_step(engine, step)
    save_and_convert(engine, f"{out}/trained", Path(out) / "trained" / "cluster_0")
    end(engine)


def save_and_convert(engine: Any, base: str, own: Path) -> None:
    engine.save_checkpoint(base, tag="a")
    if engine.global_rank == 0 and (not hasattr(engine, "dsx") or engine.dsx.cluster_id == 0):
        convert(own / "a")


def converted(base: Path) -> dict[str, list[float]]:
    """Return weights, moments and steps of every parameter, whole."""
    found = {}
    for path in sorted((base / "a_universal" / "zero").glob("*/*.pt")):
        state = torch.load(path, weights_only=False)
        value = state["param"] if isinstance(state, dict) else torch.as_tensor(state)
        found[f"{path.parent.name}/{path.stem}"] = value.double().flatten().tolist()
    return found


@pytest.mark.slow
def test_other_numbers_of_ranks_by_the_universal_checkpoint(tmp_path: Path) -> None:
    first, out, last = tmp_path / "plain", tmp_path / "across", tmp_path / "last"
    run_distributed(in_one_world, 4, str(first))
    run_distributed(across, 4, str(first), str(out), timeout_seconds=120)
    run_distributed(in_one_world, 4, str(last), f"{out}/trained/cluster_0")
    before, trained = converted(first), converted(out / "trained" / "cluster_0")
    assert converted(out / "begun" / "cluster_0") == before
    assert converted(last) == trained
    kinds = {key.split("/")[1] for key in before}
    assert kinds >= {"fp32", "exp_avg", "exp_avg_sq"} and trained != before
