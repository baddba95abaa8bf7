"""The quickstart itself: what it writes, and that the average is the best model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dsx.examples.gpt import GPT, GPTConfig
from tests.distributed import the_default_port
from tests.installed import needs

pytestmark = needs("deepspeed", "megatron")

ROOT = Path(__file__).parents[2]


def run_quickstart(*arguments: str, timeout_seconds: int) -> str:
    command = ["bash", str(ROOT / "scripts" / "quickstart.sh"), *arguments]
    with the_default_port():
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def check_run(run: Path, steps: int) -> dict[str, object]:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["bytes_sent"] > 0 and summary["tokens_per_second"] > 0
    assert 0.5 < summary["utilization"] <= 1
    assert (run / "plot.png").read_bytes().startswith(b"\x89PNG")
    for name in ("metrics.jsonl", "metrics.cluster_1.jsonl"):
        kinds = [json.loads(line)["kind"] for line in (run / name).read_text().splitlines()]
        assert kinds.count("step") == steps and kinds.count("sync") > 0
    model = GPT(GPTConfig(**json.loads((run / "model.json").read_text())))
    model.load_state_dict(load_file(run / "model.safetensors"))
    assert all(p.isfinite().all() for p in model.parameters())
    assert 2e6 < sum(p.numel() for p in model.parameters()) < 5e6
    return summary


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quickstart() -> None:
    printed = run_quickstart(timeout_seconds=600)
    figure = Path(printed.split("figure: ")[1].splitlines()[0])
    summary = check_run(ROOT / figure.parent, 160)  # another one where runs/quickstart is used
    assert summary["val_loss_average"] <= min(summary["val_loss_clusters"])  # type: ignore[type-var]
    assert summary["val_loss_average"] < 0.75 * summary["unigram_entropy"]  # type: ignore[operator]


@pytest.mark.slow
def test_a_short_run_resumes(tmp_path: Path) -> None:
    short = ["--hidden", "256", "--sequence-length", "16", "--validation-batches", "1"]
    short += ["--run-dir", str(tmp_path)]
    run_quickstart(*short, "--steps", "6", timeout_seconds=150)
    check_run(tmp_path, 6)
    out = run_quickstart(*short, "--steps", "8", "--resume", timeout_seconds=150)
    assert "step    8/8" in out
    check_run(tmp_path, 8)
