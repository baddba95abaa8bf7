"""A rank that is killed and started again at once finds its port, whatever it has forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import free_port

pytestmark = pytest.mark.ci
CYCLES = 8
RANK = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset
import dsx

class Rows(Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, i): return torch.ones(2)

dsx.init_distributed({"dsx": {"preset": "diloco", "clusters": {
    "num_clusters": 1, "join_deadline_seconds": 30}}})
batches = iter(DataLoader(Rows(), num_workers=2, batch_size=4))
next(batches)
print("trains", flush=True)
time.sleep(100)
"""


def test_a_killed_rank_starts_again_at_once(tmp_path: Path) -> None:
    port = free_port()
    environment = {
        **os.environ,
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    waited: list[str] = []
    for cycle in range(CYCLES):
        log = tmp_path / f"{cycle}.log"
        with log.open("w") as told:
            rank = subprocess.Popen(
                [sys.executable, "-c", RANK], env=environment, text=True,
                stdout=subprocess.PIPE, stderr=told,
            )  # fmt: skip
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "trains\n", log.read_text()
        finally:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
        if "is in use" in log.read_text():
            waited.append(log.read_text())
    assert not waited
