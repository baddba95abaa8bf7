"""Clusters of one process with keys of their own, whose first ranks answer members' tools."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.comm.links.desk import Desk
from dsx.comm.links.key_changes import add_key, make_key
from dsx.comm.links.link import Link
from dsx.comm.links.settings import LinkSettings
from dsx.comm.links.trust import open_link
from tests.distributed import free_port

NAMES = ("berlin", "oslo", "rome")


@dataclass
class Run:
    """Three clusters, of which berlin and oslo can be called."""

    settings: list[LinkSettings]
    links: list[Link]
    desks: list[Desk]
    configs: list[Path]


def make_settings(folder: Path) -> list[LinkSettings]:
    """Return what the members' configurations say, each with keys of its own below `folder`."""
    made = {name: make_key(folder / name, name)[-1] for name in NAMES}
    for name in NAMES:
        for other in NAMES:
            if other != name:
                add_key(folder / name, made[other])
    ports = [free_port(), free_port(), 29400]
    members = tuple(f"{name}=127.0.0.1:{ports[m]}" if m < 2 else name
                    for m, name in enumerate(NAMES))  # fmt: skip
    return [
        LinkSettings("curve", members, str(folder / name), port=ports[m])
        for m, name in enumerate(NAMES)
    ]


def write_config(path: Path, settings: LinkSettings, **link: Any) -> Path:
    """Write a configuration with such a link."""
    block: dict[str, Any] = {
        "security": "curve", "members": settings.members, "keys": settings.keys,
        "port": settings.port, **link,
    }  # fmt: skip
    dsx = {"preset": "diloco", "clusters": {"num_clusters": 3}, "link": block}
    path.write_text(json.dumps({"dsx": dsx}))
    return path


@contextlib.contextmanager
def three_clusters(folder: Path) -> Generator[Run]:
    """Yield clusters that have met; their desks serve what is put up there."""
    settings = make_settings(folder)
    links: list[Link] = []
    try:
        for m, own in enumerate(settings):
            links.append(open_link(own, m, 0, 1, own.port if m < 2 else 0, host="127.0.0.1"))
        for m, link in enumerate(links):
            for other in range(3):
                if other != m:
                    address = settings[0].address_of(other) if other < m else None
                    link.expect(other, 0, address)
        for m, link in enumerate(links):
            for other in range(3):
                if other != m:
                    link.wait_for(other, 0, 20)
        desks = [Desk(link, NAMES) for link in links]
        for m, desk in enumerate(desks):
            desk.facts.append(lambda m=m: {"state": "training", "step": 10 + m, "round": 2})
        configs = [write_config(folder / f"{m}.json", own) for m, own in enumerate(settings)]
        yield Run(settings, links, desks, configs)
    finally:
        for link in links:
            link.close()
