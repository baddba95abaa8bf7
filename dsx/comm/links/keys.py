"""What a member holds: its own keys, and the public ones of all members.

A member is a name with one key, or two while it changes them. It uses the older of its own keys
until that one is revoked in its own folder: by then the others have the next, and nothing stops.
Whoever opens a line to it tries its keys in order.
"""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass
from pathlib import Path

from dsx.comm.links.key_files import (
    SecretKey,
    public_path,
    read_secret,
    require_kept_from_others,
    secret_path,
)
from dsx.comm.links.key_lines import require_name
from dsx.comm.links.members import MembersFolder, Standing, WatchedFile
from dsx.comm.links.primitives import as_z85, is_signed, sign

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Now:
    """All that readers in other threads look at, replaced as one."""

    own: SecretKey
    is_member: bool
    standing: Standing


class Keys:
    """One member's keys and everybody's public ones; `load` makes it.

    One thread calls `reload`, any may call the rest.
    """

    def __init__(self, directory: Path, name: str, group_read: bool) -> None:
        self.directory, self.name = directory, name
        self._folder = MembersFolder(directory)
        self._secret = WatchedFile(
            secret_path(directory, name),
            lambda: read_secret(directory, name, group_read=group_read),
        )
        self._told: set[str] = set()
        self._now: _Now

    @classmethod
    def load(cls, directory: str | Path, name: str, *, group_read: bool = False) -> Keys:
        """Read `directory/NAME.secret` and `directory/members/`.

        `group_read` allows the former to be 0640, as mounted secrets are. ValueError names the
        file, the line and what to do: for what is missing, too open, of another owner, malformed,
        told under two names, or a member without its own public line.
        """
        keys = cls(Path(directory), require_name(name), group_read)
        keys._secret.look()
        problems = [keys._secret.problem] if keys._secret.problem else keys._folder.look()
        if problems:
            raise ValueError(problems[0])
        require_kept_from_others(keys.directory, keys.directory.stat())
        own = keys._choose(None)
        if own is None:
            raise ValueError(keys._why_none())
        keys._now = _Now(own, True, keys._folder.standing)
        return keys

    def __repr__(self) -> str:
        return f"Keys({str(self.directory)!r}, {self.name!r}, {self.fingerprint})"

    def __reduce__(self) -> str:
        raise TypeError("keys are not pickled: load them where they are needed")

    @property
    def curve_public(self) -> bytes:
        """Return the own public key of the line: 40 bytes of Z85, as pyzmq takes it."""
        return as_z85(self._now.own.public.curve)

    @property
    def curve_secret(self) -> bytes:
        """Return the own secret key of the line: 40 bytes of Z85, as pyzmq takes it."""
        return as_z85(self._now.own.curve_secret)

    @property
    def fingerprint(self) -> str:
        """Return that of the own key in use, as `dsx keys list` shows it."""
        return self._now.own.public.fingerprint

    @property
    def is_member(self) -> bool:
        """Whether the own key in use stands: False once it is revoked, and there is no next."""
        return self._now.is_member

    def names(self) -> list[str]:
        """Return all members with a key that stands, sorted, the own name among them."""
        return sorted(self._now.standing.keys)

    def member_of(self, curve_public: bytes) -> str | None:
        """Return whose key of the line this is, from its 32 bytes as ZAP gives them.

        None for a key of nobody, and for a revoked one.
        """
        return self._now.standing.by_curve.get(curve_public)

    def curve_keys_of(self, name: str) -> list[bytes]:
        """Return a member's keys of the line in Z85, the older first; none for who is no member."""
        return [as_z85(key.curve) for key in self._now.standing.keys.get(name, ())]

    def fingerprints_of(self, name: str) -> list[str]:
        """Return those of a member's keys, in the order of `curve_keys_of`."""
        return [key.fingerprint for key in self._now.standing.keys.get(name, ())]

    def sign(self, data: bytes) -> bytes:
        """Return the 64 bytes of the own signature of data, which has to say what it is for."""
        return sign(self._now.own.sign_seed, data)

    def verify(self, name: str, data: bytes, signature: bytes) -> bool:
        """Whether a member has signed data, with any key of its that stands."""
        keys = self._now.standing.keys.get(name, ())
        return any(is_signed(key.sign, data, signature) for key in keys)

    def reload(self) -> set[str]:
        """Read what has changed in the folder; return the names whose keys are others now.

        The own name is among them where another own key is in use, or none. What cannot be read is
        warned of once, and what was there before stays in force. Cheap where nothing has changed.
        """
        before = self._now
        self._secret.look()
        problems = [self._secret.problem] if self._secret.problem else []
        problems += self._folder.look()
        for problem in problems:
            if problem not in self._told:
                logger.warning("%s; the keys of before stay in force", problem)
        self._told = set(problems)
        own, standing = self._choose(before.own), self._folder.standing
        self._now = _Now(own or before.own, own is not None, standing)
        names = before.standing.keys.keys() | standing.keys.keys()
        changed = {n for n in names if before.standing.keys.get(n) != standing.keys.get(n)}
        if own != before.own:
            changed.add(self.name)
        return changed

    def _choose(self, current: SecretKey | None) -> SecretKey | None:
        """Return the own key to use: the current one while it stands, then the oldest that does."""
        stand = self._folder.standing.keys.get(self.name, ())
        candidates = [*([current] if current else []), *(self._secret.value or ())]
        return next((secret for secret in candidates if secret.public in stand), None)

    def _why_none(self) -> str:
        secret = secret_path(self.directory, self.name)
        public = public_path(self.directory, self.name)
        own = [s.public for s in self._secret.value or ()]
        left = [key for key in own if not self._folder.is_revoked(key)]
        where = f"--dir {shlex.quote(str(self.directory))}"
        if not left:
            gone = ", ".join(key.fingerprint for key in own)
            return (
                f"{secret}: its key {gone} is revoked; move the file away, and make another: "
                f"`dsx keys new {self.name} {where}`"
            )
        fix = f"dsx keys add '{left[0].line}' {where}"
        if self.name not in self._folder.standing.keys:
            return f"{public}: the own public line is not there; `{fix}`"
        listed = ", ".join(key.fingerprint for key in self._folder.standing.keys[self.name])
        return (
            f"{public} holds {listed}, and {secret} another key, {left[0].fingerprint}; if that is "
            f"the right one: `dsx keys revoke {self.name} {where}`, then `{fix}`"
        )
