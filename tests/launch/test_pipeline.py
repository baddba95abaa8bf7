"""The example script as a pipeline: the losses of the plain one, a model that loads, a resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dsx.data import build
from tests.distributed import free_port
from tests.installed import needs

pytestmark = needs("deepspeed", "megatron")

ROOT = Path(__file__).parents[2]
SMALL = ["--hidden", "64", "--sequence-length", "32", "--validation-batches", "8"]


def train(base: Path, run: str, num_ranks: int, *arguments: str) -> list[float]:
    """Return the losses of cluster 0's steps."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_EXTENSIONS_DIR": str(base / "extensions"),
    }
    command = ["deepspeed", "--num_gpus", str(num_ranks), "--master_port", str(free_port())]
    command += ["scripts/pretrain_gpt_deepspeed.py", "--deepspeed_config"]
    command += ["configs/quickstart_pipeline.json", "--data", str(base / "data"), *SMALL]
    command += ["--run-dir", str(base / run), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = map(json.loads, (base / run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "step"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pipeline_trains_as_the_plain_script(tmp_path: Path) -> None:
    build([Path(json.__file__).parents[1] / "asyncio", ROOT / "dsx"], tmp_path / "data")
    stages = ["--pipeline-stages", "2"]
    plain = train(tmp_path, "plain", 2, "--steps", "9")
    piped = train(tmp_path, "piped", 4, "--steps", "9", *stages)
    assert piped == pytest.approx(plain, abs=1e-5)  # the first launch comes at step 10
    scores = []
    for run in ("plain", "piped"):
        scores.append(json.loads((tmp_path / run / "summary.json").read_text())["val_loss_average"])
    assert scores[1] == pytest.approx(scores[0], abs=1e-5)
    weights = [load_file(tmp_path / run / "model.safetensors") for run in ("plain", "piped")]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert (weights[1][name] - weight).abs().max() < 1e-4, name
    resumed = train(tmp_path, "piped", 4, "--steps", "13", "--resume", *stages)
    assert resumed[:9] == piped and len(resumed) == 13
