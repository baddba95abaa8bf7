"""The measurements of `dsx bench links`: which, in which order, and what they come to.

Kinds alternate: each repeat has one measurement of every kind on every line, so what else the
machine does meets all of them alike.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsx.bench.free_ports import free_ports
from dsx.bench.kinds import Kind
from dsx.bench.line import shared_cores
from dsx.bench.links.job import FOUND, NAMES, Found, Job
from dsx.bench.testbed import INTERFACE, Line, Testbed
from dsx.plan.published.scenario import require_number

ETHERNET_SHARE = 0.956  # of a line's bits: what TCP's and Ethernet's headers leave, at most
MESSAGES, ROUNDS = "messages", "int4, low rank"
_PORT = 29400
_SETUP_SECONDS = 60.0


class MeasurementFailed(RuntimeError):
    """An end has ended with an error, or has not ended."""


@dataclass(frozen=True)
class Wire:
    """What is between the two ends: `mbit` each way, None for loopback; `ways` 1 or 2 are used."""

    mbit: float | None
    ways: int

    @classmethod
    def parse(cls, text: str) -> Wire:
        """Read `loopback`, `200` or `200x2`; ValueError for anything else."""
        rate, times, ways = text.strip().partition("x")
        try:
            if times and ways not in ("1", "2"):
                raise ValueError(ways)
            count = int(ways or 1)
            if rate == "loopback":
                return cls(None, count)
            Line(float(rate))
            return cls(float(rate), count)
        except ValueError:
            raise ValueError(
                f"--lines has {text!r}: write loopback or Mbit/s, and x2 for both ways at once, as "
                "in loopback,200x2,1000"
            ) from None


@dataclass(frozen=True)
class Options:
    """What is asked; `megabytes` of a message, of 10**6 bytes; `seconds` of each window.

    `rounds` of many short messages on each throttled line, too (rounds.py); 0: none.
    """

    kinds: Sequence[Kind]
    wires: Sequence[Wire]
    seconds: float = 3.0
    repeats: int = 3
    megabytes: float = 4.0
    batch: int = 4
    training_windows: int = 1
    rounds: int = 20

    def __post_init__(self) -> None:
        require_number("seconds", self.seconds, 0.01, 600)
        require_number("repeats", self.repeats, 1, 100)
        require_number("megabytes", self.megabytes, 0.001, 500)
        require_number("batch", self.batch, 1, 1000)
        require_number("training_windows", self.training_windows, 0, 100)
        require_number("rounds", self.rounds, 0, 10_000)

    @property
    def message_bytes(self) -> int:
        """Of one message."""
        return round(self.megabytes * 1e6)


@dataclass(frozen=True)
class Row:
    """Medians of one kind on one line, each with half of what lies between least and most.

    `gbit_per_second` one way; `cpu_seconds_per_gb` of both ends' processes. None where there is no
    line, or no training. `load`: "messages" of one length, or "int4, low rank": rounds of a run,
    whose time is that of codes, too.
    """

    load: str
    transport: str
    security: str
    line_mbit: float | None
    ways: int
    repeats: int
    gbit_per_second: float
    gbit_half_range: float
    cpu_seconds_per_gb: float | None
    cpu_half_range: float | None
    line_percent: float | None
    line_half_range: float | None
    wire_per_payload: float | None
    wire_half_range: float | None
    step_slowdown_percent: float | None
    step_half_range: float | None


def measure(options: Options, tell: Callable[[str], None]) -> list[Row]:
    """Return a row per line and kind. MeasurementFailed, TestbedUnavailable."""
    if any(wire.mbit is not None for wire in options.wires):
        with Testbed(2, None) as bed:
            return _measure(options, bed, tell)
    return _measure(options, None, tell)


def _measure(options: Options, bed: Testbed | None, tell: Callable[[str], None]) -> list[Row]:
    found: dict[tuple[Wire, Kind], list[list[Found]]] = {
        (wire, kind): [] for wire in options.wires for kind in options.kinds
    }
    of_rounds: dict[tuple[Wire, Kind], list[list[Found]]] = {}
    with _keys() as keys:
        for repeat in range(options.repeats):
            for wire in options.wires:
                for kind in options.kinds:
                    before = f"{repeat + 1}/{options.repeats} {_of(wire)} {kind}"
                    ends = _ends(options, wire, kind, keys, bed)
                    found[wire, kind].append(ends)
                    tell(f"{before}: {_say(wire, ends)}")
                    if options.rounds and wire.mbit is not None:
                        ends = _ends(options, wire, kind, keys, bed, options.rounds)
                        of_rounds.setdefault((wire, kind), []).append(ends)
                        tell(f"{before}, {ROUNDS}: {_wire(ends):.3f} of the payload on the wire")
    rows = [row_of(wire, kind, repeats) for (wire, kind), repeats in found.items()]
    return rows + [row_of_rounds(wire, kind, all_) for (wire, kind), all_ in of_rounds.items()]


def _ends(
    options: Options, wire: Wire, kind: Kind, keys: Sequence[str], bed: Testbed | None,
    rounds: int = 0,
) -> list[Found]:  # fmt: skip
    """Start both ends, and return what each has found."""
    if wire.mbit is None:
        addresses, ports, interface = ["127.0.0.1"] * 2, free_ports(2), "lo"
    else:
        assert bed is not None
        bed.throttle(Line(wire.mbit))
        addresses, ports, interface = [bed.address(m) for m in range(2)], [_PORT] * 2, INTERFACE
    in_flight = 2 * options.batch * options.message_bytes
    drain = 0.0 if wire.mbit is None else 8 * in_flight / (wire.mbit * 1e6)
    windows = 1 + 2 * options.training_windows
    seconds = _SETUP_SECONDS + 10 * windows * (options.seconds + drain)
    job = Job(
        kind, addresses, ports, keys, wire.ways, options.message_bytes, options.batch,
        options.seconds, options.training_windows, interface, seconds, rounds,
    )  # fmt: skip
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for m in range(2):
            words = [sys.executable, "-m", "dsx.bench.links.worker", "--job", job.write()]
            words += ["--cluster", str(m)]
            if wire.mbit is None:
                processes.append(
                    subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                )
            else:
                assert bed is not None
                core = shared_cores(2)[m]
                processes.append(bed.start(m, words, output=subprocess.PIPE, core=core))
        return [_read(process, m, kind, wire, seconds) for m, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _read(
    process: subprocess.Popen[bytes], end: int, kind: Kind, wire: Wire, seconds: float
) -> Found:
    what = f"the {NAMES[end]} end of {kind} on {_of(wire)}"
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise MeasurementFailed(f"{what} has not ended within {seconds:g} s") from error
    text = out.decode(errors="replace").strip()
    if process.returncode:
        raise MeasurementFailed(f"{what} has ended with {process.returncode}: {text[-2000:]}")
    found = [line for line in text.splitlines() if line.startswith(FOUND)]
    if len(found) != 1:
        raise MeasurementFailed(f"{what} has found nothing: {text[-2000:]}")
    return Found.read(found[0].removeprefix(FOUND))


def row_of(wire: Wire, kind: Kind, repeats: Sequence[Sequence[Found]]) -> Row:
    """Return the medians of some repeats, each with what both ends have found."""
    gbit = _spread([_gbit(wire, ends) for ends in repeats])
    cpu = _spread([_cpu(ends) for ends in repeats])
    line = wire_share = step = (None, None)
    if wire.mbit is not None:
        most = ETHERNET_SHARE * wire.mbit / 1e3
        line = _spread([100 * _gbit(wire, ends) / most for ends in repeats])
        wire_share = _spread([_wire(ends) for ends in repeats])
    slower = [100 * s for ends in repeats for s in _slowdowns(ends)]
    if slower:
        step = _spread(slower)
    return Row(
        MESSAGES, kind.transport, kind.security, wire.mbit, wire.ways, len(repeats),
        *gbit, *cpu, *line, *wire_share, *step,
    )  # fmt: skip


def row_of_rounds(wire: Wire, kind: Kind, repeats: Sequence[Sequence[Found]]) -> Row:
    """Return the medians of some repeats of rounds, which go both ways whatever the line's are."""
    both = Wire(wire.mbit, 2)
    gbit, none = _spread([_gbit(both, ends) for ends in repeats]), (None, None)
    wire_share = _spread([_wire(ends) for ends in repeats])
    return Row(
        ROUNDS, kind.transport, kind.security, wire.mbit, 2, len(repeats),
        *gbit, *none, *none, *wire_share, *none,
    )  # fmt: skip


def _gbit(wire: Wire, ends: Sequence[Found]) -> float:
    sent = sum(end.passed.payload_bytes for end in ends) / wire.ways
    return 8e-9 * sent / max(end.passed.seconds for end in ends)


def _cpu(ends: Sequence[Found]) -> float:
    sent = sum(end.passed.payload_bytes for end in ends)
    return sum(end.passed.cpu_seconds for end in ends) / (1e-9 * sent)


def _wire(ends: Sequence[Found]) -> float:
    """Return what the line carries, in each way that has payload, per byte of payload.

    Acknowledgements are in it where both ways have some; else they go the way that is empty.
    """
    senders = [end.passed for end in ends if end.passed.payload_bytes]
    return sum(s.wire_bytes for s in senders) / sum(s.payload_bytes for s in senders)


def _slowdowns(ends: Sequence[Found]) -> list[float]:
    """Return by how much steps took longer beside a transfer, window by window; means of ends."""
    each = [
        [beside / alone - 1 for alone, beside in zip(end.alone, end.beside, strict=True)]
        for end in ends
    ]
    return [statistics.fmean(windows) for windows in zip(*each, strict=True)]


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return statistics.median(values), (max(values) - min(values)) / 2


def _say(wire: Wire, ends: Sequence[Found]) -> str:
    slower = _slowdowns(ends)
    steps = f", steps {100 * statistics.fmean(slower):+.1f} %" if slower else ""
    return f"{_gbit(wire, ends):.3g} Gbit/s, {_cpu(ends):.2f} core-s/GB{steps}"


def _of(wire: Wire) -> str:
    name = "loopback" if wire.mbit is None else f"{wire.mbit:g} Mbit/s"
    return f"{name} {'both ways' if wire.ways == 2 else 'one way'}"


@contextlib.contextmanager
def _keys() -> Generator[list[str]]:
    """Yield a folder of keys per end, each with both members' public ones."""
    from dsx.comm.links.key_changes import add_key, make_key

    with tempfile.TemporaryDirectory(prefix="dsx-bench-links-") as place:
        folders = [Path(place, name) for name in NAMES]
        made = [make_key(folder, name)[0] for folder, name in zip(folders, NAMES, strict=True)]
        for folder in folders:
            for key in made:
                add_key(folder, key)
        yield [str(folder) for folder in folders]
