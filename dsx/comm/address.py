"""Addresses as they are written: readable without torch, so that they are checked early."""

from __future__ import annotations

from urllib.parse import urlsplit

_LAST_PORT = 65_535


def bracketed(host: str) -> str:
    """Return a host as it is written before a port."""
    return f"[{host}]" if ":" in host else host


def parse_address(rendezvous: str) -> tuple[str, int]:
    """Split `tcp://host:port`; ValueError says what is allowed."""
    try:
        parts = urlsplit(rendezvous)
        host, port = parts.hostname, parts.port
    except ValueError:  # brackets that do not close, a port of letters or beyond 65535
        parts, host, port = None, None, None
    if parts is None or parts.scheme != "tcp" or not host or not port or not host.isprintable():
        raise ValueError(
            f"clusters.rendezvous={rendezvous[:120]!r} must be 'env://' (one launcher over all "
            "clusters) or 'tcp://host:port' (one launcher per cluster); write, for example, "
            "tcp://10.0.0.1:29400"
        )
    return host, port


def page_address(place: str, num_clusters: int = 1) -> tuple[str, int]:
    """Split the HOST:PORT of pages; ValueError unless each cluster m has its PORT + m."""
    try:
        parts = urlsplit(f"//{place}")
        host, port = parts.hostname, parts.port
        is_plain = parts.netloc == place and "@" not in place and place.isprintable()
    except ValueError:  # brackets that do not close, a port of letters or beyond 65535
        host, port, is_plain = None, None, False
    if not host or not port or not is_plain:
        raise ValueError(
            f"metrics.prometheus={place[:120]!r} must be HOST:PORT, of which cluster m serves "
            'PORT + m; write, for example, "127.0.0.1:9464", which this host alone can reach'
        )
    if port + num_clusters - 1 > _LAST_PORT:
        raise ValueError(
            f"metrics.prometheus={place[:120]!r} has no port for cluster {num_clusters - 1}: "
            f"cluster m serves at {port} + m, and {_LAST_PORT} is the last port; give "
            f"{_LAST_PORT - num_clusters + 1} or less"
        )
    return host, port


def link_address(place: str) -> str:
    """Return HOST:PORT of a link, as `--join` has it; ValueError says what is allowed."""
    try:
        parts = urlsplit(f"//{place}")
        host, port = parts.hostname, parts.port
        is_plain = parts.netloc == place and "@" not in place and place.isprintable()
    except ValueError:
        host, port, is_plain = None, None, False
    if not host or not port or not is_plain or " " in place:
        raise ValueError(
            f"--join {place[:120]!r} must be HOST:PORT of a cluster's link, as link.members has "
            "it; write, for example, --join 10.0.0.1:29400"
        )
    return place
