"""Which versions may meet: what each cluster says of itself, and what is made of a difference.

What clusters send each other has a number, the protocol, and only equal ones understand each other.
Each cluster decodes what the others send and takes the outer step itself, so torch and dsx are to
be of one minor version: with another, something may round otherwise, and the clusters' outer
parameters drift apart by bits, which the parity check finds only later. Where that is meant,
`clusters.may_differ` of both names "versions.torch" or "versions.dsx". Everything else (patches,
builds, Python, numpy, the engine inside a cluster) touches what a cluster does alone: it is told in
a line.

This part of a hello keeps its form for good, so that any two versions can tell each other apart.
"""

from __future__ import annotations

import logging
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

PROTOCOL = 8  # of what clusters send each other; counted up where another dsx would not read it
NAMES = ("versions", "versions.dsx", "versions.torch")  # that `clusters.may_differ` may have
_RELEASES = {1: "0.1", 2: "0.1 or 0.2", 3: "0.2"}  # whose hellos do not name their dsx
_MODULES = ("dsx", "torch", "numpy", "deepspeed", "megatron.core")
_WHY = {
    "torch": "what each of them decodes and steps by itself may round otherwise",
    "dsx": "another minor version may compute with other bits",
}
Hello = Mapping[str, Any]
logger = logging.getLogger(__name__)


def own_versions() -> dict[str, str]:
    """Return those of Python, dsx, torch and the engines, as far as they are in use."""
    loaded = {name: sys.modules[name] for name in _MODULES if name in sys.modules}
    found = {name: str(getattr(one, "__version__", "unknown")) for name, one in loaded.items()}
    return {"python": platform.python_version(), **found}


def about_me(may_differ: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a hello says of the program that sends it."""
    named = [name for name in may_differ if name in NAMES]
    return {"protocol": PROTOCOL, "versions": own_versions(), "may_differ": named}


def refusal(own_id: int, own: Hello, peer: int, theirs: Hello) -> str | None:
    """Return why two clusters cannot train together, in words for either side; None if they can.

    A dsx of protocol 1, which has no number in its hello, does not look.
    """
    ours, other = _protocol(own), _protocol(theirs)
    if ours != other:
        newer, older = sorted([(ours, own_id, own), (other, peer, theirs)], key=_first)[::-1]
        return (
            f"cluster {newer[1]} runs {_release(newer[2])}, cluster {older[1]} "
            f"{_release(older[2])}: they send each other different messages; install "
            f"{_release(newer[2]).split(' (')[0]} in cluster {older[1]}"
        )
    for name in _WHY:
        mine, others = (str(one.get("versions", {}).get(name)) for one in (own, theirs))
        names = {"versions", f"versions.{name}"}
        is_meant = all(names & set(one.get("may_differ", ())) for one in (own, theirs))
        if _minor(mine) != _minor(others) and not is_meant:
            return (
                f"cluster {own_id} runs {name} {mine}, cluster {peer} {name} {others}: "
                f"{_WHY[name]}; install the same {name} in both, or, if it is meant, name "
                f"'versions.{name}' in clusters.may_differ of both"
            )
    return None


def tell_differences(hellos: Mapping[int, Hello]) -> None:
    """Log one line if clusters that have met run different versions."""
    everyone = {cluster: hellos[cluster].get("versions", {}) for cluster in sorted(hellos)}
    names = dict.fromkeys(name for versions in everyone.values() for name in versions)
    told: list[str] = []
    for name in names:
        of: dict[str, list[int]] = {}
        for cluster, versions in everyone.items():
            if name in versions:
                of.setdefault(versions[name], []).append(cluster)
        if len(of) > 1:
            each = ", ".join(f"{v} (cluster {', '.join(map(str, who))})" for v, who in of.items())
            told.append(f"{name} {each}")
    if told:
        logger.warning("clusters run different versions, which may differ: %s", "; ".join(told))


def _protocol(hello: Hello) -> int:
    return hello.get("protocol", 1)


def _first(entry: tuple[int, int, Hello]) -> int:
    return entry[0]


def _release(hello: Hello) -> str:
    number = _protocol(hello)
    versions = hello.get("versions")
    which = versions["dsx"] if versions else _RELEASES.get(number, "of before this was said")
    return f"dsx {which} (protocol {number})"


def _minor(version: str) -> str:
    """Return 2.6 of 2.6.1+cu126; what is no version counts as a whole."""
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version
