"""What a rank's recorder writes, and when."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsx.core.exchange import HEADER, ExchangeRound, to_all
from dsx.core.membership import Seat
from dsx.core.recorder import UNTRACED
from dsx.engines.torch import TorchAdapter
from dsx.method.fragments import WholeModel
from dsx.telemetry.behind import Behind
from dsx.telemetry.trace.files import select
from dsx.telemetry.trace.parts import part_path, parts_of, trace_path
from dsx.telemetry.trace.recorder import Trace, now
from tests.telemetry.trace.runs import read_timeline, records, sessions
from tests.tiny import TinyNet, batch


def new_trace(path: Path, steps: tuple[int, int] = (1, 1000), session: str = "s") -> Trace:
    return Trace(path, session, Seat.of(0, 2), steps)


def take_steps(trace: Trace, first: int, last: int) -> None:
    trace.begin(first - 1)
    for step in range(first, last + 1):
        with trace.span("forward", "forward"):
            pass
        timer = trace.span_timer("launch", 3, step)
        timer.mark("read")
        timer.mark("copy")
        timer.end(launched=step)
        trace.end_step(step)
    trace.close()


def test_spans_have_name_thread_time_and_step(tmp_path: Path) -> None:
    path = trace_path(tmp_path / "new", 0, 0)
    take_steps(new_trace(path), 1, 2)
    spans = records(path)
    assert sessions(path) == ["s"]
    assert [(s["name"], s["category"], s["step"]) for s in spans[:4]] == [
        ("forward", "forward", 1),
        ("read", "launch", 1),
        ("copy", "launch", 1),
        ("launch", "launch", 1),
    ]
    assert len(spans) == 8 and {s["thread"] for s in spans} == {"training"}
    _, read, copy, launch = spans[:4]
    assert launch["fragment"] == 3 and launch["launched"] == 1
    end = copy["start_us"] + copy["duration_us"]
    assert read["start_us"] + read["duration_us"] == copy["start_us"]
    assert launch["start_us"] == read["start_us"]
    assert end <= launch["start_us"] + launch["duration_us"]


def test_two_recorders_share_a_clock(tmp_path: Path) -> None:
    traces = [new_trace(trace_path(tmp_path, 0, i)) for i in range(2)]
    began = now()
    for trace in traces:
        trace.add("x", "compute", began)
        trace.close()
    first, second = (records(trace_path(tmp_path, 0, i))[0]["start_us"] for i in range(2))
    assert abs(first - second) < 10_000


def test_a_boundary_writes_what_came_before_it(tmp_path: Path) -> None:
    trace = new_trace(trace_path(tmp_path, 0, 0))
    trace.add("forward", "forward", now())
    assert not list(tmp_path.iterdir())
    trace.end_step(1)
    trace._behind.flush()
    assert len(records(trace_path(tmp_path, 0, 0))) == 1  # although the run may now be killed


def test_what_comes_after_the_end_is_appended(tmp_path: Path) -> None:
    trace = new_trace(trace_path(tmp_path, 0, 0))
    take_steps(trace, 1, 3)
    trace.add("late", "transfer", now())
    trace.close()
    written = [span["name"] for span in records(trace_path(tmp_path, 0, 0))]
    assert len(written) == 13 and written[-1] == "late"


def test_a_resumed_run_drops_the_steps_it_takes_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = trace_path(tmp_path, 0, 0)
    take_steps(new_trace(path, session="one"), 1, 6)
    with part_path(path, 1).open("ab") as file:
        file.write(part_path(path, 1).read_bytes()[:77])  # killed while writing
    trace = new_trace(path, session="two")
    trace.begin(0)  # a handle begins before it knows that it will resume
    take_steps(trace, 5, 7)
    assert [s["step"] for s in records(path) if s["name"] == "forward"] == [1, 2, 3, 4, 5, 6, 7]
    assert sessions(path) == ["one", "two"]
    assert f"dropping incomplete spans from {part_path(path, 1)}" in caplog.text
    take_steps(new_trace(path, session="three"), 1, 2)
    assert [s["step"] for s in records(path) if s["name"] == "forward"] == [1, 2]
    assert sessions(path) == ["three"]


def test_what_a_step_that_goes_on_has_written_beside_later_ones_stays(tmp_path: Path) -> None:
    path = trace_path(tmp_path, 0, 0)
    trace = new_trace(path, session="one")
    trace.begin(0)
    trace.add("forward", "forward", now())
    trace.end_step(1)
    trace.add("transfer", "transfer", now(), 1)
    trace.add("forward", "forward", now())
    trace.end_step(2)
    trace.close()
    trace = new_trace(path, session="two")
    trace.begin(1)
    trace.add("forward", "forward", now())
    trace.end_step(2)
    trace.close()
    found = [(s["name"], s["step"]) for s in records(path)]
    assert found == [("forward", 1), ("transfer", 1), ("forward", 2)]
    assert sessions(path) == ["one", "two"]


def test_the_oldest_steps_go_where_there_is_no_more_room(tmp_path: Path) -> None:
    path = trace_path(tmp_path, 0, 0)
    trace = Trace(path, "s", Seat.of(0, 2), (1, 10_000), most_bytes=16_000)
    trace.begin(0)
    for step in range(1, 401):
        for _ in range(5):
            trace.add("forward", "forward", now())
        trace.end_step(step)
    trace.close()
    parts = parts_of(tmp_path)[0, 0]
    sizes = [part.stat().st_size for part in parts]
    assert sum(sizes) <= 16_000 and len(parts) >= 6 and max(sizes) < 2 * 16_000 / 8
    kept = sorted({span.step for span in read_timeline(tmp_path).spans})
    assert kept[-1] == 400 and kept == list(range(kept[0], 401)) and 50 < len(kept) < 350
    trace = Trace(path, "t", Seat.of(0, 2), (1, 10_000), most_bytes=16_000)
    trace.begin(390)
    trace.add("forward", "forward", now())
    trace.end_step(391)
    trace.close()
    resumed = [span.step for span in read_timeline(tmp_path).spans]
    assert resumed[-1] == 391 and sorted({*resumed}) == list(range(kept[0], 392))


class HungDisk(Behind):
    """What never gets to write until it is told to."""

    def __init__(self) -> None:
        super().__init__(deadline_seconds=30)
        self.answers = threading.Event()

    def do(
        self, do: Callable[[], object], path: Path, records: int = 1, is_whole: bool = False
    ) -> bool:
        def wait_first() -> None:
            assert self.answers.wait(30)
            do()

        return super().do(wait_first, path, records, is_whole)


def test_a_disk_that_hangs_costs_spans_and_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsx.telemetry.trace.recorder._MOST_WAITING", 100)
    path, disk = trace_path(tmp_path, 0, 0), HungDisk()
    trace = Trace(path, "s", Seat.of(0, 2), (1, 10_000), behind=disk)
    trace.begin(0)
    for step in range(1, 31):
        for _ in range(10):
            trace.add("forward", "forward", now())
        trace.end_step(step)
    assert disk.missing.by_file() == {path.name: 200}
    disk.answers.set()
    trace.flush()
    for _ in range(110):  # more between two boundaries than is kept
        trace.add("forward", "forward", now())
    trace.end_step(31)
    trace.close()
    disk.close()
    assert disk.missing.by_file() == {path.name: 210}
    selection = select(tmp_path)
    assert len(records(path)) == 200 and selection.dropped() == 210


def test_nothing_is_written_before_it_is_known_whose_folder_it_is(tmp_path: Path) -> None:
    earlier, later = trace_path(tmp_path, 0, 0), trace_path(tmp_path / "2", 0, 0)
    take_steps(new_trace(earlier, session="one"), 1, 6)
    before = part_path(earlier, 1).read_bytes()
    trace = new_trace(earlier, session="two")
    for path in (earlier, later):  # begun, and begun again
        trace.begin(0, path)
        trace.add("forward", "forward", now())
        trace.flush()
    assert part_path(earlier, 1).read_bytes() == before and not later.parent.exists()
    trace.end_step(1)
    trace.close()
    assert [span["name"] for span in records(later)] == ["forward", "forward"]


def test_only_the_steps_asked_for_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = trace_path(tmp_path, 0, 0)
    with caplog.at_level(logging.INFO, "dsx"):
        take_steps(new_trace(path, (3, 4)), 1, 6)
    assert {s["step"] for s in records(path)} == {3, 4}
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "the last step traced has been taken (metrics.trace_steps is [3, 4])"
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, "dsx"):
        new_trace(path, (3, 4)).begin(9)
    assert "nothing is traced any more" in caplog.text


def test_threads_add_while_the_training_thread_writes(tmp_path: Path) -> None:
    trace = new_trace(trace_path(tmp_path, 0, 0))

    def add() -> None:
        for _ in range(2000):
            trace.add("codes", "network", now(), step=1)

    threads = [threading.Thread(target=add, name=f"dsx-fragment-{i}") for i in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        trace.flush()
    trace.close()
    names = [s["thread"] for s in records(trace_path(tmp_path, 0, 0))]
    assert [names.count(f"dsx-fragment-{i}") for i in range(3)] == [2000] * 3


def exchange(values: list[torch.Tensor]) -> Generator[ExchangeRound, None, torch.Tensor]:
    header = torch.zeros(3, dtype=torch.int64)
    yield to_all([header], [[header], [header]], HEADER)
    for value in values:
        yield to_all([value], [[value], [value]])
    yield to_all([torch.zeros(2)], [[torch.zeros(2)]] * 2, "sideband")
    return values[0]


def test_an_exchange_is_followed_round_by_round(tmp_path: Path) -> None:
    trace = new_trace(trace_path(tmp_path, 0, 0))
    mean = torch.ones(5)
    followed = trace.follow(exchange([mean, torch.ones(7)]), 2, 4)
    rounds = [round.what for round in _until_end(followed, mean)]
    trace.close()
    assert rounds == ["header", "codes", "codes", "sideband"]
    spans = records(trace_path(tmp_path, 0, 0))
    assert [(s["name"], s["category"], s.get("bytes")) for s in spans] == [
        ("copy", "copy", None),
        ("handshake", "meet", 48),
        ("encode", "encode", None),
        ("codes", "network", 20),
        ("reduce", "reduce", None),
        ("codes", "network", 28),
        ("decode", "decode", None),
        ("sideband", "network", 8),
        ("sideband", "decode", None),
        ("transfer", "transfer", 48 + 20 + 28 + 8),
    ]
    assert all(s["fragment"] == 2 and s["launched"] == s["step"] == 4 for s in spans)
    assert [s["round"] for s in spans if "round" in s] == [0, 1, 2, 3]
    assert all(s["peers"] == [1] for s in spans if "round" in s)


def _until_end(followed: Any, mean: torch.Tensor) -> list[ExchangeRound]:
    rounds: list[ExchangeRound] = []
    while True:
        try:
            rounds.append(next(followed))
        except StopIteration as stop:
            assert stop.value is mean
            return rounds


def test_without_a_trace_nothing_is_made() -> None:
    generator = exchange([torch.ones(2)])
    assert UNTRACED.follow(generator, 0, 1) is generator
    assert UNTRACED.span_timer("launch", 0, 1) is UNTRACED.span_timer("apply", 1, 2)


def traced_torch(path: Path) -> tuple[Trace, nn.Module, torch.optim.Optimizer]:
    model = TinyNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = new_trace(path)
    TorchAdapter(model, optimizer, WholeModel()).trace_compute(trace)
    return trace, model, optimizer


def names(path: Path) -> list[tuple[str, int]]:
    return [(s["name"], s["step"]) for s in records(path)]


def test_forward_backward_and_optimizer_step_of_plain_torch(tmp_path: Path) -> None:
    trace, model, optimizer = traced_torch(trace_path(tmp_path, 0, 0))
    for step in (1, 2):
        for part in range(step):  # micro-batches
            model(*batch(0, step, part)).backward()
        optimizer.step()
        trace.end_step(step)
    model.eval()
    model(*batch(0, 3))
    trace.close()
    one = [("forward", 2), ("backward", 2)]
    assert names(trace_path(tmp_path, 0, 0)) == [
        ("forward", 1), ("backward", 1), ("optimizer step", 1),
        *one, *one, ("optimizer step", 2),
        ("evaluation", 3),
    ]  # fmt: skip
    spans = records(trace_path(tmp_path, 0, 0))
    for before, after in zip(spans, spans[1:], strict=False):
        assert before["start_us"] + before["duration_us"] <= after["start_us"]


def test_a_module_that_is_not_called_has_one_span_of_compute(tmp_path: Path) -> None:
    trace, model, optimizer = traced_torch(trace_path(tmp_path, 0, 0))
    for step in (1, 2):
        model.layers[0](batch(0, step)[0]).sum().backward()
        optimizer.step()
        trace.end_step(step)
    trace.close()
    assert names(trace_path(tmp_path, 0, 0)) == [
        ("compute", 1), ("optimizer step", 1), ("compute", 2), ("optimizer step", 2),
    ]  # fmt: skip


def test_a_backward_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    trace, model, optimizer = traced_torch(trace_path(tmp_path, 0, 0))
    loss = model(*batch(0, 1))

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    handle = model.layers[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    handle.remove()
    model(*batch(0, 1)).backward()
    optimizer.step()
    trace.close()
    found = [name for name, _ in names(trace_path(tmp_path, 0, 0))]
    assert found == ["forward", "forward", "backward", "optimizer step"]
