"""The page in a real browser."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dsx.telemetry.run_folder import cluster_file
from dsx.telemetry.watch.run import WatchedRun
from dsx.telemetry.watch.watch import Watch
from tests.telemetry.watch.browser import opened, with_browser
from tests.telemetry.watch.folders import (
    BEGUN,
    about,
    append,
    link,
    machine,
    make_run,
    of,
    say_time,
    step_record,
    sync_record,
    write_about,
)
from tests.telemetry.watch.live_run import LiveRun

pytestmark = [pytest.mark.ci, with_browser]
LOSS = "document.querySelector('#chart-loss .picture')"
ROW = "document.querySelector('tr[data-cluster=\"1\"]')"


def test_two_live_clusters_are_seen_killed_and_seen_to_come_back(tmp_path: Path) -> None:
    live = LiveRun(tmp_path)
    watch = Watch(WatchedRun(live.directory))
    try:
        with opened(watch.address) as tab:
            tab.wait("document.querySelector('#sentence').textContent.includes('No cluster')")
            for cluster in (0, 1):
                live.start(cluster)
            tab.wait(f"{ROW}?.innerText.includes('trains')", 120)
            tab.wait("document.querySelector('#sentence').innerText.includes('2 of 2')")
            tab.wait(f"{LOSS}?.querySelector('canvas')")
            before = tab.page.evaluate(
                f"[{LOSS}.ariaLabel, {LOSS}.querySelector('canvas').toDataURL()]"
            )
            tab.wait(f"{LOSS}.ariaLabel !== {before[0]!r}")
            assert tab.page.evaluate(f"{LOSS}.querySelector('canvas').toDataURL()") != before[1]
            tab.wait("document.querySelectorAll('#lanes rect.on-line').length > 4", 20)
            tab.wait("document.querySelector('.tile[data-key=eta]')")

            live.kill(1)
            killed = time.monotonic()
            tab.wait(f"{ROW}.innerText.includes('killed')", 5)
            seconds = time.monotonic() - killed
            print(f"killed, and seen {seconds:.2f} s later")
            assert seconds < 2
            tab.wait(
                "document.querySelector('#events').innerText.includes('is lost: going on')", 30
            )
            tab.wait(f"{ROW}.innerText.includes('the others go on without it')")

            live.start(1)
            tab.wait(f"{ROW}.innerText.includes('trains')", 120)
            tab.wait("document.querySelector('#events').innerText.includes('has joined the run')")
            tab.wait("/came to the others at step \\d+: .*B copied from them; .*B of their/.test("
                     "document.querySelector('#events').innerText)")  # fmt: skip
            tab.wait("document.querySelector('#sentence').innerText.includes('2 of 2')")

            live.close()
            tab.wait("document.querySelector('#sentence').innerText.includes('Ended before')", 5)
            assert "killed" in tab.text("#members")
    except BaseException:
        print(live.logs())
        raise
    finally:
        live.close()
        watch.close()


def test_names_and_texts_of_a_run_are_no_markup(tmp_path: Path) -> None:
    evil = "<img src=x onerror=window.hit=1>"
    folder = make_run(tmp_path / evil.replace("/", ""))
    settings = {"resolved": {"preset": evil, "link": {"rate_mbit": 1}}}
    end = {"time": say_time(BEGUN + 50), "step": 40, "how": evil}
    write_about(folder, 0, about(0, host=evil, config=settings, resumed_from=evil, end=end))
    write_about(folder, 1, about(1, host=evil, rolled_back={"why": evil, "from_step": 3}))
    with cluster_file(folder, "log", ".txt", 0).open("a") as log:
        log.write(f"{say_time(BEGUN + 30)} WARNING {evil.replace(' ', '')}: {evil}</script>\n")
    watch = Watch(WatchedRun(folder))
    try:
        with opened(watch.address) as tab:
            tab.page.wait_for_selector(".chart canvas")
            for place in ("#name", "#members", "#events", "#folder"):
                tab.wait(f"document.querySelector('{place}').innerText.includes('<img src=x')")
            assert tab.page.evaluate("document.images.length") == 0
            assert tab.page.evaluate("window.hit") is None
    finally:
        watch.close()


@pytest.mark.parametrize(("width", "height"), [(360, 740), (1280, 900)])
def test_members_have_weights_rounds_left_out_and_how_healing_goes(
    tmp_path: Path, width: int, height: int
) -> None:
    folder = make_run(tmp_path / "run", clusters=3)
    now = time.time()
    append(folder, 0, {"cluster": 0, "kind": "members", "time": now - 40, "step": 40,
                       "members": [0, 2]})  # fmt: skip
    append(folder, 2, sync_record(2, 37, 40, refused_by=[1]))
    for cluster in (0, 2):
        told = (step_record(cluster, step, time=now - 120 + step) for step in range(41, 121))
        append(folder, cluster, *told)
    with cluster_file(folder, "log", ".txt", 0).open("a") as log:
        for ago, step in ((20, 44), (10, 74)):
            text = f"cluster 1 is healing: <b>{step} MB, step {step}"
            log.write(f"{say_time(now - ago)} WARNING dsx.training: {text}\n")
    watch = Watch(WatchedRun(folder))
    try:
        with opened(watch.address, width, height) as tab:
            tab.wait("document.querySelector('#members progress')")
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
            cell = "#members tr[data-cluster='{}'] [data-name='{}']"
            weights = [tab.text(cell.format(m, "weight")) for m in range(3)]
            assert [text.split()[-1] for text in weights] == ["1/2", "0", "1/2"]
            assert "1 refused" in tab.text(cell.format(1, "rounds left out"))
            told = tab.text(cell.format(1, "state"))
            assert "heals" in told and "<b>74 MB, step 74" in told
            assert "step 74, the others are at 120" in told and "3 steps/s" in told
            assert "left" in told
            tab.page.locator("#members .why").click()
            assert "its weight in the mean" in tab.text("#members .meaning")
    finally:
        watch.close()


COLOURED = """(() => {
    const picture = document.querySelector('#chart-loss canvas');
    const {data} = picture.getContext('2d').getImageData(0, 0, picture.width, picture.height);
    let count = 0;
    for (let at = 0; at < data.length; at += 4) {
        const [red, green, blue, opaque] = data.slice(at, at + 4);
        count += opaque > 200 && Math.max(red, green, blue) - Math.min(red, green, blue) > 80;
    }
    return count;
})()"""


def test_a_run_of_one_step_is_seen_and_its_method_is_explained(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    watch = Watch(WatchedRun(folder))
    try:
        with opened(watch.address) as tab:
            tab.page.wait_for_selector("#chart-loss canvas")
            tab.wait(f"{COLOURED} > 20")  # a line of one point has none
            tab.page.locator("header .why").click()
            assert "fragments" in tab.text("header .meaning")
            tab.page.keyboard.press("Escape")
            ticks = "import('/dom.js').then((dom) => dom.inSteps({}, 'percent'))"
            assert tab.page.evaluate(ticks.format("[0.9975, 1]")) == ["99.75 %", "100.00 %"]
            assert tab.page.evaluate(ticks.format("[0.9, 1]")) == ["90 %", "100 %"]
            assert tab.page.evaluate(ticks.format("[0.9999, 1]")) == ["99.99 %", "100.00 %"]
    finally:
        watch.close()


def test_a_phone_and_a_keyboard_reach_everything(tmp_path: Path) -> None:
    watch = Watch(WatchedRun(make_run(tmp_path / "run", clusters=3, steps=300)))
    try:
        with opened(watch.address, 360, 740, "dark") as tab:
            tab.page.wait_for_selector(".chart canvas")
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
            button = tab.page.locator("#chart-loss .why")
            button.tap()
            assert "lower is better" in tab.text("#chart-loss .meaning")
            box = tab.page.locator("#chart-loss .meaning").bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360
            tab.page.keyboard.press("Escape")
            assert not tab.page.is_visible("#chart-loss .meaning")
        with opened(watch.address) as tab:
            tab.page.wait_for_selector(".chart canvas")
            tab.page.hover("#chart-loss .why")
            assert tab.page.is_visible("#chart-loss .meaning")
            tab.page.mouse.move(0, 0)
            assert not tab.page.is_visible("#chart-loss .meaning")
            reached = set()
            for _ in range(40):
                tab.page.keyboard.press("Tab")
                reached.add(
                    tab.page.evaluate(
                        "document.activeElement.className + document.activeElement.id"
                    )
                )
            assert reached >= {"picture", "why", "axis", "range"}
            tab.page.focus("#chart-loss .picture")
            tab.page.keyboard.press("+")
            tab.wait("!document.querySelector('#whole').hidden")
            tab.page.keyboard.press("0")
            tab.wait("document.querySelector('#whole').hidden")
            picture = tab.page.locator("#chart-loss .u-over").bounding_box()
            assert picture is not None
            tab.page.mouse.move(picture["x"] + 100, picture["y"] + 50)
            assert "inner step" in tab.text("#chart-loss .place")
            tab.page.mouse.down()
            tab.page.mouse.move(picture["x"] + 200, picture["y"] + 50, steps=3)
            tab.page.mouse.up()
            tab.wait("!document.querySelector('#whole').hidden")
            tab.page.select_option("#axis", "tokens")
            tab.wait(f"{LOSS}.ariaLabel.includes('against tokens')")
    finally:
        watch.close()


def test_a_page_stays_up_when_the_server_ends(tmp_path: Path) -> None:
    watch = Watch(WatchedRun(make_run(tmp_path / "run")))
    with opened(watch.address) as tab:
        tab.page.wait_for_selector(".chart canvas")
        watch.close()
        tab.wait("document.querySelector('#contact').innerText.includes('does not answer')")
        assert "2 of 2" in tab.text("#sentence") or "Nobody" in tab.text("#sentence")
        tab.complaints.clear()  # of connections that are refused, which the browser tells itself


@pytest.mark.parametrize(("width", "height"), [(360, 740), (1280, 900)])
def test_what_is_under_way_moves_with_the_clock(tmp_path: Path, width: int, height: int) -> None:
    folder = make_run(tmp_path / "run")
    now = time.time()
    told = [step_record(0, step, time=now - 60 + step) for step in range(41, 60)]
    for step, sent in ((49, 250_000), (59, 500_000)):
        one = {**link(1, sent, 70, 0.05), "measured_bytes_per_second": 11.75e6}
        held = machine(0, step, links=[one], measured_bytes_per_second=10e6)
        append(folder, 0, {**held, "time": now - 59 + step})
    append(folder, 0, *told)
    append(folder, 0, {**of(0, "launch", 60, fragment=1), "time": now})
    watch = Watch(WatchedRun(folder))
    bar = "document.querySelector('#lanes .under-way rect')"
    try:
        with opened(watch.address, width, height) as tab:
            tab.wait(f"{bar}")
            before = tab.page.evaluate(f"Number({bar}.getAttribute('width'))")
            tab.wait(f"Number({bar}.getAttribute('width')) > {before} + 4")  # no record has come
            title = "document.querySelector('#lanes .under-way title').textContent"
            tab.wait(f"{title}.includes('training stands still for it')", 15)
            assert "fragment 1: sent at step 60, on the line for" in tab.page.evaluate(title)
            assert "1 transfers under way" in tab.page.evaluate(
                "document.querySelector('#lanes svg').getAttribute('aria-label')"
            )
            append(folder, 0, {**step_record(0, 60, applied=[[1, 60]]), "time": time.time()})
            tab.wait("!document.querySelector('#lanes .under-way')")

            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
            assert "outer state 5 kB, planned 5 kB" in tab.text(".tile[data-key=memory]")
            assert "50 ms" in tab.text(".tile[data-key=round_trip]")
            tile = tab.text(".tile[data-key=line]")
            assert "Mbit/s" in tile and "of 80 measured, while a transfer is under way" in tile
            tab.page.locator("#chart-line").scroll_into_view_if_needed()
            tab.wait(
                "document.querySelector('#chart-line .picture')?.ariaLabel?.includes('measured')"
            )
            assert "0.2 of 94 Mbit/s measured" in tab.text("#links tbody")
            links = tab.text("#links tbody")
            assert "0 \u2192 1" in links and "10 ms" in links and "500 kB" in links
            assert "400 MB" in tab.text("#memory tbody")
            for panel in ("links", "memory", "chart-round_trip", "chart-memory"):
                tab.page.locator(f"#{panel} .why").click()
                assert "It means:" in tab.text(f"#{panel} .meaning")
                tab.page.keyboard.press("Escape")
    finally:
        watch.close()
