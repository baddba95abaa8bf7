"""scripts/vision.py: all clusters in one process, and each in its own, to the same bits."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.distributed import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "vision.py"
SHORT = ["--clusters", "2", "--epochs", "2", "--width", "8", "--batch-size", "32"]


@pytest.fixture
def vision() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vision", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["vision"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """DreamDDP at given times, so that a run repeats: two layers in the first step, one further."""
    schedule = {
        "interval": 3,
        "when": "after",
        "backward_seconds": [1.0, 1.0, 1.0],
        "transfer_seconds": [2.0, 1.0, 1.0],
    }
    clusters = {"num_clusters": 4}
    file = tmp_path / "dreamddp.json"
    block = {"preset": "dreamddp", "clusters": clusters, "schedule": schedule}
    file.write_text(json.dumps({"dsx": block}))
    return file


def test_images_that_are_missing_are_asked_for(
    vision: ModuleType, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    assert vision.main(["--config", str(config), "--simulate"]) == 2
    told = capsys.readouterr().err
    assert "needs scikit-learn" in told and 'pip install "dsx-train[vision]"' in told


def test_without_a_launcher_it_says_how_to_start(
    vision: ModuleType, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    arguments = vision.parse_arguments(["--config", str(config)])
    with pytest.raises(ValueError, match="give --simulate .* or start it with torchrun"):
        vision.start(arguments, vision.Digits(torch.zeros(64, 65, dtype=torch.long)))


def test_statistics_of_the_norms_are_those_of_the_average(vision: ModuleType) -> None:
    """Whatever a cluster's own were: the same average gets the same ones everywhere."""
    generator = torch.Generator().manual_seed(0)
    images = vision.Digits(torch.randint(0, 10, (48, 65), generator=generator))
    model, other = (vision.ResNet(vision.ResNetConfig(width=8), seed=1) for _ in range(2))
    other(*vision.images_and_labels(images.rows[:7]))  # its statistics move, its weights do not
    assert not torch.equal(model.stem_norm.running_mean, other.stem_norm.running_mean)
    assert vision.evaluate(model, images, images) == vision.evaluate(other, images, images)
    inputs, _ = vision.images_and_labels(images.rows)
    mean = model.stem(inputs).mean(dim=(0, 2, 3))
    torch.testing.assert_close(model.stem_norm.running_mean, mean)
    assert model.training


@pytest.mark.ci
def test_two_launches_train_what_one_process_simulates(config: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--config", str(config), *SHORT]

    def run(name: str, *given: str, **added: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, "--out", str(tmp_path / name), *given], env={**environment, **added},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    meet = f"tcp://127.0.0.1:{free_port()}"
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    launched = [
        run("launched.pt", "--dsx-rendezvous", meet, "--dsx-cluster-id", str(cluster),
            MASTER_PORT=str(free_port()), **alone)
        for cluster in range(2)
    ]  # fmt: skip
    simulated = run("simulated.pt", "--simulate")
    (first, silent), (one,) = [
        [process.communicate(timeout=240)[0] for process in processes]
        for processes in (launched, [simulated])
    ]
    assert [p.returncode for p in (*launched, simulated)] == [0, 0, 0]
    assert silent == ""

    def shown(text: str) -> list[str]:
        return re.findall(r"epoch .*?step \d+|held-out.*%", text)

    assert shown(first) == shown(one) and len(shown(one)) == 4
    accuracies = [float(text) for text in re.findall(r"accuracy ([\d.]+)%", one)]
    assert accuracies[-1] > 80
    weights = [torch.load(tmp_path / name) for name in ("launched.pt", "simulated.pt")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
