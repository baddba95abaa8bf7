"""The Megatron example as it is started: results, a resume, virtual stages and slices."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dsx.data import build
from tests.distributed import free_port

ROOT = Path(__file__).parents[2]
SMALL = ["--hidden-size", "64", "--seq-length", "32", "--eval-iters", "4"]
LAYOUTS = {
    "virtual": ["--pipeline-model-parallel-size", "2"]
    + ["--num-layers-per-virtual-pipeline-stage", "1"],
    "slices": ["--tensor-model-parallel-size", "2", "--bf16"],
    "sharded": ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="no megatron-core",
    ),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    build([Path(json.__file__).parents[1] / "asyncio", ROOT / "dsx"], path)
    return path


def train(data: Path, run: Path, *arguments: str) -> list[float]:
    """Return the losses of cluster 0's steps."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command += ["--master-port", str(free_port()), "scripts/pretrain_gpt_megatron.py"]
    command += ["--dsx-config", "configs/quickstart_megatron.json", "--data-path", str(data)]
    command += ["--run-dir", str(run), "--lr-warmup-iters", "4", *SMALL, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "no GPU: megatron-core runs on the CPU" in done.stdout
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "step"]


def test_a_pipeline_trains_and_resumes(data: Path, tmp_path: Path) -> None:
    stages = ["--pipeline-model-parallel-size", "2", "--save-interval", "11"]
    whole = train(data, tmp_path / "whole", "--train-iters", "24", *stages)
    assert len(whole) == 24 and whole[-1] < 0.9 * whole[0]
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["val_loss_average"] < 1.05 * min(summary["val_loss_clusters"])
    assert (tmp_path / "whole" / "plot.png").read_bytes().startswith(b"\x89PNG")
    model = load_file(tmp_path / "whole" / "model.safetensors")
    assert "decoder.layers.3.mlp.linear_fc1.weight" in model
    resumed = train(
        data, tmp_path / "resumed", "--train-iters", "24", *stages,
        "--load", str(tmp_path / "whole" / "checkpoints"), "--ckpt-step", "11",
    )  # fmt: skip
    assert resumed == whole[11:]  # a fragment was in flight at step 11
    again = load_file(tmp_path / "resumed" / "model.safetensors")
    assert all(again[name].equal(weight) for name, weight in model.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_train(layout: str, data: Path, tmp_path: Path) -> None:
    losses = train(data, tmp_path, "--train-iters", "22", *LAYOUTS[layout])
    assert len(losses) == 22 and losses[-1] < 0.9 * losses[0]
