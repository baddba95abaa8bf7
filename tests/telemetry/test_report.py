"""Numbers and figure of a run, from records written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from dsx.cli import app
from dsx.telemetry.report import plot, report, summarize

STEP_BYTES = 1000


def step_record(cluster: int, step: int, **fields: Any) -> dict[str, Any]:
    """One second per step, a tenth of it blocked; 1000 bytes leave at every second step."""
    record = {
        "kind": "step",
        "cluster": cluster,
        "step": step,
        "time": 1.7e9 + step,
        "seconds": 1.0,
        "blocked_seconds": 0.1,
        "loss": 4.0 - 0.1 * step + cluster,
        "tokens": 500,
        "bytes_sent": step // 2 * STEP_BYTES,
    }
    return {**record, **fields}


def sync_record(cluster: int, round: int, fragment: int, **fields: Any) -> dict[str, Any]:
    record = {
        "kind": "sync",
        "cluster": cluster,
        "fragment": fragment,
        "round": round,
        "wait_seconds": 0.25,
        "transfer_seconds": 2.0 * round,
        "bytes_sent": STEP_BYTES,
    }
    return {**record, **fields}


def write_lines(path: Path, records: list[dict[str, Any]], tail: str = "") -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two clusters, 20 steps, a model of two fragments, each sent five times by each."""
    for cluster, name in enumerate(["metrics.jsonl", "metrics.cluster_1.jsonl"]):
        steps = [step_record(cluster, step) for step in range(1, 21)]
        syncs = [sync_record(cluster, r, f) for r in range(1, 6) for f in range(2)]
        write_lines(tmp_path / name, [*steps, *syncs, {"kind": "from the future", "step": 99}])
    return tmp_path


def write_summary(run_dir: Path, **fields: Any) -> None:
    summary = {
        "steps": 20,
        "tokens_per_second": 1000.0,
        "utilization": 0.9,
        "bytes_sent": 10 * STEP_BYTES,
        "val_loss_clusters": [2.5, 2.6],
        "val_loss_average": 2.4,
        "unigram_entropy": 3.2,
        "wall_seconds": 25.0,
    }
    (run_dir / "summary.json").write_text(json.dumps({**summary, **fields}))


def test_totals_per_cluster(run_dir: Path) -> None:
    first, second = summarize(run_dir).clusters
    assert (first.cluster, second.cluster) == (0, 1)
    assert (first.steps, first.tokens, first.seconds) == (20, 10_000, 20.0)
    assert first.tokens_per_second == pytest.approx(500.0)
    assert first.utilization == pytest.approx(0.9)
    assert first.first_loss == pytest.approx(3.9)
    assert first.last_loss == pytest.approx(4.0 - 0.1 * 15.5)
    assert second.last_loss == pytest.approx(5.0 - 0.1 * 15.5)
    assert first.bytes_sent == 10 * STEP_BYTES
    assert (first.syncs, first.wait_seconds) == (10, 2.5)
    assert first.transfer_seconds_mean == pytest.approx(6.0)


def test_the_commits_that_training_waits_for_are_told(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a round that is applied where it was launched; a later one's is hidden."""
    from dsx.telemetry.report import report

    assert summarize(run_dir).clusters[0].commit_seconds_mean is None
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    sync = next(r for r in map(json.loads, lines) if r["kind"] == "sync")
    sync |= {"round": 99, "launched_step": 20, "applied_step": 20, "commit_seconds": 0.04}
    later = {**sync, "round": 100, "applied_step": 22, "commit_seconds": 9.0}
    for added in ([sync, later], [{**sync, "round": 101 + n} for n in range(12)]):
        assert summarize(run_dir).clusters[0].commit_seconds_mean is None  # most are not
        with (run_dir / "metrics.jsonl").open("a") as file:
            print(*map(json.dumps, added), sep="\n", file=file)
    assert summarize(run_dir).clusters[0].commit_seconds_mean == pytest.approx(0.04)
    report(run_dir)
    assert "training waits 40 ms a round for the commit" in capsys.readouterr().out


def test_synchronous_baseline_is_a_full_exchange_per_step(run_dir: Path) -> None:
    totals = summarize(run_dir)
    assert totals.bytes_sent == 10 * STEP_BYTES
    fragments, steps = 2, 20
    assert totals.bytes_sent_synchronous == fragments * STEP_BYTES * steps


def test_summary_overrides_the_baseline(run_dir: Path) -> None:
    write_summary(run_dir, bytes_sent_synchronous=777_000)
    assert summarize(run_dir).bytes_sent_synchronous == 777_000


def test_records_of_one_site_alone_are_enough(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()
    totals = summarize(run_dir)
    assert [cluster.cluster for cluster in totals.clusters] == [1]
    assert totals.bytes_sent == 10 * STEP_BYTES


def test_finish_record_counts_what_was_sent_last(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "finish", "cluster": 0, "step": 20, "bytes_sent": 12_345}))
    first, second = summarize(run_dir).clusters
    assert (first.bytes_sent, second.bytes_sent) == (12_345, 10 * STEP_BYTES)
    assert first.steps == 20


def test_skipped_steps_are_told(run_dir: Path) -> None:
    assert summarize(run_dir).about == []
    with (run_dir / "metrics.cluster_1.jsonl").open("a") as file:
        file.write(json.dumps(step_record(1, 20, skipped_steps=7)) + "\n")
    assert summarize(run_dir).about == ["cluster 1: 7 of 20 inner steps were skipped"]


def test_who_trained_on_is_told_once(run_dir: Path) -> None:
    for cluster, name in enumerate(["metrics.jsonl", "metrics.cluster_1.jsonl"]):
        record = {"kind": "members", "cluster": cluster, "step": 7 + cluster, "members": [0, 1]}
        with (run_dir / name).open("a") as file:
            file.write(json.dumps(record) + "\n")
    assert summarize(run_dir).about == ["from step 7 on, without who was lost: clusters 0, 1"]


def test_later_record_of_a_step_counts(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_record(0, 20, tokens=1500)) + "\n")
    assert summarize(run_dir).clusters[0].tokens == 11_000


def test_missing_and_null_fields_are_left_out(tmp_path: Path) -> None:
    records = [
        {"kind": "step", "step": 1},
        {"kind": "step", "step": 2, "loss": None, "tokens": 5, "seconds": None},
        {"kind": "sync", "fragment": 0, "round": 1, "transfer_seconds": None},
    ]
    write_lines(tmp_path / "metrics.jsonl", records)
    (cluster,) = summarize(tmp_path).clusters
    assert (cluster.steps, cluster.syncs, cluster.bytes_sent) == (2, 1, 0)
    assert cluster.last_loss is cluster.utilization is cluster.tokens_per_second is None
    plot(tmp_path, tmp_path / "plot.png")


def test_incomplete_last_line_is_dropped(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    write_lines(path, [step_record(0, 1)], tail='{"kind": "step", "st')
    assert summarize(run_dir).clusters[0].steps == 1


def test_a_damaged_line_is_left_out_and_told_of(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_dir / "metrics.jsonl"
    before = summarize(run_dir)
    path.write_bytes(b"not json\n\xff\n" + path.read_bytes())
    assert summarize(run_dir) == before
    assert f"{path}:1 is not a JSON record: " in caplog.text
    assert "; left out with 1 lines like it" in caplog.text


def test_a_file_without_records_is_an_error_that_names_its_first_line(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_bytes(b"\xff\n\xff\n")
    done = CliRunner().invoke(app, ["report", str(run_dir)])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"dsx report: {path}:1 is not a JSON record: 'utf-8' codec")


def test_a_folder_that_cannot_be_written_to_is_reported_all_the_same(run_dir: Path) -> None:
    (run_dir / "plot.png").mkdir()  # as where the folder is read-only: nobody can open it to write
    done = CliRunner().invoke(app, ["report", str(run_dir)])
    assert done.exit_code == 0 and "cluster 1" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        f"no figure: {run_dir / 'plot.png'} cannot be written (Is a directory); --plot FILE.png can"
    )
    elsewhere = run_dir / "elsewhere.png"
    done = CliRunner().invoke(app, ["report", str(run_dir), "--plot", str(elsewhere)])
    assert done.stdout.splitlines()[-1] == f"figure written to {elsewhere}"
    assert elsewhere.read_bytes().startswith(b"\x89PNG")
    done = CliRunner().invoke(app, ["report", str(run_dir), "--plot", str(run_dir)])
    assert done.exit_code == 2 and done.stderr.startswith("dsx report: ")


def test_unusable_directories(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no run directory at"):
        summarize(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"holds no metrics\*\.jsonl.*dsx\.metrics\.dir"):
        summarize(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="no records of inner steps yet"):
        plot(tmp_path, tmp_path / "plot.png")


@pytest.mark.parametrize("has_summary", [True, False])
def test_report_prints_a_table_and_draws(
    run_dir: Path, has_summary: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if has_summary:
        write_summary(run_dir)
    report(run_dir)
    printed = capsys.readouterr().out
    assert "cluster 0" in printed and "cluster 1" in printed
    assert ("2.4000" in printed) == has_summary
    assert printed.splitlines()[-1] == f"figure written to {run_dir / 'plot.png'}"
    assert "synchronous data parallel would have sent 40 kB: 4.0 times as much" in printed
    with Image.open(run_dir / "plot.png") as image:
        image.load()
        assert image.format == "PNG"
        assert min(image.size) > 500
        assert len(set(image.convert("L").tobytes())) > 50, "a figure, not an empty page"


def test_a_figure_that_would_be_no_png_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--plot", "x.pdf"])
    assert result.exit_code == 2
    assert "--plot x.pdf: the figure is a PNG; give a name that ends in .png" in result.output
