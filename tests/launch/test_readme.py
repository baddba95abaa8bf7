"""The README's examples run as printed."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_script_of_five_lines(tmp_path: Path) -> None:
    (script,) = [s for s in PYTHON if "dsx.initialize" in s]
    (command,) = re.findall(r"    (deepspeed --num_gpus 2 train.py)\n", README)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }
    done = subprocess.run(
        command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "runs" / "minimal" / "metrics.jsonl").read_text().splitlines()
    first, kinds = json.loads(lines[0]), [json.loads(line)["kind"] for line in lines]
    assert (first["kind"], first["preset"], first["num_clusters"]) == ("start", "diloco", 2)
    assert first["axes"]["schedule"]["interval"] == 10 and first["ranks"] == 1
    sizes = [[math.prod(shape) for shape in of.values()] for of in first["parameters"]]
    syncs = [json.loads(line) for line in lines if '"kind": "sync"' in line]
    assert {sync["numel"] for sync in syncs} == {sum(sizes[0])}
    assert all(0 < sync["coding_seconds"] < sync["transfer_seconds"] for sync in syncs)
    assert kinds.count("step") == 4096 // 2 // 16  # every second sample, 16 at a time
    assert kinds.count("sync") == kinds.count("step") // 10
    assert "do all clusters read the same batches" not in done.stderr


def test_the_simulation_in_a_few_lines(tmp_path: Path) -> None:
    (script,) = [s for s in PYTHON if "SimulatedClusters" in s]
    assert len([line for line in script.splitlines() if line]) <= 16
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (printed,) = re.findall(r"prints `(loss .*?)`", README)
    assert re.sub(r"loss [\d.]+", "", done.stdout.strip()) == re.sub(r"loss [\d.]+", "", printed)
    loss, expected = (float(re.findall(r"loss ([\d.]+)", s)[0]) for s in (done.stdout, printed))
    assert abs(loss - expected) < 0.02


def test_the_block_it_prints_is_the_one_in_the_file() -> None:
    (block,) = re.findall(r"```json\n\"dsx\": (.*?)\n```", README, re.DOTALL)
    config = json.loads((ROOT / "configs" / "minimal.json").read_text())
    assert json.loads(block) == config["dsx"]


def test_every_file_it_names_exists() -> None:
    for name in re.findall(r"`?((?:configs|scripts|dsx)/[\w/]+\.(?:json|py|sh))", README):
        assert (ROOT / name).exists(), name
