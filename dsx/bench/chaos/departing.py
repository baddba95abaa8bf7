"""`dsx ctl leave`, as an operator at another site runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from dsx.bench.chaos.job import Job


def tell_to_leave(job: Job, cluster: int, by: int) -> subprocess.Popen[bytes]:
    """Start the command for a cluster, with the key of another one; what it says is in ctl.log."""
    directory = Path(job.directory)
    config = directory / f"ctl_{by}.json"
    config.write_text(json.dumps(job.dsx(by)))
    words = ["leave", str(config), "--cluster", str(cluster), "--cluster-id", str(by)]
    with (directory / "ctl.log").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "dsx", "ctl", *words], stdin=subprocess.DEVNULL, stdout=output,
            stderr=output,
        )  # fmt: skip
