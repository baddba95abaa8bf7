"""What `dsx keys list` shows of a folder, and what is wrong in it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path

from dsx.comm.links.key_files import read_secret
from dsx.comm.links.key_lines import PublicKey
from dsx.comm.links.keys import Keys
from dsx.comm.links.members import MembersFolder


@dataclass(frozen=True)
class Listing:
    """Rows of member, fingerprint, age and state; problems, each a line."""

    rows: list[tuple[str, str, str, str]]
    problems: list[str]


def listing(directory: Path) -> Listing:
    """Look at all of a folder; ValueError where there is none."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is not there: `dsx keys new NAME` makes it")
    folder = MembersFolder(directory)
    problems = folder.look()
    states: dict[PublicKey, str] = {}
    for path in sorted(directory.glob("*.secret")):
        name = path.name.removesuffix(".secret")
        if name.startswith("."):
            continue
        try:
            secrets = read_secret(directory, name, group_read=True)
            in_use = Keys.load(directory, name, group_read=True).fingerprint
        except ValueError as error:
            problems += [str(error)] if str(error) not in problems else []
            continue
        group = ", which its group can read" if path.stat().st_mode & 0o040 else ""
        for secret in secrets:
            is_used = secret.public.fingerprint == in_use
            states[secret.public] = f"secret here{group}" + ("" if is_used else ", the next one")
    rows = [
        (name, key.fingerprint, _age(key.made), states.get(key, ""))
        for name, keys in sorted(folder.standing.keys.items())
        for key in keys
    ]
    rows += [
        (out.key.name, out.key.fingerprint, _age(out.key.made), f"revoked {out.on.isoformat()}")
        for out in folder.revoked
    ]
    return Listing(rows, problems)


def _age(made: date) -> str:
    days = (date.today() - made).days
    return f"{made.isoformat()}, {'today' if days == 0 else f'{days} days ago'}"
