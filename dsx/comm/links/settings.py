"""What a run says of its links; readable without libzmq."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkSettings:
    """The "link" part of the configuration; `members` are NAME or NAME=HOST:PORT, by cluster's id.

    `security` is "curve" or "none". `host` is where ranks listen, and `port` that of a host.
    """

    security: str = "none"
    members: tuple[str, ...] = ()
    keys: str = "keys"
    group_read: bool = False
    host: str | None = None
    port: int = 29400
    streams: int = 1
    suspect_seconds: float = 30.0
    rate_mbit: float | None = None
    hours: tuple[str, ...] = ()
    dscp: int = 0
    relay: str | None = None
    arbiter: str | None = None

    @property
    def names(self) -> list[str]:
        """The members' names, by their clusters' ids."""
        return [member.partition("=")[0] for member in self.members]

    def address_of(self, cluster_id: int) -> str | None:
        """Return where a cluster's first rank can be called; None if it only calls."""
        return self.members[cluster_id].partition("=")[2] or None if self.members else None

    @property
    def arbiter_id(self) -> int | None:
        """The cluster whose half of an even split goes on, if one is to."""
        return None if self.arbiter is None else self.names.index(self.arbiter)

    @property
    def through_relay(self) -> list[int]:
        """Return the clusters that reach each other at a relay: those that only call."""
        silent = [m for m in range(len(self.members)) if self.address_of(m) is None]
        return silent if self.relay is not None and len(silent) > 1 else []

    @property
    def listens_at(self) -> str:
        """Return where ranks listen: at what was said, or where the members' addresses are."""
        hosts = [m.partition("=")[2].rpartition(":")[0] for m in self.members if "=" in m]
        is_local = all(host in ("127.0.0.1", "localhost", "[::1]") for host in hosts)
        return self.host or ("127.0.0.1" if is_local else "0.0.0.0")
