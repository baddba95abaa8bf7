"""Folders of keys for tests: a site each, which know each other."""

from __future__ import annotations

from pathlib import Path

from dsx.comm.links.key_changes import add_key, make_key
from dsx.comm.links.key_lines import PublicKey


def sites(folder: Path, *names: str) -> dict[str, Path]:
    """Make a folder for each name, with its secret, and everybody's public line."""
    folders = {name: folder / name for name in names}
    made = [make_key(folders[name], name)[-1] for name in names]
    for name in names:
        for key in made:
            if key.name != name:
                add_key(folders[name], key)
    return folders


def own_key(folder: Path, name: str) -> PublicKey:
    """Make a second key for the member whose secret is in a folder; return it."""
    return make_key(folder, name, is_next=True)[-1]
