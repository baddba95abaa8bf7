"""Where clusters meet, as it is written: readable without torch, so that it is checked early."""

from __future__ import annotations

from urllib.parse import urlsplit


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
