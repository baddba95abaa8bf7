"""What a support file must not hold is taken out of text and JSON: keys, and who and where.

Keys are removed: values whose name says so (`--wandb-key`, "api_key"), credentials in URLs, and
what has the form of a known service's token. Host names, addresses and users get pseudonyms, one
name the same one throughout, so that "which host waited for which" stays readable. Names of hosts
are known from the run's own files; a name that occurs nowhere there as a host stays as it is.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

REMOVED = "<removed>"
_SECRET = r"(?:api[_-]?key|access[_-]?key|key|token|secret|password|passwd|pwd|credentials?|auth)"
_SECRET_NAME = re.compile(rf"(?:.*[_\-.])?{_SECRET}", re.I)
_HOST_NAME = re.compile(r"(?:.*[_\-.])?(?:addr|address|host|hostname|endpoint|rendezvous)", re.I)
_IN_TEXT = {  # what is removed, by the name under which it is counted
    "a private key": (
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    ),
    "credentials in a URL": r"(?<=://)[^/\s@\"']+(?=@)",
    "a bearer token": r"(?<=Bearer )\S+",
    "a key": (
        r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
        r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{12,}|AIza[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
        r"|[0-9a-f]{40})\b"
    ),
    "a value named like a key": (
        rf"((?:(?<=[\s\"'&?,;{{])|^)(?:--)?(?:[\w-]*[_-])?{_SECRET}[\"']?\s*[=:]\s*"
        rf"|--(?:[\w-]*[_-])?{_SECRET}\s+(?!--))"
        r"(\"[^\"]*\"|'[^']*'|[^\s\"',;}&]+)"
    ),
    "an e-mail address": r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b",
}
_PATTERNS = {what: re.compile(p, re.I | re.S | re.M) for what, p in _IN_TEXT.items()}
_ADDRESSES = {
    "mac": re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.I),
    "ip": re.compile(
        r"(?<![\w.:])\d{1,3}(?:\.\d{1,3}){3}(?![\w]|\.\d)"
        r"|(?<![\w.:])[0-9a-f]*:(?:[0-9a-f]*:)+(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-f]*)(?![\w:])",
        re.I,
    ),
}
_HOME = re.compile(r"(?:(?<=/home/)|(?<=/Users/))[^/\s\"':,;]+|(?<=C:\\Users\\)[^\\\s\"':,;]+")
_AT_PORT = re.compile(
    r"(?:(?<=://)|(?<=\bat )|(?<=\bon )|(?<=\bto )|(?<=\bfrom ))"
    r"(?P<host>[A-Za-z][\w-]*(?:\.[\w-]+)*)(?=:\d{2,5}\b)"
)
_STAY = {"localhost", "env", "tcp", "none", "null", "auto", "true", "false", "cluster_0"}


class Scrubber:
    """Takes out what must not be told; `found` counts it by kind. One for all files of a run."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._pseudonyms: dict[str, dict[str, str]] = {"host": {}, "ip": {}, "mac": {}, "user": {}}
        self._used: set[str] = set()  # pseudonyms
        self._hosts: re.Pattern[str] | None = None

    @property
    def pseudonyms(self) -> Mapping[str, int]:
        """How many names of each kind have been replaced."""
        return Counter(sorted(name.partition("-")[0] for name in self._used))

    def know_hosts(self, names: Iterable[str]) -> None:
        """Replace these names of hosts, and their first parts, wherever they stand."""
        for name in sorted({n.strip().strip("[]").lower() for n in names}, key=_longest_first):
            self._know_host(name)
        known = sorted(self._pseudonyms["host"], key=_longest_first)
        if known:
            choices = "|".join(map(re.escape, known))
            self._hosts = re.compile(rf"(?<![\w.-])(?:{choices})(?![\w-]|\.\w)", re.I)

    def text(self, text: str) -> str:
        """Return a text without what must not be told."""
        for what, pattern in _PATTERNS.items():
            text, count = pattern.subn(_remove, text)
            self.found[what] += count
        for kind, pattern in _ADDRESSES.items():
            text = pattern.sub(self._replaces(kind), text)
        if self._hosts is not None:
            text = self._hosts.sub(self._replaces("host"), text)
        text = _AT_PORT.sub(self._replaces("host"), text)
        return _HOME.sub(self._replaces("user"), text)

    def value(self, value: Any, name: str = "") -> Any:
        """Return a JSON value without it; `name` is the key that it stands under."""
        if name and _SECRET_NAME.fullmatch(name) and value not in (None, "", True, False):
            self.found["a value named like a key"] += 1
            return REMOVED
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            items = cast("Mapping[str, Any]", value).items()
            return {self.text(str(key)): self.value(inner, str(key)) for key, inner in items}
        if isinstance(value, list):
            values = cast("list[Any]", value)
            if name == "command":
                return self._command([str(word) for word in values])
            return [self.value(inner, name) for inner in values]
        return value

    def _command(self, words: Sequence[str]) -> list[str]:
        told: list[str] = []
        flag = ""
        for word in words:
            name, equals, given = word.lstrip("-").partition("=")
            if not word.startswith("-") and _SECRET_NAME.fullmatch(flag):
                told.append(REMOVED)
                self.found["a value named like a key"] += 1
            elif equals and given and _SECRET_NAME.fullmatch(name):
                told.append(f"{word.partition('=')[0]}={REMOVED}")
                self.found["a value named like a key"] += 1
            else:
                told.append(self.text(word))
            flag = name if word.startswith("-") and not equals else ""
        return told

    def _know_host(self, name: str) -> None:
        first = name.partition(".")[0]
        if not name or name in _STAY or _is_address(name) or not re.search(r"[a-z]", first):
            return
        pseudonym = self._pseudonym("host", name)
        self._pseudonyms["host"].setdefault(first, pseudonym)

    def _replaces(self, kind: str) -> Callable[[re.Match[str]], str]:
        def replace(match: re.Match[str]) -> str:
            pseudonym = self._pseudonym(kind, match[0])
            if pseudonym != match[0]:
                self._used.add(pseudonym)
            return pseudonym

        return replace

    def _pseudonym(self, kind: str, name: str) -> str:
        known, key = self._pseudonyms[kind], name.lower()
        if kind == "ip" and not _is_somebody(name):
            return name
        if key in _STAY or re.fullmatch(rf"{kind}-\d+", key):
            return name
        return known.setdefault(key, f"{kind}-{len({*known.values()}) + 1}")


def hosts_in(value: Any, name: str = "") -> set[str]:
    """Return what a run.json calls hosts: under such keys, and behind such flags of a command."""
    if isinstance(value, str):
        return {_host_of(value)} if _HOST_NAME.fullmatch(name) else set()
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {host for key, inner in items for host in hosts_in(inner, str(key))}
    if not isinstance(value, list):
        return set()
    values = cast("list[Any]", value)
    if name != "command":
        return {host for inner in values for host in hosts_in(inner, name)}
    words = [str(word).lstrip("-").partition("=") for word in values]
    pairs = [(flag, given) for flag, equals, given in words if equals]
    pairs += [(flag, word) for (flag, _, _), word in zip(words, map(str, values[1:]), strict=False)]
    return {_host_of(given) for flag, given in pairs if _HOST_NAME.fullmatch(flag)}


def _host_of(address: str) -> str:
    """Return the host of `tcp://host:port`, `host:port` or `host`."""
    place = address.rpartition("//")[2].rpartition("@")[2].partition("/")[0]
    return re.sub(r":\d*$", "", place)


def _longest_first(name: str) -> tuple[int, str]:
    return -len(name), name


def _remove(match: re.Match[str]) -> str:
    return f"{match[1]}{REMOVED}" if match.re.groups else REMOVED


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_somebody(name: str) -> bool:
    """Whether a text is the address of some host, and not of this one or of none."""
    if not _is_address(name):
        return False
    address = ipaddress.ip_address(name)
    return not (address.is_loopback or address.is_unspecified)
