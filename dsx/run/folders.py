"""A folder that several clusters write the same to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from dsx.comm.world import World


def save_beside(target: Path, world: World, save: Callable[[Path], None], is_writer: bool) -> None:
    """Save to a folder that all clusters name: each beside it first, as they may share it."""
    own = target.with_name(f".{target.name}.cluster_{world.cluster_id}")
    save(own)
    if is_writer and own.is_dir():
        move_into(own, target)


def move_into(source: Path, target: Path) -> None:
    """Bring files to a folder that other clusters write the same to: each as a whole, by its name.

    `source` lies beside it, and is gone then.
    """
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
    shutil.rmtree(source)
