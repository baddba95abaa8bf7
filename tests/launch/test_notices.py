"""Two sites of which one is killed and started again: people hear of it, and spans tell of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.installed import needs
from tests.launch.test_launch import launch
from tests.launch.test_quorum import end_all, joined_at, two_sites
from tests.telemetry.exporters.collector import Collector
from tests.telemetry.notices.web import Web

pytestmark = [needs("deepspeed", "opentelemetry.sdk"), pytest.mark.slow, pytest.mark.timeout(600)]
__all__ = ["launch"]


def test_who_is_lost_and_back_is_told_once(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Web() as web, Collector() as collector:
        monkeypatch.setenv("OUR_HOOK", web.url)
        kept = ["sh", "-c", f"cat >> {tmp_path}/kept; echo >> {tmp_path}/kept"]
        places = [{"url_env": "OUR_HOOK"}, {"command": kept}]
        sites, start = two_sites(tmp_path, launch, notices=places, otlp=collector.address)
        survivor = sites.launchers[1]
        sites.launchers[0].end()
        survivor.wait_for("waits for cluster(s) 0")
        web.wait_for(1)
        again = start(0, "again")
        again.wait_for(f"step {joined_at(again) + 4}\n")
        end_all(tmp_path, survivor, again)
        told = web.documents
    print(*(document["text"] for document in told), sep="\n")
    of_members = [d for d in told if d["kind"] in ("lost", "back", "finished", "ended")]
    assert [(d["kind"], d["cluster"], d["clusters"]) for d in of_members] == [
        ("lost", 1, [0]), ("lost", 1, [0]), ("back", 1, [0]), ("finished", 0, [0, 1]),
    ]  # fmt: skip
    assert {d["run"] for d in told} == {"run"}
    (heal,) = collector.of("dsx.heal")
    assert heal.facts["dsx.cluster"] == 0 and heal.ended > heal.began
    saved = [span.facts["dsx.cluster"] for span in collector.of("dsx.save")]
    assert saved == [1]  # before it waited
    assert {span.facts["dsx.cluster"] for span in collector.of("dsx.round")} == {0, 1}
    lines = (tmp_path / "kept").read_text().splitlines()
    assert [json.loads(line) for line in lines if line] == told
