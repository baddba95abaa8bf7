"""The section "link": how messages travel between clusters, and who may take part.

The line of text below a key is what the generated reference and editors say of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dsx.comm.address import parse_address
from dsx.comm.links.pace import Hours
from dsx.comm.links.settings import LinkSettings
from dsx.comm.multistream import MAX_STREAMS
from dsx.config.files import ConfigError, shown

_LONGEST = 3e7  # seconds, about a year
_Text = Annotated[str, Field(min_length=1)]


class LinkConfig(BaseModel):
    """How a transfer uses the network."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    streams: int = Field(default=1, ge=1, le=MAX_STREAMS)
    """TCP connections that each message is cut over, for every fragment and peer; the same in all
    clusters. More of them fill a long or lossy line; no bit of a result depends on them."""

    security: Literal["curve", "none"] | None = None
    """Whether what clusters tell each other is encrypted, between members alone ("curve", with keys
    of `dsx keys`), or neither ("none"). null: "none" where all addresses are of this host; anywhere
    else it has to be said."""

    transport: Literal["link", "gloo"] | None = None
    """What moves messages: "link" (libzmq, one port, connections that come back) or "gloo" (without
    security alone); null: "link" with "curve", "gloo" with "none"."""

    members: tuple[_Text, ...] = ()
    """The clusters' names, by their ids, as `dsx keys` knows them, each with the address at which
    its first rank can be called: ["berlin=203.0.113.7:29400", "oslo"]; one without can only call.
    They meet at the first address, without `clusters.rendezvous`."""

    relay: _Text | None = None
    """The address of a `dsx relay`, HOST:PORT, at which members without an address reach each
    other; null: there is none."""

    arbiter: _Text | None = None
    """The member whose half goes on where a cut leaves two halves: with two members it goes on
    alone, and the other one never does. null: neither half does, both save and end."""

    keys: _Text = "keys"
    """The folder with this member's secret key and everybody's public ones."""

    group_read: bool = False
    """Whether the secret key may be readable by its group, as mounted secrets need."""

    host: _Text | None = None
    """The address to listen on, such as "127.0.0.1"; null: all of this host's, or the loopback
    alone where all members are on this host."""

    port: int = Field(default=29400, ge=1, le=65535)
    """The port to listen on."""

    suspect_seconds: float = Field(default=30.0, ge=1.0, le=_LONGEST)
    """After how long a silent peer counts as lost, in seconds."""

    rate_mbit: float | None = Field(default=None, gt=0, le=1e7)
    """The most that a cluster sends over its links, in Mbit/s; null: what the line takes."""

    hours: tuple[_Text, ...] = ()
    """Other rates at some hours of the host's day: ["08:00-18:00=200"], in Mbit/s."""

    heal_rate_mbit: float | None = Field(default=None, gt=0, le=1e7)
    """The most that a cluster which comes back takes from the others while it heals, in Mbit/s;
    null: what the line takes."""

    dscp: int = Field(default=0, ge=0, le=63)
    """The mark of all packets that routers sort traffic by, such as 8 for what may wait (CS1)."""

    @property
    def uses_links(self) -> bool:
        """Whether messages go over links."""
        return self.transport == "link" or self.security == "curve"

    @property
    def settings(self) -> LinkSettings | None:
        """What a world needs to open links; None where it takes gloo."""
        if not self.uses_links:
            return None
        given = self.model_dump(exclude={"transport", "security", "heal_rate_mbit"})
        return LinkSettings(security=self.security or "none", **given)

    def common(self) -> dict[str, Any]:
        """Return what has to be the same in all clusters."""
        return self.model_dump(include={"streams", "security", "transport", "members", "arbiter"})


def check_link(link: LinkConfig, num_clusters: int, rendezvous: str) -> None:
    """Raise ConfigError for a link that cannot be, or that nobody has said may be open."""
    names = [member.partition("=")[0] for member in link.members]
    if link.security == "curve" and link.transport == "gloo":
        raise ConfigError(
            "dsx.link.transport='gloo' with security='curve': gloo does not encrypt; leave "
            "transport out"
        )
    if link.security == "curve" and not link.members:
        raise ConfigError(
            'dsx.link.members is missing: security="curve" needs the names of all clusters, as '
            '`dsx keys` knows them; write "members": ["berlin=203.0.113.7:29400", "oslo"]'
        )
    if not link.uses_links and (link.rate_mbit is not None or link.hours or link.dscp):
        raise ConfigError(
            'dsx.link.rate_mbit, hours and dscp are of links: add "security": "curve" (or '
            '"transport": "link"), or leave them out'
        )
    for text in link.hours:
        try:
            Hours.read(text)
        except ValueError as error:
            raise ConfigError(f"dsx.link.hours: {error}") from None
    if link.members and not link.uses_links:
        raise ConfigError(
            'dsx.link.members needs "security": "curve" (or "transport": "link" without keys); '
            "add it, or leave members out"
        )
    if link.members and len(names) != num_clusters:
        raise ConfigError(
            f"dsx.link.members has {len(names)} names, but num_clusters={num_clusters}: "
            "give each cluster one, in the order of their ids"
        )
    if len(set(names)) != len(names):
        raise ConfigError(
            f"dsx.link.members names a cluster twice: {', '.join(names)}; give each its own name"
        )
    for member in link.members:
        if "=" in member and not _is_address(member.partition("=")[2]):
            raise ConfigError(
                f"dsx.link.members has {member!r}: write NAME=HOST:PORT, or NAME for a cluster "
                "that can only call"
            )
    if link.arbiter is not None and link.arbiter not in names:
        raise ConfigError(
            f"dsx.link.arbiter={shown(link.arbiter)} is none of link.members; use one of "
            f"{', '.join(map(shown, names)) or 'them (there are none)'}"
        )
    if link.relay is not None and link.security != "curve":
        raise ConfigError(
            'dsx.link.relay takes the members\' keys; set "security": "curve", or leave it out'
        )
    if link.relay is not None and not _is_address(link.relay):
        raise ConfigError(f"dsx.link.relay={link.relay!r} is no address; write HOST:PORT")
    if link.members and rendezvous != "env://":
        raise ConfigError(
            f"dsx.clusters.rendezvous={rendezvous!r} beside dsx.link.members: clusters "
            "meet at the first member's address; leave rendezvous out"
        )


def require_said(link: LinkConfig, rendezvous: str, environ: Mapping[str, str]) -> str | None:
    """Raise ConfigError where an open line leaves this host and nobody has said that it may.

    Returns what to tell at the start, where somebody has. `environ` is a launcher's.
    """
    where = _outside(link, rendezvous, environ)
    if where is None or link.security == "curve":
        return None
    if link.security is None:
        raise ConfigError(
            f"dsx.link.security is missing: clusters meet {where}, which is not this host alone, "
            'and would be neither encrypted nor told from strangers; write "link": {"security": '
            '"curve", "members": [...]} with keys of `dsx keys new`, or {"security": "none"} '
            "(--dsx-link-security none) where nobody else reaches that line"
        )
    return (
        f"link.security none: clusters meet {where}; whoever reaches that line reads all that they "
        "send, and can join or change it"
    )


def _outside(link: LinkConfig, rendezvous: str, environ: Mapping[str, str]) -> str | None:
    """Return where clusters meet, if that is beyond this host."""
    addresses = [member.partition("=")[2] for member in link.members if "=" in member]
    if rendezvous != "env://":
        addresses = [rendezvous.removeprefix("tcp://")]
    for address in addresses:
        host = parse_address(f"tcp://{address}")[0]
        if not (host in ("localhost", "::1") or host.startswith("127.")):
            return f"at {address}"
    local = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE")
    if rendezvous == "env://" and not addresses and local and local != environ.get("WORLD_SIZE"):
        return "over the hosts of one launcher"
    return None


def _is_address(text: str) -> bool:
    try:
        parse_address(f"tcp://{text}")
    except ValueError:
        return False
    return True
