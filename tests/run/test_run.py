"""`python -m dsx.run` over a script without dsx, by the launchers, beside DiLoCo in plain torch."""

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
from tests.run.launching import run
from tests.run.train_with_deepspeed import BATCH, SAMPLES, Samples, make_model

pytestmark = [needs("deepspeed"), pytest.mark.ci]

SCRIPT = Path(__file__).with_name("train_with_deepspeed.py")
LR, INTERVAL = 0.01, 4
BLOCK = {"preset": "diloco", "schedule": {"interval": INTERVAL}}


def write_config(path: Path, block: dict[str, Any] | None) -> Path:
    adam = {"lr": LR, "torch_adam": True, "weight_decay": 0.0}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": adam},
    }
    path.write_text(json.dumps(config if block is None else {**config, "dsx": block}))
    return path


def diloco(orders: list[list[int]]) -> dict[str, Tensor]:
    """Train each cluster on its samples in plain torch; return the anchor of the last round."""
    data, count = Samples(), len(orders)
    models = [make_model() for _ in orders]
    inner = [torch.optim.Adam(model.parameters(), lr=LR) for model in models]
    anchor = {n: p.detach().clone() for n, p in models[0].named_parameters()}
    momentum = {n: torch.zeros_like(p) for n, p in anchor.items()}
    for step in range(1, len(orders[0]) // BATCH + 1):
        for model, optimizer, order in zip(models, inner, orders, strict=True):
            batch = [data[i] for i in order[(step - 1) * BATCH : step * BATCH]]
            x, y = torch.stack([b[1] for b in batch]), torch.stack([b[2] for b in batch])
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
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


def saved_model(out: Path, cluster: int) -> dict[str, Tensor]:
    path = out / f"cluster_{cluster}" / "last" / "mp_rank_00_model_states.pt"
    return torch.load(path, weights_only=False)["module"]


def told(tmp_path: Path, cluster: int, rank: int = 0) -> dict[str, Any]:
    return json.loads((tmp_path / f"out_{cluster}.{rank}.json").read_text())


def check(tmp_path: Path, is_synchronous_order: bool) -> None:
    """Compare what the run has left with the oracle, and what it has read with one world's."""
    orders = [told(tmp_path, cluster)["read"] for cluster in range(2)]
    assert sorted(orders[0] + orders[1]) == list(range(SAMPLES))
    assert [told(tmp_path, m)["validation"] for m in range(2)] == [SAMPLES, SAMPLES]
    assert [told(tmp_path, m)["world"] for m in range(2)] == [1, 1]
    if is_synchronous_order:
        whole = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0)).tolist()
        assert orders == [whole[0::2], whole[1::2]]
    expected = diloco(orders)
    for cluster in range(2):
        found = saved_model(tmp_path / f"out_{cluster}", cluster)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-7)
    both = [saved_model(tmp_path / f"out_{cluster}", cluster) for cluster in range(2)]
    assert all(torch.equal(both[0][name], both[1][name]) for name in expected)


OUT = ["--out", "out_{cluster_id}"]


MPIRUN = pytest.param(
    "mpirun", marks=pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun is installed")
)


@pytest.mark.parametrize("way", ["deepspeed", "torchrun", MPIRUN])
def test_one_launcher_makes_clusters_of_a_script_without_dsx(way: str, tmp_path: Path) -> None:
    block = {**BLOCK, "clusters": {"num_clusters": 2}}
    config = ["--deepspeed_config", write_config(tmp_path / "ds.json", block)]
    if way == "deepspeed":
        launch = ["deepspeed", "--num_gpus", 2, "--master_port", free_port(), "--module", "dsx.run"]
    elif way == "mpirun":
        launch = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", 2]
        launch += [sys.executable, "-m", "dsx.run"]
    else:
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2]
        launch += ["--master-port", free_port(), "-m", "dsx.run"]
    own = ["--own-loader"] if way == "torchrun" else []
    ((status, output),) = run(([*launch, SCRIPT, *config, *own, *OUT], {}), at=tmp_path)
    assert status == 0, output
    check(tmp_path, is_synchronous_order=bool(own))


def test_one_launcher_per_cluster_with_flags_and_variables(tmp_path: Path) -> None:
    """The block is in no file of the script's; srun and mpirun number the ranks."""
    place = f"tcp://127.0.0.1:{free_port()}"
    (tmp_path / "dsx.json").write_text(json.dumps({"dsx": BLOCK}))
    config = ["--deepspeed_config", write_config(tmp_path / "ds.json", None), "--own-loader"]
    command = [sys.executable, "-m", "dsx.run", "--dsx-num-clusters", 2, SCRIPT, *config, *OUT]
    common = {"DSX_CONFIG": str(tmp_path / "dsx.json"), "DSX_RENDEZVOUS": place}
    srun = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": str(free_port()), "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0",
            "SLURM_STEP_NODELIST": "localhost"}  # fmt: skip
    mpirun = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1",
              "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
              "PMIX_NAMESPACE": f"prterun-host-{free_port()}@1"}  # fmt: skip
    first = ([*command, "--dsx-cluster-id=0"], common | srun)
    second = (command, common | mpirun | {"DSX_CLUSTER_ID": "1"})
    ended = run(first, second, at=tmp_path)
    assert [status for status, _ in ended] == [0, 0], ended
    check(tmp_path, is_synchronous_order=True)


SCRIPTS = {
    "trains": (
        "import torch\nmodel = torch.nn.Linear(2, 2)\n"
        "model(torch.ones(2)).sum().backward()\n"
        "torch.optim.SGD(model.parameters(), lr=0.1).step()\nprint('WENT ON')\n",
        "the script trains with SGD.step(), and no engine is attached: the clusters would train "
        'models of their own. No "dsx" block was found: give --dsx-config FILE',
    ),
    "ends": ("print('nothing')\nraise SystemExit(0)\n", "the script has ended, and no engine is"),
    "joins": ("import dsx\ndsx.init_distributed('ds.json')\n", "(RANK is not set)"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_takes_no_route_is_an_error(name: str, tmp_path: Path) -> None:
    text, said = SCRIPTS[name]
    script, arguments = tmp_path / "script.py", []
    script.write_text(text)
    if name == "joins":
        block = {**BLOCK, "clusters": {"num_clusters": 2}}
        arguments = [write_config(tmp_path / "ds.json", block)]
    command = [sys.executable, "-m", "dsx.run", script, *arguments]
    ((status, output),) = run((command, {}), at=tmp_path)
    assert status == 2
    assert said in output and "Traceback" not in output and "WENT ON" not in output
