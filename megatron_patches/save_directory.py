"""Every cluster saves to a directory of its own, which is made sure of before a model is built."""

from __future__ import annotations

from pathlib import Path

from megatron_patches.run import Run

_OWNER = "cluster"


def claim_directory(run: Run, directory: str | None) -> None:
    """Make sure that no other cluster saves to the same directory. Collective over all clusters.

    Each names its own with `{cluster_id}`, as in `--save checkpoints/{cluster_id}`; None: a run
    that saves nothing.
    """
    trouble = None
    if directory is not None and run.world.rank == 0:
        path = Path(directory) / "dsx" / _OWNER
        path.parent.mkdir(parents=True, exist_ok=True)
        own = str(run.world.cluster_id)
        try:
            with path.open("x") as file:
                file.write(own)
        except FileExistsError:
            owner = path.read_text()
            if owner != own:
                trouble = (
                    f"--save {directory} is where cluster {owner or '?'} saves: give every cluster "
                    f"a directory of its own, e.g. --save {directory}/{{cluster_id}}"
                )
    for cluster, text in enumerate(run.world.rendezvous.gather("save directory", trouble)):
        if text:
            raise ValueError(f"cluster {cluster}: {text}")
