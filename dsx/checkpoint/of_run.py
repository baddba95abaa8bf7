"""Which checkpoints a path on the command line means.

A directory that `save_checkpoint` was given, one of its clusters or tags, or a run's folder, which
says where its run has saved (run.json) or holds such a directory. Or what `handle.save` alone has
written: an outer state beside whatever a script saves, which no manifest completes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsx.checkpoint.files import rank_file
from dsx.checkpoint.tags import MANIFEST
from dsx.telemetry.run_folder import find_run, read_about


@dataclass(frozen=True)
class Saved:
    """A directory that holds cluster_0, cluster_1, ..., and the tag wanted of it, if any.

    `is_bare`: the directory of one cluster's outer state itself.
    """

    base: Path
    tag: str | None = None
    is_bare: bool = False


def find_saved(path: Path, tag: str | None = None) -> Saved:
    """Return the checkpoints a path means; FileNotFoundError or ValueError says what is there."""
    if not path.exists():
        find_run(path)  # says what is there instead
    if _clusters_in(path):
        return Saved(path, tag)
    within = path if path.is_dir() else path.parent
    if rank_file(within, 0).is_file() and not (within / MANIFEST).is_file():
        if tag is not None:
            raise ValueError(
                f"--tag {tag}: {within} is one checkpoint, which has no tags; leave it out"
            )
        return Saved(within, is_bare=True)
    for folder in (within, within.parent):  # a tag may hold directories of the engine's
        if (folder / MANIFEST).is_file() and _is_cluster(folder.parent):
            if tag not in (None, folder.name):
                raise ValueError(f"--tag {tag} and {path} are two checkpoints: give one of them")
            return Saved(folder.parent.parent, folder.name)
    if path.is_dir() and _is_cluster(path):
        return Saved(path.parent, tag)
    bases = _bases(within)
    if not bases:
        run = _run_of(path)
        bases = _bases(run)
        if not bases:
            raise FileNotFoundError(
                f"{run} holds no cluster_<m> with a complete checkpoint, nor does its run.json "
                "name one that is still there: give the run's folder, or the directory that "
                "save_checkpoint was given, e.g. runs/quickstart/checkpoints, or one that "
                "handle.save was given"
            )
    if len(bases) > 1:
        listed = ", ".join(str(base) for base in bases)
        raise ValueError(f"{path} has checkpoints in {listed}: give one of these directories")
    return Saved(bases[0], tag)


def _run_of(path: Path) -> Path:
    try:
        return find_run(path)
    except FileNotFoundError:
        if path.is_dir():
            return path  # a directory of checkpoints alone has no records
        raise


def _bases(run: Path) -> list[Path]:
    """Return where a run has checkpoints: those its run.json names, or what its folder holds."""
    saved = [entry["path"] for about in read_about(run).values() for entry in about["checkpoints"]]
    named = {(run / path).parent.parent for path in saved}  # <base>/cluster_<m>/<tag>
    there = {base for base in named if _clusters_in(base)}
    manifests = (path for levels in ("*", "*/*") for path in run.glob(f"{levels}/*/*/{MANIFEST}"))
    below = {
        path.parents[2]
        for path in manifests
        if _is_cluster(path.parents[1]) and not _clusters_in(path.parent)  # no Trainer's folder
    }
    return sorted(there or below)


def _clusters_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("cluster_*") if path.is_dir() and _is_cluster(path)]


def _is_cluster(folder: Path) -> bool:
    return folder.name.removeprefix("cluster_").isdecimal() and folder.name.startswith("cluster_")
