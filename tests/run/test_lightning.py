"""Lightning's Trainer under `python -m dsx.run`: an unmodified script, beside plain torch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsx.telemetry.report import summarize
from tests.distributed import free_port
from tests.installed import needs
from tests.run.launching import run, start, wait_for

pytestmark = [needs("lightning", "pytorch_lightning"), pytest.mark.ci]

SCRIPT = Path(__file__).with_name("train_with_lightning.py")
SHIM = Path(__file__).with_name("cpu_shim")
BATCH, STEPS, INTERVAL, SIZE, SAMPLES = 2, 8, 4, 6, 48
LOOKS = 6  # three samples, read twice, tell whether the clusters have the same data
DILOCO = {"preset": "diloco", "schedule": {"interval": INTERVAL}}
STREAMING = {
    "preset": "streaming_diloco",
    "schedule": {"interval": INTERVAL},
    "fragments": {"num_fragments": 2},
    "delay": {"steps": 1},
}


def write_config(at: Path, block: dict[str, Any], **more: Any) -> Path:
    """Write a DeepSpeed JSON, whose block is read from it whatever the strategy."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "dsx": {**block, "clusters": {"num_clusters": 2, **more}},
    }
    path = at / "ds.json"
    path.write_text(json.dumps(config))
    return path


def launch(count: int) -> list[Any]:
    own = ["--nproc-per-node", count, "--master-port", free_port(), "-m", "dsx.run"]
    return [sys.executable, "-m", "torch.distributed.run", *own]


def environ() -> dict[str, str]:
    return {"PYTHONPATH": f"{Path(__file__).parents[2]}:{SHIM}"}


def options(config: Path, **more: Any) -> list[str]:
    given = {"config": config, "cluster": "{cluster_id}", **more}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def train(at: Path, *arguments: Any, ranks: int = 4) -> str:
    command = [*launch(ranks), f"--dsx-config={at / 'ds.json'}", SCRIPT, *arguments]
    ((status, output),) = run((command, environ()), at=at)
    assert status == 0, output
    return output


def told(at: Path, cluster: int, rank: int = 0) -> dict[str, Any]:
    return json.loads((at / "runs" / f"told_{cluster}" / f"{rank}.json").read_text())


def orders_of(at: Path) -> list[list[int]]:
    """Return what each cluster has read, by step: its ranks' batches in turn."""
    ranks = [[told(at, m, r)["read"][LOOKS:] for r in range(2)] for m in range(2)]
    return [
        [i for step in range(STEPS) for one in of for i in one[step * BATCH : (step + 1) * BATCH]]
        for of in ranks
    ]


def samples(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, SIZE, generator=torch.Generator().manual_seed(seed))
    return x, x.sin().sum(1, keepdim=True)


def diloco(orders: list[list[int]]) -> tuple[dict[str, Tensor], list[float]]:
    """Train in plain torch; return the anchor, and the held-out loss of each round's."""
    (x, y), (held_out, answers) = samples(1), samples(2)
    models = []
    for _ in orders:
        torch.manual_seed(0)
        first, second = nn.Linear(SIZE, 16), nn.Linear(16, 1)
        model = nn.Sequential()
        model.first, model.tanh, model.second = first, nn.Tanh(), second
        models.append(model)
    inner = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    rates = [torch.optim.lr_scheduler.StepLR(one, 3, 0.5) for one in inner]
    anchor = {n: p.detach().clone() for n, p in models[0].named_parameters()}
    momentum = {n: torch.zeros_like(p) for n, p in anchor.items()}
    losses: list[float] = []
    per_step = 2 * BATCH
    for step in range(1, STEPS + 1):
        for model, optimizer, rate, order in zip(models, inner, rates, orders, strict=True):
            taken = order[(step - 1) * per_step : step * per_step]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[taken]), y[taken]).backward()
            optimizer.step()
            rate.step()
        if step % INTERVAL == 0:
            for name, value in anchor.items():
                local = [dict(model.named_parameters())[name].detach() for model in models]
                mean = sum(value - one for one in local) / len(orders)
                momentum[name] = 0.9 * momentum[name] + mean
                value -= 0.7 * (mean + 0.9 * momentum[name])
                for one in local:
                    one.copy_(value)
            with torch.no_grad():
                losses.append(nn.functional.mse_loss(models[0](held_out), answers).item())
    return anchor, losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed"])
def test_an_unmodified_script_is_diloco_and_resumes_bit_for_bit(
    tmp_path: Path, strategy: str
) -> None:
    """Data is cut once, validation is whole and of the average, and what is saved is it."""
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
    config = write_config(tmp_path, DILOCO)
    given = options(config, strategy=strategy, every=4, val_every=4)
    train(tmp_path, *given)
    clusters = [told(tmp_path, m) for m in range(2)]
    orders = orders_of(tmp_path)
    epoch = SAMPLES // 2
    assert sorted(orders[0][:epoch] + orders[1][:epoch]) == list(range(SAMPLES))
    anchor, losses = diloco(orders)
    for cluster in clusters:
        assert (cluster["steps"], cluster["world"]) == (STEPS, 2)
        assert cluster["losses"][:2] == pytest.approx(losses, abs=1e-5)
        assert cluster["after"][0]["val_loss"] == pytest.approx(losses[-1], abs=1e-5)
        assert cluster["weights"] == clusters[0]["weights"]
        for name, value in cluster["weights"].items():
            torch.testing.assert_close(torch.tensor(value), anchor[name], rtol=0, atol=2e-6)
    if strategy == "ddp":  # a file, which every Lightning loads
        for place in ("final.ckpt", "runs/ck/cluster_1/last.ckpt"):
            saved = torch.load(tmp_path / place, weights_only=False)["state_dict"]
            assert {n: t.tolist() for n, t in saved.items()} == clusters[0]["weights"]

    folder = tmp_path / "runs" / "ck" / "cluster_1"  # killed while it saved
    suffix = ".dsx" if strategy == "ddp" else ""
    for name in ("last", "epoch=1-step=8"):
        for path in folder.glob(f"{name}.ckpt{suffix}*"):
            shutil.rmtree(path)
    (tmp_path / "runs" / "told_0" / "0.json").unlink()
    train(tmp_path, *given, "--resume", "last")
    again = [told(tmp_path, m) for m in range(2)]
    assert [len(one["read"]) for one in again] == [LOOKS + STEPS * BATCH] * 2  # passed over
    assert [one["losses"][0] for one in again] == [clusters[0]["losses"][1]] * 2
    assert [one["weights"] for one in again] == [clusters[0]["weights"]] * 2


def test_one_clusters_stop_is_all_clusters_and_they_keep_the_same_best(tmp_path: Path) -> None:
    """One device per cluster, each with a launcher of its own, whose evaluations differ."""
    place = f"tcp://127.0.0.1:{free_port()}"
    config = write_config(tmp_path, STREAMING)
    given = options(
        config, package="pytorch_lightning", strategy="auto", devices=1, max_steps=40, val_every=2,
        every=2, by="score", top_k=2, differs=1, stops_at=9,
    )  # fmt: skip
    more = [f"--dsx-config={config}", f"--dsx-metrics-dir={tmp_path / 'record'}", SCRIPT, *given]
    commands = [
        ([*launch(1), f"--dsx-cluster-id={m}", *more], {"DSX_RENDEZVOUS": place}) for m in range(2)
    ]
    for status, output in run(*commands, at=tmp_path):
        assert status == 0, output
    clusters = [told(tmp_path, m) for m in range(2)]
    assert clusters[0]["steps"] == clusters[1]["steps"]
    assert 9 <= clusters[0]["steps"] <= 9 + 2 * INTERVAL + 2
    assert clusters[0]["scores"] == clusters[1]["scores"] != {}
    assert len(clusters[0]["scores"]) == 2
    assert clusters[0]["weights"] == clusters[1]["weights"]
    for m, cluster in enumerate(clusters):
        kept = {path.name for path in (tmp_path / "runs" / "ck" / f"cluster_{m}").glob("epoch*")}
        assert kept == {n for name in cluster["scores"] for n in (name, f"{name}.dsx")}
        assert Path(cluster["best"]).parent.name == f"cluster_{m}"
        log = tmp_path / "runs" / "lightning_logs" / "version_0" / f"cluster_{m}"
        assert any(b"dsx/step/utilization" in file.read_bytes() for file in log.iterdir()), log
    records = summarize(tmp_path / "record").clusters
    assert [cluster.steps for cluster in records] == [clusters[0]["steps"]] * 2


@pytest.mark.parametrize("strategy", ["ddp", "deepspeed"])
def test_a_run_that_is_told_to_end_saves_as_lightning_does_and_goes_on(
    tmp_path: Path, strategy: str
) -> None:
    """On SIGTERM to one cluster's launcher; each cluster at a step of its own."""
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
    place = {"DSX_RENDEZVOUS": f"tcp://127.0.0.1:{free_port()}", **environ()}
    config = write_config(tmp_path, STREAMING)
    given = options(config, strategy=strategy, devices=1, max_steps=30, every=50)
    commands = [
        [*launch(1), f"--dsx-cluster-id={m}", f"--dsx-config={config}", SCRIPT, *given]
        for m in range(2)
    ]
    logs = [tmp_path / f"first{m}" for m in range(2)]
    slow = ["--step_seconds", 0.2]
    first = [start([*c, *slow], log, **place) for c, log in zip(commands, logs, strict=True)]
    try:
        wait_for(first[0], logs[0], "AT 6", 100)
        first[1].terminate()
        assert all(process.wait(60) != 0 for process in first)
    finally:
        for process in first:
            process.kill()
    for log in logs:
        assert "saved in" in log.read_text(), log.read_text()
    again = [([*c, "--resume", "last"], place) for c in commands]
    for status, output in run(*again, at=tmp_path):
        assert status == 0, output
        assert "Restored all states from the checkpoint at" in output
    clusters = [told(tmp_path, m) for m in range(2)]
    assert [one["steps"] for one in clusters] == [30, 30]
    assert clusters[0]["weights"] == clusters[1]["weights"]


def test_several_optimizers_by_hand_and_a_stream(tmp_path: Path) -> None:
    config = write_config(tmp_path, STREAMING)
    train(tmp_path, *options(config, data="stream"), "--manual")
    clusters = [told(tmp_path, m) for m in range(2)]
    assert clusters[0]["weights"] == clusters[1]["weights"]
    assert [cluster["steps"] for cluster in clusters] == [STEPS, STEPS]


def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    config = write_config(tmp_path, DILOCO)
    command = [*launch(2), f"--dsx-config={config}", SCRIPT]
    given = options(config, devices=1, callback="LearningRateFinder")
    ((status, output),) = run(([*command, *given], environ()), at=tmp_path)
    assert status != 0
    assert "dsx.run: cluster 0, rank 0: the callback LearningRateFinder is not served" in output
