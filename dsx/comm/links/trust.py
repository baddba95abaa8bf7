"""Whose key is whose in one run, and the link that is opened with it."""

from __future__ import annotations

from collections.abc import Sequence

from dsx.comm.links.keys import Keys
from dsx.comm.links.link import Link
from dsx.comm.links.options import LinkOptions
from dsx.comm.links.pace import Hours, Pace
from dsx.comm.links.settings import LinkSettings
from dsx.comm.links.sockets import Trust

RELAYED_GRACE_SECONDS = 3.0  # both sites may have to register first, and then one calls again


class MemberTrust:
    """The keys of a folder, for clusters instead of names."""

    def __init__(self, keys: Keys, names: Sequence[str]) -> None:
        self._keys, self._names = keys, list(names)

    @property
    def public_key(self) -> bytes:
        """Of this member."""
        return self._keys.curve_public

    @property
    def secret_key(self) -> bytes:
        """Of this member."""
        return self._keys.curve_secret

    def cluster_of(self, public_key: bytes) -> int | None:
        """Return the cluster whose key it is; None for members that take no part, too."""
        name = self._keys.member_of(public_key)
        return self._names.index(name) if name in self._names else None

    def keys_of(self, cluster_id: int) -> Sequence[bytes]:
        """Return the public keys a cluster may have now."""
        return self._keys.curve_keys_of(self._names[cluster_id])

    def sign(self, data: bytes) -> bytes:
        """Return the signature of this member, with the key that it has now."""
        self._keys.reload()
        return self._keys.sign(data)

    def reload(self) -> set[int]:
        """Return the clusters whose keys have changed in the folder."""
        changed = self._keys.reload()
        return {self._names.index(name) for name in changed if name in self._names}


def load_trust(settings: LinkSettings, cluster_id: int) -> MemberTrust | None:
    """Return the keys of a run's members; None without security. ValueError says what is wrong."""
    if settings.security == "none":
        return None
    names = settings.names
    keys = Keys.load(settings.keys, names[cluster_id], group_read=settings.group_read)
    missing = [name for name in names if not keys.curve_keys_of(name)]
    if missing:
        raise ValueError(
            f"link.members: {settings.keys}/members has no key of {', '.join(missing)}; it has "
            f"{', '.join(keys.names())}: add the line that `dsx keys new` has printed there, by "
            "`dsx keys add LINE`"
        )
    return MemberTrust(keys, names)


def open_link(
    settings: LinkSettings,
    cluster_id: int,
    rank: int,
    world_size: int,
    port: int = 0,
    host: str | None = None,
) -> Link:
    """Return this rank's link, which listens at `port`, any free one by default, of `host`.

    That is where the settings have it by default. It has its part of the cluster's rate: that by
    `world_size`.
    """
    trust: Trust | None = load_trust(settings, cluster_id)
    is_relayed = cluster_id in settings.through_relay
    options = LinkOptions(
        host or settings.listens_at,
        port,
        settings.streams,
        settings.suspect_seconds,
        RELAYED_GRACE_SECONDS if is_relayed else LinkOptions.grace_seconds,
        settings.dscp,
    )
    hours = [Hours.read(text) for text in settings.hours]
    pace = Pace(settings.rate_mbit, hours, share=1 / world_size)
    return Link(cluster_id, rank, trust, options, pace)
