"""`dsx keys check` tells whether sites can meet, and why not."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsx.cli import app
from dsx.comm.links import check
from dsx.comm.links.check import Site, check_sites
from dsx.comm.links.desk import Desk
from dsx.comm.links.host_port import open_on_host
from dsx.comm.links.key_changes import add_key, make_key, revoke_keys
from dsx.comm.links.settings import LinkSettings
from dsx.comm.links.trust import open_link
from dsx.comm.topology import RankInfo
from tests.comm.links.folders import sites as folders_of
from tests.comm.links.test_relay import Relay
from tests.distributed import free_port


@pytest.fixture
def sites(tmp_path: Path) -> list[LinkSettings]:
    """Three sites that trust each other; the last one can only call."""
    names, port = ["a", "b", "c"], free_port()
    made = [make_key(tmp_path / name, name, is_next=False)[-1] for name in names]
    for name in names:
        for key in made:
            if key.name != name:
                add_key(tmp_path / name, key)
    members = (f"a=127.0.0.1:{port}", f"b=127.0.0.1:{free_port()}", "c")
    ports = [int(member.rpartition(":")[2]) for member in members[:2]]
    return [
        LinkSettings("curve", members, str(tmp_path / name), port=each)
        for name, each in zip(names, [*ports, port], strict=True)
    ]


def check_all(
    sites: list[LinkSettings], who: list[int], seconds: float = 20.0
) -> dict[int, list[Site]]:
    def look(own: int) -> list[Site]:
        return check_sites(sites[own], own, seconds)

    with ThreadPoolExecutor(len(who)) as threads:
        return dict(zip(who, threads.map(look, who), strict=True))


def test_sites_that_trust_each_other_say_so(sites: list[LinkSettings]) -> None:
    for own, found in check_all(sites, [0, 1, 2]).items():
        assert [site.name for site in found] == [n for n in "abc" if n != "abc"[own]]
        assert all(site.problem is None and "is trusted" in site.says for site in found)
        assert all(abs(site.clock_seconds) < 1 and site.latency_seconds > 0 for site in found)
    ways = [site.way.partition("127")[0] for site in check_all(sites, [0, 1, 2])[2]]
    assert ways == ["called at ", "called at "]


def test_a_run_that_is_on_is_told_of_and_goes_on(sites: list[LinkSettings]) -> None:
    listening, _ = open_on_host(sites[0], RankInfo(0, 3, 0, 1), None, "", 5.0)
    calling = open_link(sites[2], 2, 0, 1, host="127.0.0.1")
    try:
        Desk(listening, "abc")
        listening.expect(2, 0, None)
        calling.expect(0, 0, sites[2].address_of(0))
        listening.wait_for(2, 0, 10.0)
        before = listening.process_at((2, 0))
        first, second = check_sites(sites[2], 2, 3.0)  # with the key of one that is in the run
        assert first.says.endswith("a run is on there") and first.latency_seconds > 0
        assert second.says.startswith("nobody listens there")
        with pytest.raises(OSError, match="in use.*`dsx ctl status` says whom it reaches"):
            check_sites(sites[0], 0, 3.0)
        sent = listening.ask((2, 0), b"still there?")
        calling.serve(lambda asker, body, answer: answer(b"yes"))
        assert sent.result(10.0) == b"yes"
        assert listening.process_at((2, 0)) == before == calling.incarnation
        assert not listening.problems and not calling.problems
    finally:
        calling.close()
        listening.close()


def test_a_check_that_is_called_finds_a_run_that_calls(sites: list[LinkSettings]) -> None:
    calling = open_link(sites[2], 2, 0, 1, host="127.0.0.1")
    try:
        Desk(calling, "abc")
        calling.expect(0, 0, sites[2].address_of(0))
        (_, found) = check_sites(sites[0], 0, 5.0)
        assert found.says.endswith("a run is on there")
    finally:
        calling.close()


@pytest.mark.ci
def test_a_site_that_is_not_there_is_told(sites: list[LinkSettings]) -> None:
    found = check_all(sites, [1, 2], seconds=4)
    assert [site.problem is None for site in found[2]] == [False, True]
    assert "nobody listens there" in found[2][0].says


@pytest.mark.ci
def test_a_key_that_one_side_lacks_is_told_at_both(sites: list[LinkSettings]) -> None:
    revoke_keys(Path(sites[0].keys), "b", None, is_older=False)
    other = make_key(Path(sites[0].keys).parent / "new", "b", is_next=False)[-1]
    add_key(Path(sites[0].keys), other)  # of b, but not what b has
    found = check_all(sites, [0, 1], seconds=4)
    assert "whose key is not known here" in found[0][0].says
    assert "does not take this cluster's key" in found[1][0].says


@pytest.mark.ci
def test_sites_that_can_only_call_out_are_tried_through_their_relay(tmp_path: Path) -> None:
    folders = folders_of(tmp_path, "a", "b", "relay-keys")
    relay = Relay(folders["relay-keys"])
    try:
        here = [
            LinkSettings(
                "curve", ("a", "b"), str(folders[name]), port=free_port(),
                relay=f"127.0.0.1:{relay.port}",
            )
            for name in "ab"
        ]  # fmt: skip
        found = check_all(here, [0, 1])
        ways = [found[own][0].way.partition(" through")[0] for own in (0, 1)]
        assert ways == ["calls here", "called"]
        assert all("is trusted" in found[own][0].says for own in (0, 1))
        (alone,) = check_all(here, [1], seconds=3)[1]
        assert "this site is registered there, and nothing was heard of that one" in alone.says
    finally:
        relay.end()
    (alone,) = check_all(here, [1], seconds=3)[1]
    assert "is not registered there: 127.0.0.1:" in alone.says and "refused" in alone.says


def test_clocks_and_versions_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_version", lambda: "1.0")
    site = Site("b", "", None, 0.05, -75.4, "1.1")
    assert site.says == (
        "trusts this site, and is trusted; 50.0 ms; its clock is 75 s behind; it has dsx 1.1, this "
        "site 1.0"
    )


def run(file: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["keys", "check", str(file), *options])


@pytest.mark.ci
def test_the_command(sites: list[LinkSettings], tmp_path: Path) -> None:
    files: list[Path] = []
    for site in sites[:2]:
        link: dict[str, Any] = {
            "security": "curve", "members": sites[0].members[:2], "keys": site.keys,
            "port": site.port,
        }  # fmt: skip
        block = {"preset": "diloco", "clusters": {"num_clusters": 2}, "link": link}
        files.append(tmp_path / f"{len(files)}.json")
        files[-1].write_text(json.dumps({"dsx": block}))
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(check_all, sites, [1], 20.0)
        done = run(files[0], "--cluster-id", "0", "--seconds", "20")
        theirs.result()
    assert done.exit_code == 0 and "a (cluster 0), key " in done.stdout
    alone = run(files[0], "--cluster-id", "0", "--seconds", "1")
    assert alone.exit_code == 1 and "nothing was" in alone.stdout
    assert "say which one this is, by --cluster-id 0 to 1" in run(files[0]).stderr
    with socket.create_server(("127.0.0.1", sites[0].port)):
        taken = run(files[0], "--cluster-id", "0", "--seconds", "1")
    assert taken.exit_code == 2 and "cannot listen on" in taken.stderr
