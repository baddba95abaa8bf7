"""A loop over Accelerate under `python -m dsx.run`, beside DiLoCo in plain torch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import free_port
from tests.installed import needs
from tests.run.launching import BIN, run

pytestmark = [needs("deepspeed", "accelerate"), pytest.mark.ci]

HERE = Path(__file__).parent
SCRIPT = HERE / "train_with_accelerate.py"
SAMPLES, HELD_OUT, INTERVAL, LR = 64, 22, 4, 0.01
DILOCO = {"preset": "diloco", "schedule": {"interval": INTERVAL}}
STREAMING = {
    "preset": "streaming_diloco",
    "schedule": {"interval": INTERVAL},
    "fragments": {"num_fragments": 2},
    "delay": {"steps": 1},
}
Batches = list[list[int]]  # of one step: micro-batches of all ranks


def write_block(path: Path, block: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"dsx": {"clusters": {"num_clusters": 2}, **block}}))
    return path


def write_config(path: Path, block: dict[str, Any], stage: int, accumulation: int = 1) -> Path:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "dsx": {"clusters": {"num_clusters": 2}, **block},
    }
    path.write_text(json.dumps(config))
    return path


def torchrun(count: int) -> list[Any]:
    own = ["--nproc-per-node", count, "--master-port", free_port(), "-m", "dsx.run"]
    return [sys.executable, "-m", "torch.distributed.run", *own]


def accelerate(count: int, *more: Any) -> list[Any]:
    own = ["--num_processes", count, "--num_machines", 1, "--main_process_port", free_port()]
    own += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    return [BIN / "accelerate", "launch", *own, *more, "-m", "dsx.run"]


def train(at: Path, launch: list[Any], *arguments: Any, **environ: str) -> str:
    told = ["--told", "told_{cluster_id}"]
    ((status, output),) = run(([*launch, SCRIPT, *arguments, *told], environ), at=at)
    assert status == 0, output
    return output


def told(at: Path, cluster: int, rank: int = 0) -> dict[str, Any]:
    return json.loads((at / f"told_{cluster}.{rank}.json").read_text())


def clusters_told(at: Path, ranks: int) -> list[list[dict[str, Any]]]:
    return [[told(at, cluster, rank) for rank in range(ranks)] for cluster in range(2)]


def diloco(
    steps: list[list[Batches]], rates: list[float], max_norm: float = 0.0, is_bf16: bool = False
) -> dict[str, Tensor]:
    """Train each cluster on its micro-batches in plain torch; return the last round's anchor."""
    from tests.run.train_with_accelerate import Samples, make_model

    data, count = Samples(SAMPLES, 1), len(steps)
    models = [make_model() for _ in steps]
    inner = [torch.optim.AdamW(m.parameters(), lr=LR, weight_decay=0.0) for m in models]
    anchor = {n: p.detach().clone() for n, p in models[0].named_parameters()}
    momentum = {n: torch.zeros_like(p) for n, p in anchor.items()}
    for step in range(1, len(steps[0]) + 1):
        for model, optimizer, batches in zip(models, inner, steps, strict=True):
            optimizer.param_groups[0]["lr"] = rates[step - 1]
            optimizer.zero_grad()
            for batch in batches[step - 1]:
                with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
                    found = model(data.x[batch])
                loss = nn.functional.mse_loss(found.float(), data.x[batch].flip(1))
                (loss / len(batches[step - 1])).backward()
            if max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        if step % INTERVAL == 0:
            for name, value in anchor.items():
                local = [dict(model.named_parameters())[name].detach() for model in models]
                mean = sum(value - one for one in local) / count
                momentum[name] = 0.9 * momentum[name] + mean
                value -= 0.7 * (mean + 0.9 * momentum[name])
                for one in local:
                    one.copy_(value)
    return anchor


def check(at: Path, ranks: int, accumulation: int = 1, epochs: int = 2, **how: Any) -> None:
    """Compare what a run of DiLoCo has left with the oracle, over the batches that it has read."""
    found = clusters_told(at, ranks)
    read = [[number for one in own for batch in one["read"] for number in batch] for own in found]
    assert sorted(read[0] + read[1]) == sorted(list(range(SAMPLES)) * epochs)
    assert not set(read[0]) & set(read[1])
    steps = [
        [
            [one["read"][k] for k in range(at_, at_ + accumulation) for one in own]
            for at_ in range(0, len(own[0]["read"]), accumulation)
        ]
        for own in found
    ]
    first = found[0][0]
    rates = first["rates"][accumulation - 1 :: accumulation]
    assert len(rates) == len(steps[0]) and rates[0] == LR
    expected = diloco(steps, rates, **how)
    saved = [model_in(at / "out" / "model")] + [
        {name: torch.tensor(value) for name, value in one[kind].items()}
        for own in found for one in own for kind in ("own", "after") if one[kind]
    ]  # fmt: skip
    for model in saved:
        assert model.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(model[name], tensor, rtol=0, atol=2e-6)
            assert torch.equal(model[name], saved[0][name])
    for own in found:
        assert [one["metrics"] for one in own] == [first["metrics"]] * ranks
        assert [one["count"] for one in own[0]["metrics"]] == [HELD_OUT] * epochs
        assert own[0]["world"] == ranks


def model_in(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def check_schedule(at: Path) -> None:
    """The schedule ends with the training, as in one world of all ranks."""
    rates = told(at, 0)["rates"]
    assert rates[-1] == pytest.approx(LR * (1 - (len(rates) - 1) / len(rates)))


def test_deepspeed_under_accelerate_launch_is_diloco(tmp_path: Path) -> None:
    config = write_config(tmp_path / "ds.json", DILOCO, stage=2)
    launch = accelerate(4, "--use_deepspeed", "--deepspeed_config_file", config)
    train(tmp_path, launch)
    assert told(tmp_path, 0)["kind"] == "DistributedType.DEEPSPEED"
    check(tmp_path, ranks=2)
    check_schedule(tmp_path)


def test_ddp_is_diloco(tmp_path: Path) -> None:
    """With accumulation, clipping and bf16."""
    block = write_block(tmp_path / "dsx.json", DILOCO)
    more = ["--accumulation", 2, "--max_norm", 0.1, "--mixed_precision", "bf16"]
    train(tmp_path, torchrun(4), *more, DSX_CONFIG=str(block))
    assert told(tmp_path, 0)["kind"] == "DistributedType.MULTI_CPU"
    check(tmp_path, ranks=2, accumulation=2, max_norm=0.1, is_bf16=True)


def test_one_rank_per_cluster_needs_nothing_around_the_model(tmp_path: Path) -> None:
    block = write_block(tmp_path / "dsx.json", DILOCO)
    train(tmp_path, torchrun(2), DSX_CONFIG=str(block))
    check(tmp_path, ranks=1)
    check_schedule(tmp_path)


def test_fsdp2_is_diloco(tmp_path: Path) -> None:
    block = write_block(tmp_path / "dsx.json", DILOCO)
    environ = {"DSX_CONFIG": str(block), "ACCELERATE_TORCH_DEVICE": "cpu"}
    train(tmp_path, [*torchrun(4), HERE / "on_cpus.py"], "--fsdp", 2, "--max_norm", 0.1, **environ)
    assert told(tmp_path, 0)["kind"] == "DistributedType.FSDP"
    check(tmp_path, ranks=2, max_norm=0.1)


@pytest.mark.parametrize("way", ["deepspeed", "torch"])
def test_a_run_resumes_bit_for_bit_in_the_midst_of_an_epoch(way: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "ds.json", STREAMING, stage=1)
    environ = {"DSX_CONFIG": str(config)}
    if way == "deepspeed":
        environ = {
            "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config)
        }  # fmt: skip
    train(tmp_path, torchrun(2), "--steps_between", 14, **environ)
    whole = [told(tmp_path, m) for m in range(2)]
    assert whole[0]["own"] == whole[1]["own"]
    if way == "deepspeed":  # killed behind Accelerate's part as it saved there again
        for m in range(2):
            own, newer = (tmp_path / f"out/step_{step}/cluster_{m}" for step in (14, 28))
            (own / "accelerate").rename(own / "accelerate.replaced")
            shutil.copytree(newer / "accelerate", own / "accelerate")
    train(tmp_path, torchrun(2), "--resume", "out/step_14", **environ)
    for m in range(2):
        resumed = told(tmp_path, m)
        assert len(resumed["read"]) == 18 and resumed["read"] == whole[m]["read"][14:]
        for name in ("own", "after", "seen", "steps"):
            assert resumed[name] == whole[m][name]
        assert resumed["rates"] == whole[m]["rates"][14:]
        assert resumed["metrics"][-1] == whole[m]["metrics"][-1]
    shutil.rmtree(tmp_path / "out" / "step_28" / "cluster_1")  # killed while it saved
    ((status, output),) = run(
        ([*torchrun(2), SCRIPT, "--resume", "out/step_28"], environ), at=tmp_path
    )
    assert status != 0
    assert "no complete checkpoint 'accelerate' that all clusters hold under out/step_28" in output


def test_one_clusters_trigger_stops_all_and_a_stream_is_divided(tmp_path: Path) -> None:
    """With names and a limit of Accelerate's for what is saved."""
    block = {"DSX_CONFIG": str(write_block(tmp_path / "dsx.json", STREAMING))}
    own = ["--stream", "--stops_here", "{cluster_id}", "--automatic", "--steps_between", 2]
    train(tmp_path, torchrun(2), *own, **block)
    found = [told(tmp_path, m) for m in range(2)]
    assert 5 <= found[0]["steps"] == found[1]["steps"] <= 5 + 2 * INTERVAL + 2
    for m in range(2):
        order = [number for batch in found[m]["read"] for number in batch]
        assert order == list(range(m, SAMPLES, 2))[: len(order)]
        assert found[m]["metrics"][-1]["count"] == HELD_OUT
        assert found[m]["after"] == found[0]["after"]
        kept = sorted((tmp_path / "out" / "checkpoints").glob(f"*/cluster_{m}"))
        count = found[m]["steps"] // 2  # saved; two are kept
        names = [f"checkpoint_{count - 2}", f"checkpoint_{count - 1}"]
        assert [path.parent.name for path in kept] == names


def test_training_on_what_all_clusters_read_is_refused_by_name(tmp_path: Path) -> None:
    block = {"DSX_CONFIG": str(write_block(tmp_path / "dsx.json", DILOCO))}
    ((status, output),) = run(([*torchrun(2), SCRIPT, "--in_order"], block), at=tmp_path)
    assert status != 0
    assert (
        "accelerator.backward() inside a loop over a DataLoader that reads the whole of" in output
    )
