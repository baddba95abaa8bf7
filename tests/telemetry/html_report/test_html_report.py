"""A run as a page: its sentences are right, it loads nothing, and names in it are text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.cli import app
from dsx.telemetry.html_report.page import page_of_run, read_numbers
from dsx.telemetry.html_report.sentences import (
    duration,
    parts_of,
    what_cost_time,
    what_happened,
    what_is_missing,
    what_to_change,
    what_was_set,
)
from dsx.telemetry.html_report.svg import Drawn, line_chart
from tests.telemetry.watch.browser import opened, with_browser
from tests.telemetry.watch.folders import (
    BEGUN,
    about,
    append,
    healed,
    link,
    machine,
    make_run,
    say_time,
    start_record,
    step_record,
    sync_record,
    write_about,
)

EVIL = "<img src=x onerror=window.hit=1>"


class Tags(HTMLParser):
    """The tags of a page, all of which are closed in order, and what they refer to."""

    VOID = ("meta", "line", "polyline")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.refers: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.refers += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def write(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_parts_of_the_time_make_the_whole(tmp_path: Path) -> None:
    numbers = read_numbers(make_run(tmp_path / "run"))
    one = numbers.slowest
    assert one.whole == pytest.approx(40)
    assert sum(seconds for _, seconds in parts_of(one)) == pytest.approx(one.whole)
    assert one.waited == pytest.approx(4.0)  # of 4.5 s of the slowest rank, of which 4 here
    assert one.held_up == pytest.approx(0.0)
    said = what_cost_time(numbers)
    assert "90 % (36 s) training." in said
    assert numbers.utilization == pytest.approx(0.9)


def test_what_is_said_has_the_runs_numbers(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "summary.json").write_text(json.dumps({"val_loss_average": 2.5}))
    append(folder, 0, {"cluster": 0, "kind": "members", "time": BEGUN + 45, "step": 44,
                       "members": [0]})  # fmt: skip
    append(folder, 0, sync_record(0, 37, 40, refused_by=[1]))
    numbers = read_numbers(folder)
    assert what_was_set(numbers)[0] == "Preset 'diloco' with 2 clusters of 1 rank on cpu."
    assert "Each cluster may send 100 Mbit/s (link.rate_mbit)." in what_was_set(numbers)
    said = what_happened(numbers)
    assert said[0] == f"40 inner steps in 40 s, begun {say_time(BEGUN)}."
    assert "40,960 tokens by all clusters, 1,024 a second." in said
    assert "On data that is not trained on, the average of the clusters has 2.5000." in said
    assert "From step 44 on, clusters 0 trained." in said
    assert "1 rounds were refused, as values were not finite or far too large." in said
    assert "A cluster sent 5 kB; data parallel training" in " ".join(what_cost_time(numbers))


def test_advice_is_given_beyond_a_bound_and_not_within(tmp_path: Path) -> None:
    good = tmp_path / "good"
    for cluster in range(2):
        write_about(good, cluster, about(cluster))
        steps = [step_record(cluster, n, blocked_seconds=0.01, bytes_sent=10) for n in range(1, 41)]
        append(good, cluster, start_record(cluster), *steps)
    assert what_to_change(read_numbers(good)) == ["Nothing stands out."]
    bad = make_run(tmp_path / "bad")
    slow = [step_record(1, n, seconds=2.0, time=BEGUN + 2 * n) for n in range(41, 200)]
    append(bad, 1, *slow, sync_record(1, 190, 199, guard_alarms=["gain"], differed_in=[1]))
    said = " ".join(what_to_change(read_numbers(bad)))
    assert "Utilization is 94 %, below 95 %" in said
    assert "Cluster 1 trains 285 tokens a second and the fastest 512" in said
    assert "The guard has warned of 'gain' 1 times" in said
    assert "different bits" in said


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    result = write(make_run(tmp_path / "run"), "--html", out)
    assert result.exit_code == 0, result.output
    text = out.read_text()
    tags = Tags(text)
    assert tags.refers == []
    assert "script" not in tags.seen
    assert not re.search(r"url\(|@import|https?://", text)
    assert text.count("<figure>") >= 8
    assert not (tmp_path / "run" / "plot.png").exists()


def test_runs_are_compared(tmp_path: Path) -> None:
    settings = {"resolved": {"preset": "diloco", "schedule": {"interval": 8}}}
    first, second = tmp_path / "a" / "run", tmp_path / "b" / "run"
    make_run(first)
    make_run(second, steps=80)
    write_about(second, 0, about(0, config=settings))
    out = tmp_path / "both.html"
    assert write(first, second, "--html", out).exit_code == 0
    text = out.read_text()
    Tags(text)
    assert "<h1>run (1) and run (2)</h1>" in text
    assert "Last loss: run (2) 2.4" in text
    assert "<td>40</td><td>80</td>" in text
    assert "<th scope='row'>schedule.interval</th><td>-</td><td>8</td>" in text
    assert text.count("<figure>") == 3


def test_names_are_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / EVIL.replace("/", ""))
    end = {"time": say_time(BEGUN + 50), "step": 40, "how": EVIL}
    write_about(folder, 0, about(0, host=EVIL, resumed_from=EVIL, end=end,
                                 config={"resolved": {"preset": EVIL, EVIL: EVIL}}))  # fmt: skip
    text = page_of_run(read_numbers(folder))
    assert "img" not in Tags(text).seen
    assert text.count("&lt;img src=x") >= 5


@pytest.mark.parametrize(
    ("more", "told"),
    [(["--html", "out.txt"], "ends in .html"),
     (["--html", "a.html", "--plot", "a.png"], "leave out"),
     (["RUN"], "2 runs are compared on a page: give --html FILE.html")],
)  # fmt: skip
def test_what_does_not_go_together_is_named(tmp_path: Path, more: list[str], told: str) -> None:
    run = make_run(tmp_path / "run")
    result = write(run, *(run if word == "RUN" else word for word in more))
    assert result.exit_code == 2
    assert told in result.output


def test_a_run_without_a_step_and_a_folder_that_is_not_there_are_named(tmp_path: Path) -> None:
    write_about(tmp_path / "run", 0, about(0))
    append(tmp_path / "run", 0, start_record(0))
    out = tmp_path / "out.html"
    for run, told in ((tmp_path / "run", "no records of inner steps"), (tmp_path / "no", "no run")):
        result = write(run, "--html", out)
        assert result.exit_code == 2
        assert told in result.output
    assert not out.exists()


def test_a_line_with_gaps_and_one_point(tmp_path: Path) -> None:
    assert line_chart("none", [1.0, 2.0], [Drawn("a", [None, None])], "number", "step") == ""
    one = line_chart("one", [1.0], [Drawn("a", [2.0])], "bytes", "step")
    assert "<b>2 B</b>" in one
    assert "nan" not in one


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 ms"), (0.43, "430 ms"), (60.4, "60.4 s"), (126, "2.1 min"), (9000, "2.5 h")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.ci
@with_browser
def test_a_browser_shows_it_without_a_word(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    write(make_run(tmp_path / "run"), "--html", out)
    for width in (360, 1280):
        with opened(out.as_uri(), width) as tab:
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.page.evaluate("document.querySelectorAll('figure svg').length") > 8


def test_what_could_not_be_read_is_said_first(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", clusters=3)
    assert what_is_missing(read_numbers(folder)) == []
    write_about(folder, 0, about(0, 3, session="another", time=say_time(BEGUN - 9)))
    append(folder, 1, {"kind": "step"}, {"kind": "sync"})
    metrics = folder / "metrics.cluster_2.jsonl"
    metrics.unlink()
    metrics.mkdir()
    numbers = read_numbers(folder)
    said = what_is_missing(numbers)
    assert said[0].startswith("Not all could be read: ")
    assert metrics.name in said[0] and "; 2 lines were no records of dsx." in said[0]
    assert said[1] == "Left out: cluster 0, whose records are of another run."
    page = page_of_run(numbers)
    assert page.index("What could not be read") < page.index("What to change")
    result = write(folder, make_run(tmp_path / "other"), "--html", tmp_path / "both.html")
    assert result.exit_code == 0, result.output
    assert "run: what could not be read" in (tmp_path / "both.html").read_text()


def test_a_run_of_which_no_step_can_be_read_is_named_with_why(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", clusters=1)
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"no inner steps that can be read: .*metrics\.jsonl"):
        read_numbers(folder)


def test_of_a_cluster_without_an_end_it_is_not_said_that_it_trains(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    end = {"time": say_time(BEGUN + 40), "step": 40, "how": "finished"}
    write_about(folder, 1, about(1, end=end))
    said = what_happened(read_numbers(folder))
    assert "Ends: cluster 0: no end recorded; cluster 1: ended (finished at step 40)." in said


@pytest.mark.parametrize(
    "steps",
    [
        [step_record(0, 1, seconds=0.0, blocked_seconds=0.0)],
        [step_record(0, 1, seconds=None)],
        [step_record(0, 1, loss=1e308), step_record(0, 2, loss=-1e308)],
        [step_record(0, 20_000_000)],
    ],
    ids=["no_time", "no_seconds", "huge_losses", "one_late_step"],
)
def test_runs_at_the_edge_of_what_can_be_drawn(tmp_path: Path, steps: list[Any]) -> None:
    folder = tmp_path / "run"
    write_about(folder, 0, about(0, 1))
    append(folder, 0, start_record(0, 1), *steps)
    (folder / "summary.json").write_text(
        json.dumps({"val_loss_average": "low", "val_loss_clusters": {"0": 1}})
    )
    text = page_of_run(read_numbers(folder))
    Tags(text)
    assert not re.search(r"='[^']*\b(nan|inf)\b", text)
    out = tmp_path / "both.html"
    assert write(folder, folder, "--html", out).exit_code == 0


def test_the_first_row_of_a_long_run_begins_with_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsx.telemetry.watch.run.MOST_ROWS", 8)
    one = read_numbers(make_run(tmp_path / "run", clusters=1)).slowest
    assert one.whole == pytest.approx(40)
    assert one.stood == pytest.approx(0)


def test_the_line_is_told_of_beside_what_it_was_measured_to(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    carried = "While the last 50 transfers were under way the line carried 0.002"
    assert f"{carried} Mbit/s." in what_cost_time(read_numbers(folder))
    for step, sent in ((20, 0), (40, 50_000_000)):
        links = [{**link(1, sent, sent, 0.03), "measured_bytes_per_second": 11.75e6}]
        append(folder, 0, machine(0, step, links=links, measured_bytes_per_second=10e6))
    numbers = read_numbers(folder)
    cost = what_cost_time(numbers)
    assert f"{carried} of 80 Mbit/s measured." in cost
    assert (
        "Round trip from cluster 0 to 1: 10 ms at least, the last time 30 ms; in the last minute "
        "20 of 94 Mbit/s measured went out." in cost
    )
    (advice,) = [said for said in what_to_change(numbers) if "less than half" in said]
    assert advice.startswith(
        "While transfers are under way the line carries 0.002 of 80 Mbit/s measured, less than "
        "half, and training waits for it: measure it again (dsx net-test)"
    )


def test_memory_links_and_heals_are_told_in_both_reports(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for cluster in range(2):
        for step, trip in ((20, 0.03), (40, 0.05)):
            links = [link(1 - cluster, step, step, trip)]
            append(folder, cluster, machine(cluster, step, links=links))
    append(folder, 1, healed(1, 40))
    held = (
        "irst ranks held at most: processes 400 MB (cluster 0), 400 MB (cluster 1); outer state "
        "5 kB, planned 5 kB"
    )
    heal = (
        "luster 1 came to the others at step 40: 9 MB of 12 MB copied from them, the rest from its "
        "own checkpoint; 1 MB of their results since; in 2.5 s"
    )
    numbers = read_numbers(folder)
    happened = what_happened(numbers)
    assert f"F{held}." in happened and f"C{heal}." in happened
    cost = what_cost_time(numbers)
    assert "Round trip from cluster 0 to 1: 10 ms at least, the last time 50 ms." in cost
    assert not [said for said in what_to_change(numbers) if "its plan" in said]
    printed = write(folder, "--plot", tmp_path / "plot.png")
    assert (
        f"f{held}" in printed.output and f"c{heal}".replace("1 came", "1: came") in printed.output
    )
    append(folder, 0, machine(0, 41, outer_bytes=6000))
    told = what_to_change(read_numbers(folder))
    assert "Cluster 0's outer state takes 6 kB, more than the 5 kB of its plan: " in "".join(told)
