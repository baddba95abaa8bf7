"""What a run may say of its links, and where an open one has to be asked for."""

from __future__ import annotations

from typing import Any

import pytest

from dsx.config.link import require_said
from dsx.config.schema import ConfigError, DsxConfig, load_config, with_launch_arguments

ONE_HOST = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


def config(link: dict[str, Any] | None = None, **clusters: Any) -> DsxConfig:
    block = {"preset": "diloco", "clusters": {"num_clusters": 2, **clusters}, "link": link or {}}
    return load_config({"dsx": block})


def said(given: DsxConfig, environ: dict[str, str] = ONE_HOST) -> str | None:
    return require_said(given.link, given.clusters.rendezvous, environ)


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ({"security": "curve"}, "dsx.link.members is missing"),
        ({"security": "curve", "members": ["a=h:1"]}, "has 1 names, but num_clusters=2"),
        ({"security": "curve", "members": ["a=h:1", "a"]}, "names a cluster twice: a, a"),
        ({"security": "curve", "members": ["a=h", "b"]}, "write NAME=HOST:PORT"),
        ({"security": "curve", "members": ["a", "b"], "transport": "gloo"}, "does not encrypt"),
        ({"members": ["a=h:1", "b"]}, 'members needs "security": "curve"'),
        ({"security": "tls"}, "dsx.link.security"),
        ({"relay": "r.example:29500"}, 'takes the members\' keys; set "security": "curve"'),
        (
            {"security": "curve", "members": ["a", "b"], "relay": "nowhere"},
            "relay='nowhere' is no address; write HOST:PORT",
        ),
        ({"port": 0}, "dsx.link.port"),
        ({"suspect_seconds": 0.5}, "dsx.link.suspect_seconds"),
    ],
)
def test_what_cannot_be_is_refused(link: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(link)


def test_members_meet_at_their_own_address() -> None:
    curve = {"security": "curve", "members": ["a=10.0.0.1:29400", "b"]}
    with pytest.raises(ConfigError, match="leave rendezvous out"):
        config(curve, rendezvous="tcp://10.0.0.1:29400")
    settings = config(curve).link.settings
    assert settings is not None and settings.names == ["a", "b"]
    assert [settings.address_of(m) for m in range(2)] == ["10.0.0.1:29400", None]
    assert settings.listens_at == "0.0.0.0" and config().link.settings is None
    near = config(
        {"transport": "link", "members": ["a=127.0.0.1:1", "b=localhost:2"]}
    ).link.settings
    assert near is not None and (near.listens_at, near.security) == ("127.0.0.1", "none")


@pytest.mark.parametrize("host", ["10.0.0.1", "site-a.example", "[2001:db8::1]", "0.0.0.0"])
def test_an_open_line_beyond_this_host_has_to_be_asked_for(host: str) -> None:
    address = f"tcp://{host}:29400"
    with pytest.raises(ConfigError, match=r"link.security is missing.*meet at .*dsx keys new"):
        said(config(rendezvous=address))
    told = said(config({"security": "none"}, rendezvous=address))
    assert told is not None and "whoever reaches that line" in told
    by_argument = with_launch_arguments(config(), {"rendezvous": address}, "none")
    assert said(by_argument) == told
    members = [f"a={host}:29400", "b"]
    assert said(config({"security": "curve", "members": members})) is None
    with pytest.raises(ConfigError, match="link.security is missing"):
        said(config({"transport": "link", "members": members}))


def test_one_host_needs_no_word() -> None:
    assert said(config()) is None
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert said(config(rendezvous=f"tcp://{host}:29400")) is None


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_one_launcher_over_several_hosts_does(name: str) -> None:
    with pytest.raises(ConfigError, match="over the hosts of one launcher"):
        said(config(), {"WORLD_SIZE": "4", name: "2"})
    assert said(config({"security": "none"}), {"WORLD_SIZE": "4", name: "2"}) is not None


@pytest.mark.parametrize(
    ("members", "relayed"),
    [
        (["a", "b"], [0, 1]),
        (["a=10.0.0.1:1", "b", "c"], [1, 2]),
        (["a=10.0.0.1:1", "b"], []),
    ],
)
def test_those_who_only_call_meet_at_the_relay(members: list[str], relayed: list[int]) -> None:
    link = {"security": "curve", "members": members, "relay": "r.example:1"}
    settings = config(link, num_clusters=len(members)).link.settings
    assert settings is not None and settings.through_relay == relayed
