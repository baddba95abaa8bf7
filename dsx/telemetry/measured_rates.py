"""What the line gave when `dsx net-test` measured it, for what a run shows beside its own rates.

`metrics.net_test` names the file that `dsx net-test --json` wrote (bench/net_test/figures.py says
what is in it). It is taken only where it is of this run's line as the run uses it: another number
of clusters or streams, another transport or security gives other rates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_MOST = 1e18  # bits per second
_Rates = dict[tuple[int, int], float]  # bits per second, by a cluster and streams


@dataclass(frozen=True)
class MeasuredRates:
    """Of one cluster, in bytes of payload per second.

    `line`: what it sent in an all-reduce of all clusters. `links`: what it sent to each other one
    while that sent, too, and no third one did.
    """

    line: float
    links: Mapping[int, float]


@dataclass(frozen=True)
class Way:
    """How messages of a run go, under the names that the file has."""

    clusters: int
    transport: str
    security: str


def read_measured_rates(path: Path, cluster: int, way: Way, streams: int) -> MeasuredRates:
    """Return what a cluster's line gave over so many streams.

    ValueError where the file cannot be read, is another one, or of a line that is used otherwise.
    """
    name = str(path)
    try:
        found: Any = json.loads(path.read_bytes())
        measured = Way(int(found["clusters"]), str(found["transport"]), str(found["security"]))
        line: _Rates = {
            (cluster, row["streams"]): _rate(row["bits_per_second"]) for row in found["all_reduce"]
        }
        links: _Rates = {
            (pair["to_cluster"], pair["streams"]): _rate(pair["both_ways_bits_per_second"])
            for pair in found["pairs"]
            if pair["from_cluster"] == cluster
        }
    except OSError as error:
        raise ValueError(
            f"dsx.metrics.net_test={name!r} cannot be read: {error.strerror or error}; write it by "
            "dsx net-test --json in every cluster, or leave the key out"
        ) from error
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"dsx.metrics.net_test={name!r} is no file of dsx net-test "
            f"({type(error).__name__}: {error}); write it by dsx net-test --json"
        ) from error
    for field, own in asdict(way).items():
        told = asdict(measured)[field]
        if told != own:
            raise ValueError(
                f"dsx.metrics.net_test={name!r} was measured with {field} {told}, and this run has "
                f"{own}: measure as it goes (dsx net-test --config), or leave the key out"
            )
    if (cluster, streams) not in line:
        counts = ", ".join(str(count) for _, count in line)
        raise ValueError(
            f"dsx.metrics.net_test={name!r} was measured over {counts} streams, and this run has "
            f"link.streams={streams}: measure again with --streams {streams}, or leave the key out"
        )
    rates = {to: rate / 8 for (to, count), rate in links.items() if count == streams}
    return MeasuredRates(line[cluster, streams] / 8, rates)


def say_rate(bytes_per_second: float, measured: float | None) -> str:
    """Return a rate in Mbit/s, beside what the line gave where that is known."""
    rate = mbits(bytes_per_second)
    return f"{rate} Mbit/s" if measured is None else f"{rate} of {mbits(measured)} Mbit/s measured"


def mbits(bytes_per_second: float) -> str:
    """Return a rate in Mbit/s, of three digits at least."""
    rate = 8e-6 * bytes_per_second
    return f"{rate:.3g}" if rate < 999.5 else f"{rate:,.0f}"


def _rate(bits_per_second: Any) -> float:
    if type(bits_per_second) not in (int, float) or not 0 < bits_per_second <= _MOST:
        raise ValueError(f"a rate of {bits_per_second!r} bits per second")
    return float(bits_per_second)
