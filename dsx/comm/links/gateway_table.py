"""What a gateway is told by the rank that started it, one JSON object a line.

    {"number": 1, "ranks": {"rank-0.site-a.dsx": {"slot": 0, "host": "127.0.0.1", "port": 40001}}}
    {"number": 2, "ways": {"rank-0.site-b.dsx": {"host": "relay.example", "port": 29500}}}
    {"number": 3, "relays": [{"host": "relay.example", "port": 29500, "member": "site-a"}]}
    {"number": 4, "bytes_per_second": 25000000}
    {"signed": 7, "signature": "..."}
    {"number": 5, "counts": true}

What is named replaces all that was told of it before; what is not named stays.
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from typing import Any, cast

from dsx.comm.links.greetings import NUM_SLOTS, require_name

_KEYS = ("number", "ranks", "ways", "relays", "bytes_per_second", "signed", "signature", "counts")
MOST_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Rank:
    """Where a rank of this host listens, by number, and its slot."""

    slot: int
    place: Place


@dataclass(frozen=True)
class RelayPlace:
    """A relay, and the member that registers there."""

    place: Place
    member: str


@dataclass(frozen=True)
class Told:
    """One line; None is what it does not name."""

    number: int
    ranks: dict[str, Rank] | None
    ways: dict[str, Place] | None
    relays: list[RelayPlace] | None
    sets_rate: bool
    bytes_per_second: float | None
    signed: int | None
    signature: bytes
    asks_counts: bool


def read_line(line: bytes) -> Told:
    """Return what a line tells; ValueError names what does not fit and what is allowed."""
    try:
        told: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"no JSON: {line[:80]!r}") from None
    entries = _object(told, "a line")
    if unknown := sorted(entries.keys() - {*_KEYS}):
        raise ValueError(f"{unknown[0]!r} is unknown; allowed: {', '.join(_KEYS)}")
    return Told(
        number=_integer(entries.get("number", 0), "number", 0, 1 << 62),
        ranks=_ranks(entries["ranks"]) if "ranks" in entries else None,
        ways=_ways(entries["ways"]) if "ways" in entries else None,
        relays=_relays(entries["relays"]) if "relays" in entries else None,
        sets_rate="bytes_per_second" in entries,
        bytes_per_second=_rate(entries.get("bytes_per_second")),
        signed=_integer(entries["signed"], "signed", 0, 1 << 62) if "signed" in entries else None,
        signature=_hexadecimal(entries.get("signature", "")),
        asks_counts=entries.get("counts", False) is True,
    )


def _rate(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1000 <= value <= 1e12:
        raise ValueError(f"bytes_per_second={value!r} must be 1000 to 1e12, or null for no limit")
    return float(value)


def _ranks(value: object) -> dict[str, Rank]:
    ranks: dict[str, Rank] = {}
    slots: dict[int, str] = {}
    for name, entry in _object(value, "ranks").items():
        fields = _object(entry, name)
        slot = _integer(fields.get("slot"), f"{name}: slot", 0, NUM_SLOTS - 1)
        if slot in slots:
            raise ValueError(
                f"slot={slot} is that of {slots[slot]} and of {name}; each has its own"
            )
        slots[slot] = name
        place = _place(fields, name)
        try:
            ipaddress.ip_address(place.host)
        except ValueError:
            raise ValueError(f"{name}: host={place.host[:80]!r} must be an IP address") from None
        ranks[require_name(name)] = Rank(slot, place)
    return ranks


def _ways(value: object) -> dict[str, Place]:
    return {
        require_name(name): _place(_object(entry, name), name)
        for name, entry in _object(value, "ways").items()
    }


def _relays(value: object) -> list[RelayPlace]:
    if not isinstance(value, list):
        raise ValueError("relays must be a list")
    relays: list[RelayPlace] = []
    for entry in cast("list[object]", value):
        fields = _object(entry, "relays")
        member = fields.get("member")
        if not isinstance(member, str):
            raise ValueError(f"relays: member={member!r} must be a member's name")
        relays.append(RelayPlace(_place(fields, "relays"), member))
    return relays


def _place(fields: dict[str, object], name: str) -> Place:
    host = fields.get("host")
    if not isinstance(host, str) or not 0 < len(host) < 256 or not host.isprintable():
        raise ValueError(f"{name}: host={host!r} must be a host's name or address")
    return Place(host, _integer(fields.get("port"), f"{name}: port", 1, 65535))


def _object(value: object, name: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object")
    return cast("dict[str, object]", value)


def _integer(value: object, name: str, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name}={value!r} must be {least} to {most}")
    return value


def _hexadecimal(value: object) -> bytes:
    try:
        return bytes.fromhex(cast("str", value))
    except (TypeError, ValueError):
        raise ValueError("signature must be hexadecimal") from None
