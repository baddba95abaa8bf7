"""Which run a command means, and with whose key: from the configuration that the run has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dsx.config.schema import load_config

if TYPE_CHECKING:  # libzmq is an extra
    from dsx.comm.links.settings import LinkSettings
    from dsx.ctl.visit import Visit


def open_visit(config: str, cluster_id: int | None, seconds: float) -> tuple[Visit, LinkSettings]:
    """Return a visit to the run of a configuration; ValueError for a run that has no links."""
    from dsx.ctl.visit import Visit

    settings = load_config(config)
    link = settings.link.settings
    if link is None or not link.members:
        raise ValueError(
            f'{config} has no "link" with "members": its clusters meet over gloo, so the run has '
            "no links that dsx ctl could reach; a signal to any of its ranks ends all of them"
        )
    if link.security != "curve":
        raise ValueError(
            f'{config} has link.security "none": whoever reaches the port could give orders; dsx '
            'ctl takes "security": "curve" and a member\'s key'
        )
    own = settings.clusters.cluster_id if cluster_id is None else cluster_id
    own = _whose_key(link) if own is None else own
    if not 0 <= own < len(link.names):
        raise ValueError(f"cluster {own}: say whose key to use, 0 to {len(link.names) - 1}")
    return Visit(link, own, seconds), link


def _whose_key(link: LinkSettings) -> int:
    """Return the one member whose secret is in the folder of keys; ValueError if there are more."""
    held = [m for m, name in enumerate(link.names) if (Path(link.keys) / f"{name}.secret").exists()]
    if len(held) != 1:
        names = ", ".join(link.names[m] for m in held) or "nobody"
        raise ValueError(
            f"{link.keys} holds the secret of {names}: say whose key to use, by --cluster-id 0 to "
            f"{len(link.names) - 1}"
        )
    return held[0]
