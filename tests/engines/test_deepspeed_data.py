"""`dsx.initialize(training_data=...)`: no sample is two clusters', and a resume reads on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from dsx.comm.world import current_world
from dsx.data.cluster_batches import ClusterShard
from dsx.engines.deepspeed.data import DataPosition, cut_training_data, source_of
from dsx.engines.deepspeed.loader import ResumedSampler
from tests.distributed import run_distributed
from tests.engines.engines import ds_config, quiet
from tests.engines.test_deepspeed_resharding import end
from tests.installed import needs
from tests.tiny import WIDTH

pytestmark = needs("deepspeed")

NUM_SAMPLES, MICRO, STEPS, STOP = 24, 3, 3, 3  # 12 of each cluster: the stop is in an epoch


class Samples(Dataset[Any]):
    """Pairs whose first number is the sample's, counted from `first`."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((WIDTH,), float(self.first + index)), torch.zeros(WIDTH)


class Augmented(Samples):
    """Of which nothing is read twice alike."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((WIDTH,), float(index)), torch.randn(WIDTH)


class Stream(IterableDataset[Any]):
    """Without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def build(num_stages: int, samples: Any = None, is_plain: bool = False, **clusters: Any) -> Any:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import dsx

    config = ds_config(1, "fp32", "diloco")
    config["dsx"] = {"preset": "diloco", "clusters": {**config["dsx"]["clusters"], **clusters}}
    config.update(train_micro_batch_size_per_gpu=MICRO, gradient_accumulation_steps=1)
    if current_world() is None:
        dsx.init_distributed(config)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    model: Any = torch.nn.Sequential(*layers)
    if num_stages:
        model = PipelineModule(
            layers, num_stages=num_stages, loss_fn=torch.nn.MSELoss(), partition_method="uniform"
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    start = dsx.initialize
    if is_plain:
        config.pop("dsx")
        start = partial(deepspeed.initialize, dist_init_required=False)
    return start(
        model=model, config=config, optimizer=optimizer, training_data=samples or Samples()
    )


def read_in_this_process() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    io = DeepSpeedEngine.deepspeed_io
    DeepSpeedEngine.deepspeed_io = lambda *a, **k: io(*a, num_local_io_workers=0, **k)


def steps(engine: Any, loader: Any, num_stages: int) -> Iterator[list[int]]:
    """Take steps without end, and yield the samples that each reads here."""
    read: list[list[int]] = []

    def note(batch: Any) -> Any:
        read.append(batch[0][:, 0].int().tolist())
        return batch

    if num_stages:
        engine.set_batch_fn(note)
        while True:
            engine.train_batch()
            yield read[-1]
    while True:
        for x, y in loader:
            engine.backward(torch.nn.functional.mse_loss(engine(x), y))
            engine.step()
            yield x[:, 0].int().tolist()


def read_and_resume(base: str) -> dict[int, Any]:
    quiet()
    read_in_this_process()
    found: dict[int, Any] = {}
    for num_stages in (0, 2):
        engine, _, loader, _ = build(num_stages)
        taken = steps(engine, loader, num_stages)
        before = list(islice(taken, STOP))
        engine.save_checkpoint(f"{base}/{num_stages}", tag="a")
        whole = before + list(islice(taken, STEPS))
        end(engine)
        engine, _, loader, _ = build(num_stages)
        engine.load_checkpoint(f"{base}/{num_stages}", tag="a")
        resumed = before + list(islice(steps(engine, loader, num_stages), STEPS))
        cluster = engine.dsx.cluster_id
        end(engine)
        found[num_stages] = {"resumed": resumed, "whole": whole, "cluster": cluster}
        if not num_stages:  # DeepSpeed goes on with a pipeline's topology in this process
            found[-1] = {name: epoch(*case) for name, case in cases(cluster).items()}
    return found


def cases(cluster: int) -> dict[str, tuple[Any, str]]:
    """Return datasets, and what `clusters.data` says of them."""
    return {
        "own": (Samples(100 * cluster), "auto"),
        "augmented": (Augmented(), "auto"),
        "own, split all the same": (Samples(100 * cluster), "split"),
        "shared, read whole all the same": (Samples(), "own"),
    }


def epoch(data: Any, whose: str) -> list[int]:
    """Return what one rank reads of a dataset in an epoch."""
    engine, _, loader, _ = build(0, data, data=whose)
    read = [int(sample) for x, _ in loader for sample in x[:, 0]]
    end(engine)
    return read


def read_by(results: list[Any], name: str) -> list[list[int]]:
    """Return what each cluster has read, from its two ranks."""
    own = [rank[-1][name] for rank in results]
    return [sorted(own[2 * cluster] + own[2 * cluster + 1]) for cluster in range(2)]


def test_clusters_read_apart_and_a_resume_reads_on(tmp_path: Path) -> None:
    results = run_distributed(read_and_resume, 4, str(tmp_path), timeout_seconds=200)
    for num_stages in (0, 2):
        read: list[set[int]] = [set(), set()]
        for result in (rank[num_stages] for rank in results):
            assert result["resumed"] == result["whole"]
            read[result["cluster"]].update(i for batch in result["whole"] for i in batch)
        assert read == [set(range(m, NUM_SAMPLES, 2)) for m in range(2)]  # all, and apart
    assert {name: read_by(results, name) for name in cases(0)} == {
        "own": [list(range(24)), list(range(100, 124))],
        "augmented": [list(range(0, 24, 2)), list(range(1, 24, 2))],
        "own, split all the same": [list(range(0, 24, 2)), list(range(101, 124, 2))],
        "shared, read whole all the same": [list(range(24)), list(range(24))],
    }
    of_ranks = [results[rank][0]["whole"][0] for rank in range(2)]
    assert not set(of_ranks[0]) & set(of_ranks[1])


def test_data_without_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"training_data=Stream has no length, .* loader of your"):
        cut_training_data(Stream(), 0, 2)


def test_a_sampler_can_be_copied() -> None:
    other = copy.copy(ResumedSampler(range(3)))
    other.skipped = 1
    assert list(other) == [1, 2]


def test_data_is_told_apart_by_numpy_s_own_values_and_not_by_addresses() -> None:
    def digest(labels: Any) -> str | None:
        return source_of([(np.zeros(2), label) for label in labels]).digest

    assert digest(np.arange(3)) == digest(np.arange(3)) is not None
    assert digest(np.arange(3)) != digest(np.arange(3) + 1)
    assert digest([np.array(["a", None], dtype=object)] * 3) is None


class Place:
    """A loader's, of which nothing is read."""

    def __init__(self, consumed: int, num_samples: int) -> None:
        self.consumed, self.after, self.num_samples = consumed, None, num_samples

    def go_to(self, consumed: int, after: int | None = None) -> None:
        self.consumed, self.after = consumed, after


def test_who_joins_reads_on_where_others_are(caplog: pytest.LogCaptureFixture) -> None:
    """In its own part of the same samples; of other ones where it would be by itself."""

    def position(cluster: int, place: Any, samples: Any) -> DataPosition:
        return DataPosition(place, ClusterShard(samples, cluster, 2), lambda: 42)

    told = position(0, Place(7, 12), Samples()).place_here()
    same, other = Place(0, 12), Place(0, 10)
    position(1, same, Samples()).go_where_others_are(told)
    position(1, other, list(range(20))).go_where_others_are(told)
    assert (same.consumed, other.consumed) == (7, 2)
    assert "20 samples here and 24 in another cluster" in caplog.text
    assert position(0, None, Samples()).place_here() == {}  # of a stage in the middle
    position(1, None, Samples()).go_where_others_are({})
