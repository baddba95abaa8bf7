"""What is read of DeepSpeed's pickles, and that none of it runs."""

from __future__ import annotations

import argparse
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dsx.cli import app
from dsx.engines.deepspeed.pickles import find_code, read_pickle

SAVED = Path("tests/fixtures/checkpoint_2317291/deepspeed")


class Trap:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def copy_of_fixture(base: Path) -> Path:
    for source in SAVED.rglob("*"):
        if source.is_file():
            target = base / source.relative_to(SAVED)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    return base


def test_what_deepspeed_has_saved_is_read() -> None:
    files = sorted(SAVED.rglob("*.pt"))
    assert len(files) == 4 and find_code(files) is None
    assert read_pickle(SAVED / "cluster_0/midway/mp_rank_00_model_states.pt")["module"]


def test_an_export_runs_nothing(tmp_path: Path) -> None:
    base = copy_of_fixture(tmp_path / "saved")
    file = base / "cluster_1/midway/mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=True)
    torch.save({**state, "mine": Trap(tmp_path / "sprung")}, file)
    arguments = ["export", str(base), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert not (tmp_path / "sprung").exists()
    assert result.exit_code == 2
    assert f"{file} holds posix.mkdir, which may run code" in result.output.replace("\n", "")
    optimizer = base / "cluster_0/midway/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": Trap(tmp_path / "sprung")}, optimizer)
    file.write_bytes((SAVED / "cluster_1/midway/mp_rank_00_model_states.pt").read_bytes())
    result = CliRunner().invoke(app, [*arguments, "--format", "universal"])
    assert not (tmp_path / "sprung").exists() and "optim_states.pt holds" in result.output


@pytest.mark.parametrize("protocol", [2, 4])
def test_whatever_the_pickle_s_protocol(tmp_path: Path, protocol: int) -> None:
    torch.save({"mine": Trap(tmp_path / "sprung")}, tmp_path / "a.pt", pickle_protocol=protocol)
    assert str(find_code([tmp_path / "a.pt"])).startswith(str(tmp_path / "a.pt"))
    with pytest.raises(ValueError, match="a.pt"):
        read_pickle(tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps({}))  # of no torch since 1.6
    assert "cannot be read" in str(find_code([tmp_path / "b.pt"]))
    assert not (tmp_path / "sprung").exists()


class Arguments(argparse.Namespace):
    """A class of one's own: argparse's is allowed."""


def test_a_class_of_one_s_own_is_allowed_by_torch_s_means(tmp_path: Path) -> None:
    torch.save({"arguments": Arguments(lr=0.1)}, tmp_path / "a.pt")
    assert "test_deepspeed_pickles.Arguments" in str(find_code([tmp_path / "a.pt"]))
    with torch.serialization.safe_globals([Arguments]):
        assert find_code([tmp_path / "a.pt"]) is None
        assert read_pickle(tmp_path / "a.pt")["arguments"].lr == 0.1


def test_what_scripts_keep_beside_a_model_is_read(tmp_path: Path) -> None:
    kept = {
        "numpy": np.random.RandomState(7).get_state(), "python": random.getstate(),
        "best": np.float64(0.5), "arguments": argparse.Namespace(lr=0.1, seen=np.arange(3)),
    }  # fmt: skip
    torch.save(kept, tmp_path / "a.pt")
    assert find_code([tmp_path / "a.pt"]) is None
    read = read_pickle(tmp_path / "a.pt")
    assert (read["numpy"][1] == kept["numpy"][1]).all() and read["python"] == kept["python"]
    assert (read["best"], list(read["arguments"].seen)) == (0.5, [0, 1, 2])
    hidden = np.array([Trap(tmp_path / "sprung")], dtype=object)
    torch.save({**kept, "mine": hidden}, tmp_path / "a.pt")
    assert "holds posix.mkdir, which" in str(find_code([tmp_path / "a.pt"]))
    with pytest.raises(ValueError, match=r"posix\.mkdir"):
        read_pickle(tmp_path / "a.pt")
    assert not (tmp_path / "sprung").exists()
