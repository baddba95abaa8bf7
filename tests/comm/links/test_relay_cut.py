"""Links through a relay whose lines are cut: sites register anew, and what was sent arrives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsx.comm.links.host_port import HostGateway, open_on_host
from dsx.comm.links.settings import LinkSettings
from dsx.comm.topology import RankInfo
from tests.comm.links.clusters import Line, check, groups_of, swap
from tests.comm.links.folders import sites
from tests.comm.links.test_relay import Relay
from tests.distributed import free_port


@pytest.mark.ci
@pytest.mark.parametrize("who", [[0], [1], [0, 1]], ids=["called", "calling", "both"])
def test_a_transfer_goes_on_though_lines_to_the_relay_are_cut(
    tmp_path: Path, who: list[int]
) -> None:
    torch.manual_seed(1)
    folders = sites(tmp_path, "a", "b", "relay-keys")
    relay = Relay(folders["relay-keys"])
    lines = [Line(relay.port) for _ in range(2)]
    links = []
    try:
        for m, name in enumerate("ab"):
            settings = LinkSettings(
                "curve", ("a", "b"), str(folders[name]), port=free_port(), relay=lines[m].address
            )
            links.append(open_on_host(settings, RankInfo(m, 2, 0, 1), None, "", 20.0)[0])
        links[0].expect(1, 0, None)
        links[1].expect(0, 0, links[1].ways[0, 0])
        for m in range(2):
            links[m].wait_for(1 - m, 0, 20)
        groups = groups_of(links)
        for tag in range(3):
            works = swap(groups, 20_000_000, tag)
            for m in who:
                lines[m].cut()
            check(works)
    finally:
        for link in links:
            link.close()
            for held in link.held:
                if isinstance(held, HostGateway):
                    held.close()
        relay.end()
        for line in lines:
            line.close()
