"""The files of keys, read with suspicion and written whole.

    DIR/NAME.secret             what a member alone holds, mode 0600
    DIR/members/NAME.public     one line per key of a member, the older first, at most two
    DIR/members/revoked         one line per key that is out for good

A file is written beside its place and renamed into it, so that nobody reads half of one. Symbolic
links are followed, as mounted secrets of Kubernetes are such. Every error is a ValueError that
names the file (and its line), and none repeats a secret.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import stat
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dsx.comm.links.key_lines import (
    PublicKey,
    Revoked,
    read_field,
    read_key,
    read_revoked,
    to_base64,
)
from dsx.comm.links.primitives import curve_public_of, sign_public_of

MOST_KEYS = 2  # of a member at one time: the one in use, and the next or the one before
SECRET_VERSION = "dsx-secret-1"
_MOST_BYTES = 1 << 20
_LOCK_SECONDS = 10.0
_R = TypeVar("_R")


@dataclass(frozen=True, repr=False)
class SecretKey:
    """A member's own key; it shows its fingerprint alone, and is never pickled."""

    public: PublicKey
    curve_secret: bytes
    sign_seed: bytes

    def __repr__(self) -> str:
        return f"SecretKey({self.public.name}, {self.public.fingerprint})"

    def __reduce__(self) -> str:
        raise TypeError("a secret key is not pickled: load it where it is needed")

    @property
    def lines(self) -> str:
        """Return it as written in NAME.secret."""
        secret, seed = to_base64(self.curve_secret), to_base64(self.sign_seed)
        return f"{self.public.line}\ncurve-secret:{secret} sign-seed:{seed}\n"


def secret_path(directory: Path, name: str) -> Path:
    """Return where a member's own keys are."""
    return directory / f"{name}.secret"


def public_path(directory: Path, name: str) -> Path:
    """Return where a member's public keys are."""
    return directory / "members" / f"{name}.public"


def revoked_path(directory: Path) -> Path:
    """Return where the keys are that are out."""
    return directory / "members" / "revoked"


def read_secret(directory: Path, name: str, *, group_read: bool = False) -> tuple[SecretKey, ...]:
    """Return a member's own keys, the older first.

    ValueError for a file that others than its owner can read (with `group_read`: than its owner and
    group), of another owner, or that is not whole.
    """
    path = secret_path(directory, name)
    text, status = _read(path)
    if status is None:
        raise ValueError(
            f"{path} is not there: `dsx keys new {name} --dir {shlex.quote(str(directory))}` makes "
            "it, on the host that is to use it"
        )
    _require_private(path, status, group_read)
    lines = _whole_lines(path, text)
    if lines[0] != SECRET_VERSION:
        raise ValueError(f"{path}:1: it does not begin with {SECRET_VERSION}")
    if len(lines) not in (3, 5):
        raise ValueError(f"{path}: it has {len(lines)} lines, not 3 (one key) or 5 (two keys)")
    found: list[SecretKey] = []
    for i in range(1, len(lines), 2):
        found.append(_at(path, i + 2, _secret_key, lines[i], lines[i + 1], name))
    return tuple(found)


def _secret_key(public_line: str, secret_line: str, name: str) -> SecretKey:
    public = read_key(public_line)
    if public.name != name:
        raise ValueError(f"the key is of {public.name}, not of {name}")
    words = secret_line.split()
    if len(words) != 2:
        raise ValueError("it is not curve-secret:BASE64 sign-seed:BASE64")
    secret = SecretKey(
        public, read_field(words[0], "curve-secret"), read_field(words[1], "sign-seed")
    )
    derived = curve_public_of(secret.curve_secret), sign_public_of(secret.sign_seed)
    if derived != (public.curve, public.sign):
        raise ValueError("it does not belong to the public key in the line before it")
    return secret


def read_public(path: Path) -> tuple[PublicKey, ...] | None:
    """Return the keys in members/NAME.public, the older first; None where it is not there."""
    text, status = _read(path)
    if status is None:
        return None
    require_kept_from_others(path, status)
    name = path.name.removesuffix(".public")
    found: list[PublicKey] = []
    for number, line in _entries(_whole_lines(path, text)):
        key = _at(path, number, read_key, line)
        if key.name != name:
            raise ValueError(
                f"{path}:{number}: the key is of {key.name}, and belongs in {key.name}.public"
            )
        if any(key.shares_with(other) for other in found):
            raise ValueError(f"{path}:{number}: the key {key.fingerprint} is there twice")
        found.append(key)
    if not 0 < len(found) <= MOST_KEYS:
        raise ValueError(
            f"{path}: it holds {len(found)} keys; a member has one, or {MOST_KEYS} while it "
            "changes them (`dsx keys revoke NAME --key FINGERPRINT`)"
        )
    return tuple(found)


def read_revoked_keys(path: Path) -> tuple[Revoked, ...] | None:
    """Return the keys in members/revoked, in its order; None where it is not there."""
    text, status = _read(path)
    if status is None:
        return None
    require_kept_from_others(path, status)
    lines = _whole_lines(path, text)
    return tuple(_at(path, number, read_revoked, line) for number, line in _entries(lines))


def require_kept_from_others(path: Path, status: os.stat_result) -> None:
    """Raise ValueError for what every user of this host can change: who can, can join."""
    if not status.st_mode & stat.S_IWOTH:
        return
    with suppress(OSError):
        if os.statvfs(path).f_flag & os.ST_RDONLY:  # such as a mounted secret
            return
    raise ValueError(
        f"{path} has mode {stat.S_IMODE(status.st_mode):04o}: every user of this host can change "
        f"who is a member; `chmod o-w {shlex.quote(str(path))}`"
    )


def write_whole(path: Path, text: str, mode: int) -> None:
    """Put text in a file's place at once; a crash leaves what was there before."""
    descriptor, beside = tempfile.mkstemp(prefix=".", suffix=f"-{path.name}", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def locked(directory: Path) -> Generator[None]:
    """Make the folder where it is not there, and keep other commands from writing in it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / "members").mkdir(mode=0o755, exist_ok=True)
    descriptor = os.open(directory / "members" / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + _LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ValueError(
                        f"another dsx keys has been at work in {directory} for {_LOCK_SECONDS:g} s"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> tuple[str, os.stat_result | None]:
    """Return a file's text and state; "" and None where it is not there."""
    try:
        # O_NONBLOCK: a pipe in a file's place would have us wait for its writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return "", None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a file")
        if status.st_size > _MOST_BYTES:
            raise ValueError(f"{path} has {status.st_size} bytes, too many for keys")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(_MOST_BYTES).decode("ascii"), status
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text of ASCII alone") from None
    finally:
        os.close(descriptor)


def _require_private(path: Path, status: os.stat_result, group_read: bool) -> None:
    mode, quoted = stat.S_IMODE(status.st_mode), shlex.quote(str(path))
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(
            f"{path} belongs to user {status.st_uid}, who can read and change it, and not to "
            f"user {os.geteuid()} or root: `chown {os.geteuid()} {quoted}`"
        )
    most = 0o740 if group_read else 0o700
    if mode & ~most & 0o077:
        wanted = "0640" if group_read else "0600"
        hint = "" if group_read or mode & 0o037 else ", or allow group-read for a mounted secret"
        raise ValueError(
            f"{path} has mode {mode:04o}: others can read or change it, {wanted} is the widest; "
            f"`chmod {wanted} {quoted}`{hint}"
        )


def _whole_lines(path: Path, text: str) -> list[str]:
    """Return the lines; ValueError for a file whose last one may still be on its way."""
    if not text.endswith("\n"):
        raise ValueError(f"{path} does not end with a line's end: it is empty, or half written")
    return text[:-1].split("\n")


def _entries(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of what is neither empty nor a comment."""
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.startswith("#"):
            yield number, line


def _at(path: Path, number: int, read: Callable[..., _R], *arguments: str) -> _R:
    """Return `read(*arguments)`; its ValueError gets the place, and forgets what it came from."""
    try:
        return read(*arguments)
    except ValueError as error:
        raise ValueError(f"{path}:{number}: {error}") from None
