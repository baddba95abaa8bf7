"""A save that cannot be written is told of once, and training goes on; the next one is tried."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dsx
from dsx.checkpoint import snapshot
from dsx.checkpoint.tags import complete_tags
from dsx.telemetry.notices.happenings import Happenings
from dsx.telemetry.notices.notice import Notice
from tests.distributed import run_distributed
from tests.telemetry.trace.runs import block
from tests.tiny import TinyNet, batch


def fails(path: Path, digest: str) -> None:
    raise OSError(5, "Input/output error", str(path))


def save_where_a_disk_fails(base: str) -> dict[str, Any]:
    """At step 4 cluster 1 cannot write, at step 6 its folder is a file, at step 8 all is well."""
    config = block("streaming_diloco", dir=f"{base}/run")
    world = dsx.init_distributed(config)
    model = TinyNet(world.cluster_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = dsx.attach(model, optimizer, config=config)
    own = Path(base) / f"cluster_{world.cluster_id}"
    saved: list[bool] = []
    note_checksum = snapshot.note_checksum
    for step in range(1, 11):
        optimizer.zero_grad()
        model(*batch(world.cluster_id, step)).backward()
        optimizer.step()
        is_bad = world.cluster_id == 1
        if step % 2 == 0:
            snapshot.note_checksum = fails if step == 4 and is_bad else note_checksum
            if step == 6 and is_bad:
                shutil.rmtree(own)
                own.write_text("in the way")
            if step == 8 and is_bad:
                own.unlink()
            directory = own / f"step{step}"
            saved.append(handle.save(directory))
            handle.saved(directory)
    handle.finish()
    last = handle._saving.last
    handle.close()
    return {"saved": saved, "last": str(last), "left": sorted(p.name for p in own.rglob("*.tmp"))}


@pytest.mark.ci
def test_a_scripts_run_goes_on_where_the_outer_state_cannot_be_written(tmp_path: Path) -> None:
    good, bad = run_distributed(save_where_a_disk_fails, 2, str(tmp_path))
    assert good["saved"] == [True] * 5
    assert bad["saved"] == [True, False, False, True, True]
    assert bad["last"].endswith("cluster_1/step10") and bad["left"] == []
    records = [json.loads(line) for line in (tmp_path / "run/metrics.cluster_1.jsonl").open()]
    told = [record for record in records if record["kind"] == "not_saved"]
    assert [record["step"] for record in told] == [4, 6]
    assert "rank 0: " in told[0]["why"] and "Input/output error" in told[0]["why"]
    assert "Not a directory" in told[1]["why"] and "training goes on" in told[1]["why"]
    listed = json.loads((tmp_path / "run/run.cluster_1.json").read_text())["checkpoints"]
    assert [entry["step"] for entry in listed] == [2, 8, 10]
    log = (tmp_path / "run/log.cluster_1.txt").read_text()
    assert log.count("the outer state is not saved to") == 2


def test_what_a_script_may_not_write_is_told_and_another_error_is_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsx.engines import agreed_save
    from dsx.engines.agreed_save import AgreedSave, survives

    def gathered(value: Any) -> list[Any]:
        return [value]

    def of_first(value: Any) -> Any:
        return value

    def hear(directory: Path, why: str) -> None:
        told.append((directory.name, why))

    monkeypatch.setattr(agreed_save, "gather_objects", gathered)
    monkeypatch.setattr(agreed_save, "from_first", of_first)
    told: list[tuple[str, str]] = []

    def nothing(*given: Any) -> None:
        assert given in ((), (False,))  # a run that is finished waits for its saves

    beside = SimpleNamespace(wait=nothing, open=nothing, drop=nothing)
    keeping = SimpleNamespace(make_way=lambda directory, tag, step: False)
    handle: Any = SimpleNamespace(
        not_saved=hear, beside=beside, is_finished=True, preemption=None, keeping=keeping, step=1
    )

    def save(error: Exception) -> None:
        saving = AgreedSave(handle, tmp_path, "a", True)

        def write() -> None:
            (saving.unfinished).mkdir(parents=True)
            raise error

        saving.of_script(write)

    of_torch = RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos 64 vs 0")
    for error in (PermissionError(13, "Permission denied", "x.pt"), of_torch):
        assert not survives(lambda error=error: save(error))
    with pytest.raises(RuntimeError, match="has failed: rank 0: ValueError: a bug; what was saved"):
        survives(lambda: save(ValueError("a bug")))
    assert [name for name, _ in told] == ["a", "a", "a"]
    assert "rank 0: Permission denied (x.pt); the disk at " in told[0][1]
    assert "unexpected pos 64" in told[1][1] and told[2][1] == "rank 0: ValueError: a bug"
    assert not complete_tags(tmp_path) and not list(tmp_path.glob("*.unfinished"))


def test_no_rank_waits_for_one_whose_disk_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsx.engines import agreed_save

    def gone(path: Path) -> Any:
        raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr(agreed_save.shutil, "disk_usage", gone)
    room = agreed_save._room(Path("/tmp"), Path("/tmp/a.unfinished"))
    assert room == "its disk tells nothing of its space (Stale file handle)"


def test_people_are_told_of_it_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Notice] = []
    caplog.set_level(logging.ERROR)
    happenings = Happenings(1, (0, 1), "run", "host", [told.append], {}, lambda: None)
    for _ in range(8):
        happenings.not_saved("checkpoint a is not saved: no space")
    assert [(one.kind, one.clusters) for one in told] == [("not_saved", (1,))] * 4
    assert told[0].text.startswith("checkpoint a is not") and told[-1].text.endswith(
        "8 times by now)"
    )
