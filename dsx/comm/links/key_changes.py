"""What `dsx keys` does to a folder of keys: one change at a time, each file written whole."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from dsx.comm.links.key_files import (
    MOST_KEYS,
    SECRET_VERSION,
    SecretKey,
    locked,
    public_path,
    read_public,
    read_revoked_keys,
    read_secret,
    revoked_path,
    secret_path,
    write_whole,
)
from dsx.comm.links.key_lines import PublicKey, Revoked, require_name
from dsx.comm.links.members import MembersFolder
from dsx.comm.links.primitives import (
    new_curve_pair,
    new_sign_seed,
    sign_public_of,
)

_LEAST_OF_FINGERPRINT = 4
_NOT_FOR_GIT = "*.secret\n.lock\n"


@dataclass(frozen=True)
class Revocation:
    """Which keys went out, which of the member's are left, and what was not done about secrets."""

    gone: tuple[PublicKey, ...]
    left: tuple[PublicKey, ...]
    is_own: bool
    not_erased: str = ""


def make_key(directory: Path, name: str, *, is_next: bool = False) -> tuple[PublicKey, ...]:
    """Make a key for a member and return its keys, the new one last; `is_next` for a second one.

    ValueError where one is there already, or (`is_next`) none or two are: nothing is overwritten.
    """
    require_name(name)
    with locked(directory):
        keep = _to_keep(directory, name) if is_next else _nothing_to_keep(directory, name)
        new = _new_secret(name)
        ignore = directory / ".gitignore"
        if not ignore.exists():
            write_whole(ignore, _NOT_FOR_GIT, 0o644)
        _write_secret(directory, name, [*keep, new])
        _append(public_path(directory, name), [new.public.line])
    return (*(secret.public for secret in keep), new.public)


def add_key(directory: Path, key: PublicKey) -> tuple[PublicKey, ...] | None:
    """Make a key a member's; return that member's keys, or None where it was there already.

    ValueError for a revoked key, for another member's, for a third key, and for another key of the
    member whose secret is in this folder.
    """
    with locked(directory):
        folder = MembersFolder(directory)
        if problems := folder.look():
            raise ValueError(problems[0])
        _require_not_revoked(key, folder.revoked)
        for name, keys in folder.standing.keys.items():
            if name != key.name and any(key.shares_with(other) for other in keys):
                raise ValueError(f"the key {key.fingerprint} of {key.name} is a key of {name}")
        there = folder.standing.keys.get(key.name, ())
        if key in there:
            return None
        if any(key.shares_with(other) for other in there):
            raise ValueError(
                f"the key {key.fingerprint} has a part in common with another of {key.name}'s; "
                "each is made anew, by `dsx keys new`"
            )
        if len(there) >= MOST_KEYS:
            raise ValueError(_two_keys(directory, key.name, there))
        _require_own(directory, key)
        _append(public_path(directory, key.name), [key.line])
        return (*there, key)


def revoke_keys(
    directory: Path, name: str, fingerprint: str | None = None, *, is_older: bool = False
) -> Revocation:
    """Put a member's keys out for good: all, the one whose fingerprint begins so, or the older.

    What was its secret is erased where it is here. ValueError where there is no such key.
    """
    require_name(name)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not there: no folder of keys")
    with locked(directory):
        path = public_path(directory, name)
        there = read_public(path) or ()
        if not there:
            known = sorted(p.stem for p in (directory / "members").glob("*.public"))
            raise ValueError(f"{name} has no key in {directory}; members: {', '.join(known)}")
        gone = _chosen(there, name, fingerprint, is_older)
        left = tuple(key for key in there if key not in gone)
        out = {revoked.key for revoked in read_revoked_keys(revoked_path(directory)) or ()}
        lines = [Revoked(key, date.today()).line for key in gone if key not in out]
        _append(revoked_path(directory), lines)
        _remove(path, gone, left)
        is_own = secret_path(directory, name).exists()
        return Revocation(
            tuple(gone), left, is_own, _erase(directory, name, gone) if is_own else ""
        )


def _nothing_to_keep(directory: Path, name: str) -> tuple[SecretKey, ...]:
    secret, where = secret_path(directory, name), _where(directory)
    if secret.exists() or secret.is_symlink():
        raise ValueError(
            f"{secret} is there, and is not overwritten; `dsx keys new {name} --next {where}` "
            f"makes a second key to change to, `dsx keys list {where}` shows what there is"
        )
    if read_public(public_path(directory, name)):
        raise ValueError(
            f"{name} is a member already, and its secret is not in {directory}: a second key is "
            f"made where that is (--next); if it is lost: `dsx keys revoke {name} {where}`"
        )
    return ()


def _to_keep(directory: Path, name: str) -> tuple[SecretKey, ...]:
    listed = read_public(public_path(directory, name)) or ()
    keep = tuple(
        s for s in read_secret(directory, name, group_read=True) if s.public in listed
    )  # not what an interrupted command has left
    if len(listed) >= MOST_KEYS:
        raise ValueError(_two_keys(directory, name, listed))
    if not keep:
        raise ValueError(
            f"{public_path(directory, name)} does not have the key of {name}.secret: --next is for "
            "a member that has one"
        )
    return keep


def _new_secret(name: str) -> SecretKey:
    public, secret = new_curve_pair()
    seed = new_sign_seed()
    return SecretKey(PublicKey(name, public, sign_public_of(seed), date.today()), secret, seed)


def _require_not_revoked(key: PublicKey, revoked: Sequence[Revoked]) -> None:
    for out in revoked:
        if out.key.shares_with(key):
            raise ValueError(
                f"the key {out.key.fingerprint} of {out.key.name} was revoked here on {out.on}; "
                f"a revoked key never comes back: a new one, by `dsx keys new` at {key.name}"
            )


def _require_own(directory: Path, key: PublicKey) -> None:
    secret = secret_path(directory, key.name)
    if not secret.exists():
        return
    if all(own.public != key for own in read_secret(directory, key.name, group_read=True)):
        raise ValueError(
            f"{key.name} is the member of {secret}, which does not have the key {key.fingerprint}: "
            f"whoever does could speak as {key.name}; `dsx keys new {key.name} --next` makes a "
            "second key here"
        )


def _chosen(
    there: Sequence[PublicKey], name: str, fingerprint: str | None, is_older: bool
) -> list[PublicKey]:
    if is_older and (fingerprint is not None or len(there) != MOST_KEYS):
        raise ValueError(
            f"--older is for a member with {MOST_KEYS} keys, and without --key; {name} has "
            f"{', '.join(key.fingerprint for key in there)}"
        )
    if is_older:
        return [there[0]]
    if fingerprint is None:
        return list(there)
    wanted = fingerprint.replace("-", "").lower()
    gone = [k for k in there if k.fingerprint.replace("-", "").startswith(wanted)]
    if len(wanted) < _LEAST_OF_FINGERPRINT or len(gone) != 1:
        have = ", ".join(key.fingerprint for key in there)
        raise ValueError(
            f"--key {fingerprint} is none of {name}'s keys: {have}; give "
            f"{_LEAST_OF_FINGERPRINT} of its letters or more, from its beginning"
        )
    return gone


def _two_keys(directory: Path, name: str, keys: Sequence[PublicKey]) -> str:
    return (
        f"{name} has {len(keys)} keys, the most there can be: "
        f"{', '.join(key.fingerprint for key in keys)}; first one of them has to go: "
        f"`dsx keys revoke {name} --older {_where(directory)}`"
    )


def _where(directory: Path) -> str:
    return f"--dir {shlex.quote(str(directory))}"


def _append(path: Path, lines: list[str]) -> None:
    before = path.read_text(encoding="ascii") if path.exists() else ""
    write_whole(path, before + "".join(f"{line}\n" for line in lines), 0o644)


def _remove(path: Path, gone: Sequence[PublicKey], left: Sequence[PublicKey]) -> None:
    if not left:
        path.unlink()
        return
    out = {key.line.split()[2] for key in gone}
    lines = path.read_text(encoding="ascii").splitlines(keepends=True)
    write_whole(path, "".join(line for line in lines if not out & set(line.split())), 0o644)


def _erase(directory: Path, name: str, gone: Sequence[PublicKey]) -> str:
    """Take keys out of NAME.secret; return why that could not be done, or ""."""
    try:
        secrets = read_secret(directory, name, group_read=True)
        keep = [secret for secret in secrets if secret.public not in gone]
        if keep:
            _write_secret(directory, name, keep)
        else:
            secret_path(directory, name).unlink()
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def _write_secret(directory: Path, name: str, secrets: Sequence[SecretKey]) -> None:
    text = f"{SECRET_VERSION}\n" + "".join(secret.lines for secret in secrets)
    write_whole(secret_path(directory, name), text, 0o600)
