"""A process that has imported an engine, and forks the ranks of one run after another from itself.

python -m dsx.bench.engines.nursery DIR
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(directory: Path) -> None:
    """Fork what is asked for, until stdin ends: each rank trains as the job in the folder says."""
    import torch

    from dsx.bench.chaos.nursery import serve
    from dsx.bench.engines import worker
    from dsx.bench.engines.job import Job
    from dsx.bench.engines.trainer import module_of

    module_of(Job.read(directory).combination.engine).warm()  # that of all its runs
    torch.set_num_threads(1)
    serve(directory, lambda cluster, rank: worker.train(directory, cluster, rank))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
