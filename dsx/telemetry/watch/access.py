"""Who may read the page, and what a browser is told about it.

At a loopback address whoever is on this host reads it, with `--token` those who have the token;
at any other address the token is always asked for. It comes once, in the page's address, and stays
with the browser in a cookie that scripts cannot read. Of other sites' requests a link that is
followed carries it, as from a chat, and no other does: no frame, no script and no picture.

A page of another site may have its name point to this host (DNS rebinding), and so read what is
served here without a token: a request has to be for a name of this host, unless it has the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from urllib.parse import urlsplit

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is reached from this host alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Access:
    """Decides on requests; `token` is None where none is asked for."""

    def __init__(self, host: str, asks_for_token: bool) -> None:
        has_token = asks_for_token or not is_loopback(host)
        self.token = secrets.token_urlsafe(24) if has_token else None

    def is_named_rightly(self, host: str | None) -> bool:
        """Whether a request's Host is a name of this host; any is where a token is asked for."""
        if self.token is not None:
            return True
        try:
            return is_loopback(urlsplit(f"//{host or ''}").hostname or "")
        except ValueError:
            return False

    def has_token(self, given: str | None) -> bool:
        """Whether somebody has given the token."""
        if self.token is None:
            return True
        return hmac.compare_digest((given or "").encode(), self.token.encode())

    def cookie_name(self, port: int) -> str:
        """Return a name that pages of one host do not share: cookies know no ports."""
        return f"dsx_watch_{port}"

    def in_cookie(self, header: str | None, port: int) -> str | None:
        """Return what a request's cookie has."""
        for cookie in (header or "").split(";"):  # others may have any form
            name, _, value = cookie.strip().partition("=")
            if name == self.cookie_name(port):
                return value
        return None
