"""A Trainer without dsx, one across clusters from its checkpoint, and back: bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import free_port
from tests.installed import needs
from tests.run.launching import run
from tests.run.test_trainer import (
    BATCH,
    DILOCO,
    LOOKS,
    SCRIPT,
    launch,
    options,
    told,
    weights,
    write_config,
)

pytestmark = [needs("deepspeed", "transformers", "accelerate", "datasets"), pytest.mark.slow]

CHANGE, STEPS = 4, 8
EVERY = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
LATE = {**DILOCO, "schedule": {"interval": 100}}  # so that one cluster takes no outer step


def train(at: Path, *arguments: Any, ranks: int = 1, across: bool = False) -> str:
    """Run the script in `at`, or across clusters; return its output."""
    alone = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
    command = launch(ranks) if across else [*alone, "--master-port", free_port()]
    at.mkdir(parents=True, exist_ok=True)
    ((status, output),) = run(([*command, SCRIPT, *arguments], {}), at=at)
    assert status == 0, output
    return output


def plain_options(at: Path, kind: str, **more: Any) -> list[str]:
    """Return the options of a run without dsx, with DeepSpeed or without."""
    config = write_config(at.parent / f"{at.name}.json", {}, train_batch_size="auto")
    document = json.loads(config.read_text())
    del document["dsx"]
    config.write_text(json.dumps(document))
    given = options(config, **{**EVERY, "max_steps": STEPS, **more})
    if kind == "torch":
        del given[given.index("--deepspeed") : given.index("--deepspeed") + 2]
    return given


def across_options(at: Path, num_clusters: int, block: dict[str, Any], **more: Any) -> list[str]:
    config = write_config(at.parent / f"{at.name}.json", block)
    document = json.loads(config.read_text())
    document["dsx"]["clusters"]["num_clusters"] = num_clusters
    config.write_text(json.dumps(document))
    return options(config, **{**EVERY, "max_steps": STEPS, **more})


def states(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return masters and moments of a checkpoint of DeepSpeed's, or of torch's own."""
    found: dict[str, torch.Tensor] = {}
    if (folder / "optimizer.pt").is_file():
        from safetensors.torch import load_file

        saved = torch.load(folder / "optimizer.pt")
        model = load_file(folder / "model.safetensors")
        for group in saved["param_groups"]:
            for number in group["params"]:
                for key, value in saved["state"][number].items():
                    found[f"{number} {key}"] = value
        return {**found, **model}
    for file in sorted((folder / f"global_step{step}").glob("*_optim_states.pt")):
        saved = torch.load(file, weights_only=False)["optimizer_state_dict"]
        for number, flat in enumerate(saved["single_partition_of_fp32_groups"]):
            found[f"{file.name} {number} master"] = flat
            for key, value in saved["base_optimizer_state"]["state"][number].items():
                found[f"{file.name} {number} {key}"] = torch.as_tensor(value)
    return found


def require_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one and one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.timeout(900)
def test_into_one_cluster_and_back_with_deepspeed(tmp_path: Path) -> None:
    """As if nothing had changed, up to the first outer step: states, schedule and data."""
    plain = tmp_path / "plain"
    train(plain, *plain_options(plain, "deepspeed"))
    start = f"{plain}/runs/checkpoint-{CHANGE}"
    one = tmp_path / "one"
    given = across_options(one, 1, LATE, resume_from_checkpoint=start)
    said = train(one, *given, across=True)
    assert "of plain DeepSpeed" in said and "engine.global_steps is 4" in said
    for step in (CHANGE + 2, STEPS - 2):
        ours = states(one / f"runs/cluster_0/checkpoint-{step}", step)
        require_equal(ours, states(plain / f"runs/checkpoint-{step}", step))
    back = tmp_path / "back"
    start = f"{one}/runs/cluster_0/checkpoint-{CHANGE + 2}"
    train(back, *plain_options(back, "deepspeed", resume_from_checkpoint=start))
    ours = states(back / f"runs/checkpoint-{STEPS}", STEPS)
    require_equal(ours, states(plain / f"runs/checkpoint-{STEPS}", STEPS))
    require_equal(weights(back / "final"), weights(plain / "final"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["torch", "deepspeed"])
def test_two_clusters_read_what_the_run_had_left(tmp_path: Path, kind: str) -> None:
    plain, two = tmp_path / "plain", tmp_path / "two"
    batch = 2 * BATCH  # in one process, as without a GPU a Trainer sees no world of several
    given = plain_options(plain, kind, max_steps=CHANGE, per_device_train_batch_size=batch)
    train(plain, *given)
    read = json.loads((plain / "runs" / "told.0.json").read_text())["read"]
    before = set(read[: CHANGE * batch])  # one batch more is fetched ahead
    assert len(before) == CHANGE * BATCH * 2
    start = f"{plain}/runs/checkpoint-{CHANGE}"
    given = across_options(two, 2, DILOCO, resume_from_checkpoint=start, max_steps=12)
    said = train(two, *given, ranks=2, across=True)
    assert f"goes on behind step {CHANGE}: it reads 8 samples of what" in said
    assert ("of a Trainer without DeepSpeed (step 4)" in said) == (kind == "torch")
    taken = [told(two, m)["read"][LOOKS:] for m in range(2)]
    assert sorted([*before, *taken[0][:8], *taken[1][:8]]) == list(range(32))
    assert all({i % 2 for i in own[8:16]} == {m} for m, own in enumerate(taken))
    last = weights(two / "final")
    (two / "runs" / "cluster_0" / "model.safetensors").unlink()
    given[given.index(start)] = "runs/checkpoint-8"
    train(two, *given, ranks=2, across=True)
    require_equal(weights(two / "final"), last)


@pytest.mark.timeout(900)
def test_a_trainer_without_deepspeed_goes_on(tmp_path: Path) -> None:
    """Some steps later it has what the plain run has, but for rounding; the schedule is equal."""
    plain, one = tmp_path / "plain", tmp_path / "one"
    train(plain, *plain_options(plain, "torch"))
    start = f"{plain}/runs/checkpoint-{CHANGE}"
    given = across_options(one, 1, LATE, resume_from_checkpoint=start)
    train(one, *given, across=True)
    step = CHANGE + 2
    ours = states(one / f"runs/cluster_0/checkpoint-{step}", step)
    theirs = states(plain / f"runs/checkpoint-{step}", step)
    for key, kept in (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        flat = torch.cat([v.flatten() for n, v in theirs.items() if n.endswith(f" {key}")])
        own = torch.cat([v.flatten() for n, v in ours.items() if n.endswith(f" {kept}")])
        torch.testing.assert_close(own[: flat.numel()], flat, rtol=1e-5, atol=1e-9)
    rates = [
        json.loads((at / f"checkpoint-{step}/trainer_state.json").read_text())["log_history"][-1]
        for at in (one / "runs/cluster_0", plain / "runs")
    ]
    assert rates[0]["learning_rate"] == rates[1]["learning_rate"]
