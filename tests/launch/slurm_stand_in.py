"""sbatch, srun and scontrol for tests, by the name it is started under: of one job on this host.

As strict as Slurm: an option it does not know is an error, `--signal` reaches the ranks and not the
batch script, a step is killed at once when a rank has failed, and a job is queued again only if it
may be. `kill -USR1` of sbatch is the time limit that comes near.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

OF_BATCH = (
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal",
    "open-mode", "output",
)  # fmt: skip
HERE = Path(os.environ["STAND_IN"])  # a folder for notes of the job


def sbatch() -> int:
    script = Path(sys.argv[1])
    told = re.findall(r"^#SBATCH (.+)$", script.read_text(), re.M)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in OF_BATCH:
        parser.add_argument(f"--{name}")
    parser.add_argument("--requeue", action="store_true")
    options = parser.parse_args(told)
    (HERE / "requeue").write_text("yes" if options.requeue else "no")
    number, _ = options.signal.split("@")
    signal.signal(signal.SIGUSR1, lambda *_: tell_ranks(getattr(signal, f"SIG{number}")))
    for restarts in range(10):
        (HERE / "queued").unlink(missing_ok=True)
        environment = {**os.environ, "SLURM_JOB_ID": os.environ["JOB"]}
        if restarts:
            environment["SLURM_RESTART_COUNT"] = str(restarts)
        process = subprocess.Popen(["bash", *sys.argv[1:]], env=environment)
        status = process.wait()
        if not (HERE / "queued").exists():
            return status
    return 99


def tell_ranks(number: int) -> None:
    for rank in (HERE / "ranks").read_text().split():
        os.kill(int(rank), number)


def srun() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--kill-on-bad-exit", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    count = int(os.environ["TASKS"])
    ranks = [
        subprocess.Popen(
            options.command,
            env={
                **os.environ, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank),
                "SLURM_STEP_NUM_TASKS": str(count), "SLURM_LOCALID": str(rank),
                "SLURM_STEP_NODELIST": "localhost",
            },
        )
        for rank in range(count)
    ]  # fmt: skip
    (HERE / "ranks").write_text(" ".join(str(rank.pid) for rank in ranks))
    statuses: list[int] = []
    while ranks:
        pid, ended = os.wait()
        ranks = [rank for rank in ranks if rank.pid != pid]
        found = os.waitstatus_to_exitcode(ended)
        statuses.append(found if found >= 0 else 128 - found)
        if statuses[-1] and options.kill_on_bad_exit:
            for rank in ranks:
                rank.kill()
    return max(statuses)


def scontrol() -> int:
    assert sys.argv[1:] == ["requeue", os.environ["SLURM_JOB_ID"]]
    if (HERE / "requeue").read_text() != "yes":
        return 1
    (HERE / "queued").touch()
    return 0


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[Path(sys.argv[0]).name]())
