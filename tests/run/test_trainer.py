"""The Hugging Face Trainer under `python -m dsx.run`: an unmodified script, beside plain torch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.telemetry.report import summarize
from dsx.telemetry.run_folder import read_about
from tests.distributed import free_port
from tests.installed import needs
from tests.run.launching import run, start, wait_for

pytestmark = [needs("deepspeed", "transformers", "accelerate", "datasets"), pytest.mark.ci]

SCRIPT = Path(__file__).with_name("train_with_trainer.py")
BATCH, STEPS, INTERVAL, LR = 2, 8, 4, 0.01
LOOKS = 6  # three samples, read twice, tell whether the clusters have the same data
DILOCO = {"preset": "diloco", "schedule": {"interval": INTERVAL}}
STREAMING = {
    "preset": "streaming_diloco",
    "schedule": {"interval": INTERVAL},
    "fragments": {"num_fragments": 2},
    "delay": {"steps": 1},
}


def write_config(path: Path, block: dict[str, Any], stage: int = 1, **more: Any) -> Path:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "zero_optimization": {"stage": stage},
        "dsx": {**block, "clusters": {"num_clusters": 2}},
        **more,
    }
    path.write_text(json.dumps(config))
    return path


def options(config: Path, **more: Any) -> list[str]:
    given = {
        "deepspeed": config, "output_dir": "runs", "out": "final", "max_steps": STEPS,
        "per_device_train_batch_size": BATCH, "learning_rate": LR, "max_grad_norm": 0,
        "lr_scheduler_type": "constant", "logging_steps": 2, "report_to": "none",
        "disable_tqdm": True, "seed": 0, "save_strategy": "no", "dataloader_pin_memory": False,
        **more,
    }  # fmt: skip
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def launch(count: int = 2) -> list[Any]:
    own = ["--nproc-per-node", count, "--master-port", free_port(), "-m", "dsx.run"]
    return [sys.executable, "-m", "torch.distributed.run", *own]


def train(at: Path, *arguments: Any, ranks: int = 2) -> str:
    ((status, output),) = run(([*launch(ranks), SCRIPT, *arguments], {}), at=at)
    assert status == 0, output
    return output


def told(at: Path, cluster: int, rank: int = 0) -> dict[str, Any]:
    return json.loads((at / "runs" / f"cluster_{cluster}" / f"told.{rank}.json").read_text())


def weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def final(at: Path) -> dict[str, Tensor]:
    """Return the model that both clusters have saved, in their own folder and in a common one."""
    models = [weights(at / "runs" / f"cluster_{m}") for m in range(2)] + [weights(at / "final")]
    for model in models[1:]:
        assert model.keys() == models[0].keys()
        assert all(torch.equal(tensor, models[0][name]) for name, tensor in model.items())
    return models[0]


def diloco(orders: list[list[int]]) -> tuple[dict[str, Tensor], list[float]]:
    """Train in plain torch; return the anchor, and the held-out loss of each round's."""
    from tests.run.train_with_trainer import Sentences, make_model

    data, held_out = Sentences(1), Sentences(2).x
    models = [make_model() for _ in orders]
    inner = [torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0) for model in models]
    anchor = {n: p.detach().clone() for n, p in models[0].named_parameters()}
    momentum = {n: torch.zeros_like(p) for n, p in anchor.items()}
    losses: list[float] = []
    for step in range(1, STEPS + 1):
        for model, optimizer, order in zip(models, inner, orders, strict=True):
            x = data.x[order[(step - 1) * BATCH : step * BATCH]]
            optimizer.zero_grad()
            model(input_ids=x, labels=x).loss.backward()
            optimizer.step()
        if step % INTERVAL == 0:
            for name, value in anchor.items():
                local = [dict(model.named_parameters())[name].detach() for model in models]
                mean = sum(value - one for one in local) / len(orders)
                momentum[name] = 0.9 * momentum[name] + mean
                value -= 0.7 * (mean + 0.9 * momentum[name])
                for one in local:
                    one.copy_(value)
            with torch.no_grad():
                losses.append(models[0](input_ids=held_out, labels=held_out).loss.item())
    return anchor, losses


def test_an_unmodified_script_is_diloco_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Its data is cut once, evaluation is whole and of the average, and what is saved is it."""
    config = write_config(tmp_path / "ds.json", DILOCO)
    more = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    given = options(config, per_device_eval_batch_size=32, weight_decay=0, **more)
    train(tmp_path, *given)
    clusters = [told(tmp_path, m) for m in range(2)]
    orders = [cluster["read"][LOOKS : LOOKS + STEPS * BATCH] for cluster in clusters]
    assert sorted(orders[0] + orders[1]) == list(range(32))
    assert [cluster["steps"] for cluster in clusters] == [STEPS, STEPS]
    assert all(set(cluster["evaluated"]) == set(range(32)) for cluster in clusters)
    anchor, losses = diloco(orders)
    found = final(tmp_path)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, anchor[name], rtol=0, atol=5e-6)
    for cluster in clusters:
        seen = [cluster["losses"]["4"], cluster["losses"]["8"]]
        assert seen == pytest.approx(losses, abs=1e-5)
        assert cluster["after"] == pytest.approx(losses[-1], abs=1e-5)
    assert clusters[0]["losses"] == clusters[1]["losses"]

    shutil.rmtree(tmp_path / "runs" / "cluster_1" / "checkpoint-8")  # killed while it saved
    (tmp_path / "runs" / "cluster_0" / "model.safetensors").unlink()
    output = train(tmp_path, *given, "--resume_from_checkpoint", "runs/checkpoint-8")
    assert "checkpoint-8 is not complete in all clusters: they go on from" in output
    again = final(tmp_path)
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())


def test_one_clusters_stop_is_all_clusters_and_the_best_is_loaded(tmp_path: Path) -> None:
    block = {**STREAMING, "metrics": {"dir": "record"}}
    config = write_config(tmp_path / "ds.json", block, stage=2)
    more = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "data": "hub",
        "stops_in": "{cluster_id}", "stops_at": 5, "save_total_limit": 2,
        "max_steps": 40, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    train(tmp_path, *options(config, **more))
    clusters = [told(tmp_path, m) for m in range(2)]
    assert clusters[0]["steps"] == clusters[1]["steps"] < 40
    assert 5 <= clusters[0]["steps"] <= 5 + 2 * INTERVAL + 2
    assert clusters[0]["losses"] == clusters[1]["losses"]
    best = min(clusters[0]["losses"].items(), key=lambda entry: entry[1])
    for m, cluster in enumerate(clusters):
        assert cluster["best"] == f"runs/cluster_{m}/checkpoint-{best[0]}"
        assert cluster["after"] == best[1]
        assert cluster["norm"] == clusters[0]["norm"]
        kept = list((tmp_path / "runs" / f"cluster_{m}").glob("checkpoint-*"))
        assert len(kept) == 2
    final(tmp_path)
    records = summarize(tmp_path / "record").clusters
    assert [cluster.steps for cluster in records] == [clusters[0]["steps"]] * 2
    for about in read_about(tmp_path / "record").values():
        assert about["starts"][-1]["end"]["how"] == "finished"


def test_a_stream_under_zero_3_with_a_launcher_per_cluster(tmp_path: Path) -> None:
    place = f"tcp://127.0.0.1:{free_port()}"
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    config = write_config(tmp_path / "ds.json", STREAMING, zero_optimization=zero)
    given = options(config, data="stream", save_strategy="steps", save_steps=4)
    common = {"DSX_RENDEZVOUS": place}
    commands = [([*launch(1), "--dsx-cluster-id", m, SCRIPT, *given], common) for m in range(2)]
    for status, output in run(*commands, at=tmp_path):
        assert status == 0, output
    orders = [told(tmp_path, m)["read"] for m in range(2)]
    # whoever reads a stream reads all of it; what is trained on is every second one
    assert [told(tmp_path, m)["steps"] for m in range(2)] == [STEPS, STEPS]
    assert orders[0] == orders[1]
    assert told(tmp_path, 0)["norm"] == told(tmp_path, 1)["norm"]
    final(tmp_path)


def test_a_run_that_is_told_to_end_saves_as_the_trainer_does_and_goes_on(tmp_path: Path) -> None:
    """On SIGTERM to one rank's launcher; each cluster at a step of its own."""
    place = f"tcp://127.0.0.1:{free_port()}"
    config = write_config(tmp_path / "ds.json", STREAMING)
    given = options(config, max_steps=40)
    commands = [[*launch(1), f"--dsx-cluster-id={m}", SCRIPT, *given] for m in range(2)]
    logs = [tmp_path / f"first{m}" for m in range(2)]
    slow = ["--step_seconds", 0.2]
    environ = {"DSX_RENDEZVOUS": place}
    first = [start([*c, *slow], log, **environ) for c, log in zip(commands, logs, strict=True)]
    try:
        wait_for(first[0], logs[0], "AT 6", 100)
        first[1].terminate()
        assert all(process.wait(60) != 0 for process in first)
    finally:
        for process in first:
            process.kill()
    for m, log in enumerate(logs):
        assert "saved in" in log.read_text(), log.read_text()
        folders = list((tmp_path / "runs" / f"cluster_{m}").glob("checkpoint-*"))
        assert len(folders) == 1 and 6 <= int(folders[0].name.split("-")[1]) < 40
    again = [([*c, "--resume_from_checkpoint", "True"], environ) for c in commands]
    for status, output in run(*again, at=tmp_path):
        assert status == 0, output
    assert [told(tmp_path, m)["steps"] for m in range(2)] == [40, 40]
    final(tmp_path)


def test_what_a_trainer_cannot_do_here_is_refused_by_name(tmp_path: Path) -> None:
    config = write_config(tmp_path / "ds.json", DILOCO)
    given = options(config, auto_find_batch_size=True)
    ((status, output),) = run(([*launch(), SCRIPT, *given], {}), at=tmp_path)
    assert status != 0
    assert "TrainingArguments(auto_find_batch_size=True) finds a size for each rank" in output
