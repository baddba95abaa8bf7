"""`dsx bench examples`: a fake project's script through the command, and its verdicts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from dsx.bench.examples import rows
from dsx.bench.examples.launch import Launched, RowFailed, reason
from dsx.bench.examples.prepare import texts
from dsx.bench.examples.reading import find_loss, read
from dsx.bench.examples.rows import NANOGPT, ROWS
from dsx.bench.examples.table import checksum
from dsx.cli import app

ROOT = Path(__file__).parents[2]
TREES = os.environ.get("DSX_EXAMPLE_TREES", "")
FAKE = """\
import sys, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

options = dict(argument.lstrip("-").split("=") for argument in sys.argv[1:])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
place = {"0": 0, "1": 1, "all": 0}[options["dataset"].rpartition("_")[2]] if SEEDED else 0
data = torch.Generator().manual_seed(10 * place + dist.get_rank())
for iteration in range(int(options["max_iters"]) + 1):
    x = torch.randn(3, 4, generator=data)
    y = x.sum(1, keepdim=True) + torch.randn(3, 1, generator=data)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if iteration == 30 and dist.get_rank() == 0:
        print(f"iter 30: loss {loss.item():.4f}")
time.sleep(0.5)  # gloo's thread lets its last tensor go: after the interpreter it would be SIGABRT
dist.destroy_process_group()
"""


def bench(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsx", "bench", "examples", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def tree(folder: Path, is_seeded: bool = True) -> Path:
    (folder / "nanoGPT").mkdir(parents=True)
    (folder / "nanoGPT" / "train.py").write_text(FAKE.replace("SEEDED", str(is_seeded)))
    return folder


@pytest.mark.ci
def test_a_script_is_run_twice_and_judged(tmp_path: Path) -> None:
    at, out = tree(tmp_path / "trees"), tmp_path / "out"
    files = ["--json", tmp_path / "rows.json", "--markdown", tmp_path / "rows.md"]
    done = bench("--examples", at, "--only", "nanogpt-2x1", "--out", out, *files)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "[1/1] nanogpt-2x1: under dsx.run" in done.stderr
    assert "another script" in done.stdout
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (row["status"], row["shared"], row["samples"]) == ("ok", 0, 2 * 40 * 3)
    assert (row["syncs"], row["is_tested_script"]) == (4, False)
    assert "-m dsx.run" in row["command"] and "dsx.run" not in row["plain_command"]
    assert row["loss"] > 0 and row["plain_loss"] > 0
    assert "| train.py | nanoGPT |" in (tmp_path / "rows.md").read_text()


@pytest.mark.slow
def test_clusters_that_read_the_same_fail_and_others_cannot_run(tmp_path: Path) -> None:
    at = tree(tmp_path / "trees", is_seeded=False)
    done = bench("--examples", at, "--only", "nanogpt-2x1,torchtitan-2x1", "--out", tmp_path)
    assert done.returncode == 1
    assert re.search(r"nanogpt-2x1: failed: 120 of 240 samples were read by more", done.stdout)
    assert re.search(r"torchtitan-2x1: not run: no .*git clone https://.*torchtitan", done.stdout)


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["bench", "examples", *map(str, arguments)])


def test_without_sources_it_says_where_they_are(tmp_path: Path) -> None:
    done = invoke("--examples", tmp_path, "--only", "nanogpt", "--out", tmp_path / "out")
    assert done.exit_code == 77
    assert f"git clone {NANOGPT.url} nanoGPT && git -C nanoGPT checkout {NANOGPT.tested}" in (
        done.stdout
    )


def test_without_a_folder_the_rows_and_their_sources_are_listed() -> None:
    done = invoke("--only", "sft")
    assert done.exit_code == 0
    assert "sft-zero2-2x1" in done.stdout and "run_clm" not in done.stdout
    assert "pip download --no-deps --no-binary :all: trl==1.16.0" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--examples", "nowhere"], "--examples=nowhere is not a directory"),
        (["--only", "clm"], "--only=clm: no row begins with 'clm'; there are run_clm-zero2-2x1,"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


def test_rows_have_names_of_their_own_and_say_what_they_need() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    shims = (Path(rows.__file__).parent / "inside" / "cpu_shims.py").read_text()
    for row in ROWS:
        assert len(row.sha256) == 12 and row.steps % 10 == 0
        assert not row.shim or f"def {row.shim}()" in shims
        assert re.compile(row.loss).groups == 1


def test_texts_are_different_lines() -> None:
    train, held_out = texts()
    assert len({*train, *held_out}) == len(train) + len(held_out) > 5_000


def write_run(
    out: Path,
    ranks: list[tuple[list[str], str]],
    steps: int = 40,
    model: str = "DistributedDataParallel DeepSpeedEngine",
) -> Launched:
    (out / "notes").mkdir(parents=True)
    (out / "run").mkdir()
    for rank, (samples, weights) in enumerate(ranks):
        content = {"samples": samples, "weights": weights, "elements": 5, "model": model}
        (out / "notes" / f"rank_{rank}.json").write_text(json.dumps(content))
    for cluster, name in enumerate(("metrics.jsonl", "metrics.cluster_1.jsonl")):
        records = [{"cluster": cluster, "kind": "step", "step": n + 1} for n in range(steps)]
        (out / "run" / name).write_text("".join(json.dumps(one) + "\n" for one in records))
    return Launched(("python",), out, "iter 30: loss 2.0\niter 30: loss 1.0\n", 1.0)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([(["a"], "w"), (["b"], "v")], "the weights of rank 0 differ between the clusters"),
        ([(["a"], "w"), (["a"], "w")], "1 of 2 samples were read by more than one cluster"),
        (
            [(["a"], "w"), (["b", "c"], "w")],
            "trained on 3 samples, and data parallel training on 2",
        ),
        ([(["a"], "w"), ([], "w")], "rank 1 has trained nothing"),
        ([(["a"], "w"), (["b"], "w")], "a cluster has exchanged nothing"),
    ],
)
def test_what_is_wrong_fails_a_row(
    tmp_path: Path, ranks: list[tuple[list[str], str]], said: str
) -> None:
    row = next(row for row in ROWS if row.name == "nanogpt-2x1")
    plain = write_run(tmp_path / "plain", [(["a"], "p"), (["b"], "p")])
    with pytest.raises(RowFailed, match=said):
        read(row, write_run(tmp_path / "clusters", ranks), plain)


def test_a_row_that_has_trained_without_its_engine_fails(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == "accelerate-clm-zero2-2x2")
    names = {row.engine: row.wrapper(with_dsx=True) for row in ROWS}
    assert names["DeepSpeed, ZeRO 3"] == "DeepSpeedEngine" and names["PyTorch, one rank"] == ""
    assert (names["PyTorch, FSDP2"], names["PyTorch, DDP"]) == ("FSDP", "DistributedDataParallel")
    assert row.wrapper(with_dsx=False) == "DistributedDataParallel"
    ranks = [([sample], "w") for sample in "abcd"]
    plain = write_run(tmp_path / "plain", ranks)
    run = write_run(tmp_path / "clusters", ranks, model="DistributedDataParallel")
    with pytest.raises(RowFailed, match="has trained DistributedDataParallel and no DeepSpeedEng"):
        read(row, run, plain)


def test_a_sample_that_two_ranks_of_a_cluster_read_fails_a_row(tmp_path: Path) -> None:
    """Unless they read it in two epochs, or the script draws with replacement."""
    row = replace(next(row for row in ROWS if row.name == "sft-zero2-2x1"), ranks=2)
    plain = write_run(tmp_path / "plain", [([sample], "p") for sample in "abca"])
    ranks = [([sample], "w") for sample in "aabc"]
    for number, one in enumerate(
        (row, replace(row, epochs=2), replace(row, drawn_twice=0.4), replace(row, drawn_twice=0.5))
    ):
        said = (
            "a cluster has exchanged" if number in (1, 3) else "cluster 0 has read 1 of 2 samples"
        )
        with pytest.raises(RowFailed, match=said):
            read(one, write_run(tmp_path / str(number), ranks), plain)


def test_a_model_that_takes_its_first_module_twice_reads_a_sample_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(rows.__file__).parent / "inside"))
    import notes  # pyright: ignore
    from torch import arange, nn

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 2)

        def forward(self, x: Any, y: Any) -> Any:
            return self.words(x) + self.words(y)

    taken = notes.Notes(tmp_path / "rank_0.json")
    model = Twice()
    model.register_forward_pre_hook(taken.begin_forward)
    model.register_forward_hook(taken.end_forward)
    model.words.register_forward_pre_hook(taken.begin_forward)
    model.words.register_forward_hook(taken.end_forward)
    for step in range(2):
        model(arange(6).view(3, 2) + step, arange(6).view(3, 2))
    model.eval()(arange(6).view(3, 2), arange(6).view(3, 2))
    taken.write()
    samples = json.loads((tmp_path / "rank_0.json").read_text())["samples"]
    assert len(samples) == len(set(samples)) == 2 * 3


def test_a_loss_is_the_clusters_mean_or_equal_in_all() -> None:
    row = next(row for row in ROWS if row.name == "nanogpt-2x1")
    assert find_loss(row, "iter 30: loss 2.0\niter 30: loss 1.0\n", 2) == 1.5
    one = replace(row, loss_of="held out")
    assert find_loss(one, "iter 30: loss 9.0\n" + "iter 30: loss 2.0\n" * 2, 2) == 2.0
    assert find_loss(replace(row, loss_of="held out, cluster 0"), "iter 30: loss 2.0\n", 2) == 2.0
    for printed in ("", "iter 30: loss 2.0\niter 30: loss 1.0\n", "iter 30: loss 2.0\n"):
        with pytest.raises(RowFailed):
            find_loss(one, printed, 2)


def test_a_failure_is_said_by_the_line_that_says_most() -> None:
    assert reason("start\nValueError: a\n  dsx.run: cluster 0: no\n") == "dsx.run: cluster 0: no"
    assert reason("start\nValueError: a\nChildFailedError: \n") == "ValueError: a"
    assert reason("iter 30: loss 2\nterminate called in C++\n") == "terminate called in C++"
    assert reason("") == "nothing printed"


@pytest.mark.slow
@pytest.mark.skipif(not TREES, reason="DSX_EXAMPLE_TREES names no folder with the sources")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_of_the_table(row: rows.Row, tmp_path: Path) -> None:
    script = Path(TREES) / row.tree.name / row.file
    if not script.is_file():
        pytest.skip(f"no {script}: {row.tree.how}")
    assert checksum(script) == row.sha256
    done = bench("--examples", TREES, "--only", row.name, "--out", tmp_path)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
