"""`dsx.initialize(training_data=...)`: no sample is two clusters', and a resume reads on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from dsx.comm.world import current_world
from dsx.engines.deepspeed.data import ResumedSampler, cut_training_data
from tests.distributed import run_distributed
from tests.engines.engines import ds_config, quiet
from tests.engines.test_deepspeed_resharding import end
from tests.installed import needs
from tests.tiny import WIDTH

pytestmark = needs("deepspeed")

NUM_SAMPLES, MICRO, STEPS, STOP = 24, 3, 3, 3  # 12 of each cluster: the stop is in an epoch


class Samples(Dataset[Any]):
    """Pairs whose first number is the sample's."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((WIDTH,), float(index)), torch.zeros(WIDTH)


class Stream(IterableDataset[Any]):
    """Without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def build(num_stages: int) -> Any:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import dsx

    config = ds_config(1, "fp32", "diloco")
    config["dsx"] = {"preset": "diloco", "clusters": config["dsx"]["clusters"]}
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
    assert deepspeed
    return dsx.initialize(model=model, config=config, optimizer=optimizer, training_data=Samples())


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
    return found


def test_clusters_read_apart_and_a_resume_reads_on(tmp_path: Path) -> None:
    results = run_distributed(read_and_resume, 4, str(tmp_path), timeout_seconds=200)
    for num_stages in (0, 2):
        read: list[set[int]] = [set(), set()]
        for result in (rank[num_stages] for rank in results):
            assert result["resumed"] == result["whole"]
            read[result["cluster"]].update(i for batch in result["whole"] for i in batch)
        assert read == [set(range(m, NUM_SAMPLES, 2)) for m in range(2)]  # all, and apart
    of_ranks = [results[rank][0]["whole"][0] for rank in range(2)]
    assert not set(of_ranks[0]) & set(of_ranks[1])


def test_data_without_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"training_data=Stream has no length, .* loader of your"):
        cut_training_data(Stream(), 0, 2)


def test_a_sampler_can_be_copied() -> None:
    other = copy.copy(ResumedSampler(range(3)))
    other.skipped = 1
    assert list(other) == [1, 2]
