"""Keys as they are written: a line of text for each, the same in files, mail and on a terminal.

    dsx-key-1 NAME curve:BASE64 sign:BASE64 made:YYYY-MM-DD
    dsx-revoked-1 YYYY-MM-DD NAME curve:BASE64 sign:BASE64 made:YYYY-MM-DD

A key has one spelling, so that equal keys are equal lines. Every error is a ValueError without the
line's place, which the caller knows, and none repeats what may be secret.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, field
from datetime import date

KEY_BYTES = 32
VERSION = "dsx-key-1"
REVOKED_VERSION = "dsx-revoked-1"
NAME_RULE = "letters, digits, - and _, the first of them a letter or digit, at most 32"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_FORM = "NAME curve:BASE64 sign:BASE64 made:YYYY-MM-DD"


@dataclass(frozen=True)
class PublicKey:
    """What others hold of a member: `curve` and `sign` are 32 bytes each; the day is a note."""

    name: str
    curve: bytes
    sign: bytes
    made: date = field(compare=False)

    @property
    def line(self) -> str:
        """Return it as written in a file."""
        return f"{VERSION} {self._fields} made:{self.made.isoformat()}"

    @property
    def fingerprint(self) -> str:
        """Return 80 bits of its SHA-256 that people can compare, such as `mzxw-6ytb-oi3d-k5dp`."""
        digest = hashlib.sha256(f"{VERSION} {self._fields}".encode()).digest()
        text = base64.b32encode(digest[:10]).decode().lower()
        return "-".join(text[i : i + 4] for i in range(0, 16, 4))

    def shares_with(self, other: PublicKey) -> bool:
        """Whether both have the key of the line, or the one that signs, in common."""
        return self.curve == other.curve or self.sign == other.sign

    @property
    def _fields(self) -> str:
        return f"{self.name} curve:{to_base64(self.curve)} sign:{to_base64(self.sign)}"


@dataclass(frozen=True)
class Revoked:
    """A key that is not to be taken any more, and since when."""

    key: PublicKey
    on: date

    @property
    def line(self) -> str:
        """Return it as written in a file."""
        return f"{REVOKED_VERSION} {self.on.isoformat()} {self.key.line.partition(' ')[2]}"


def require_name(name: str) -> str:
    """Return a member's name; ValueError for what cannot be one."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:40]!r} cannot be a member's name: {NAME_RULE}")
    return name


def read_key(line: str) -> PublicKey:
    """Return the public key in a line."""
    version, _, rest = line.strip().partition(" ")
    if version != VERSION:
        raise ValueError(f"it does not begin with {VERSION}; the form is: {VERSION} {_FORM}")
    return _key(rest)


def read_revoked(line: str) -> Revoked:
    """Return the revoked key in a line."""
    version, _, rest = line.strip().partition(" ")
    if version != REVOKED_VERSION:
        raise ValueError(
            f"it does not begin with {REVOKED_VERSION}; "
            f"the form is: {REVOKED_VERSION} YYYY-MM-DD {_FORM}"
        )
    on, _, rest = rest.partition(" ")
    day = _day(on)
    return Revoked(_key(rest), day)


def read_field(word: str, field: str) -> bytes:
    """Return the 32 bytes of `field:BASE64`; an error does not repeat them."""
    name, _, text = word.partition(":")
    if name != field:
        raise ValueError(f"{field}: is not where it belongs")
    try:
        value = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        value = b""
    if len(value) != KEY_BYTES or to_base64(value) != text:
        raise ValueError(f"what follows {field}: is not {KEY_BYTES} bytes in base64")
    return value


def to_base64(value: bytes) -> str:
    """Return bytes as they stand in a line."""
    return base64.b64encode(value).decode()


def _key(rest: str) -> PublicKey:
    words = rest.split()
    if len(words) != 4:
        raise ValueError(
            f"it has {len(words)} fields behind its version, not 4; the form is: {VERSION} {_FORM}"
        )
    name, curve, sign, made = words
    if not made.startswith("made:"):
        raise ValueError("made: is not where it belongs")
    return PublicKey(
        require_name(name),
        read_field(curve, "curve"),
        read_field(sign, "sign"),
        _day(made.removeprefix("made:")),
    )


def _day(text: str) -> date:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        day = None
    if day is None or day.isoformat() != text:
        raise ValueError(f"{text[:20]!r} is no date; its form is YYYY-MM-DD")
    return day
