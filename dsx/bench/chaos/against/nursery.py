"""A process that has imported torchft, and forks its groups and its lighthouse from itself.

So they are started again as fast as dsx's ranks are (dsx.bench.chaos.nursery).
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(directory: Path) -> None:
    """Fork what is asked for, until stdin ends."""
    import torch

    from dsx.bench.chaos.against import worker
    from dsx.bench.chaos.against.job import GroupJob
    from dsx.bench.chaos.nursery import serve

    job = GroupJob.read(directory)
    torch.set_num_threads(1)
    serve(directory, lambda cluster, rank: worker.train(job, cluster, rank))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
