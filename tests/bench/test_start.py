"""`dsx bench start` and the model of the time to start: fitted, refused, and really started."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.bench.free_ports import free_low_ports
from dsx.bench.start.bench import Options, StartFailed, measure, starts, summed
from dsx.bench.start.job import Found, Job, Lap
from dsx.bench.start.over_links import keys_of
from dsx.cli import app
from dsx.plan.start_time import Measured, StartModel, fit, read_model, require_sizes, start_model

TRUE = StartModel(
    0.1,
    (0.05, 0.004, 0.0005),
    3e-4,
    1e-5,
    (15.0, 3.0),
    (26.0, 4.0),
    (40.0, 5.0),
    1e9,
    "dsx bench start",
    "here",
)
OVER_LINKS = replace(TRUE, shared=(20.0, 2.0), gateway=(0.05, 0.001))
SIZES = [(2, 2), (2, 8), (2, 32), (4, 8), (4, 32), (8, 8)]


def row_of(model: StartModel, c: int, n: int) -> Measured:
    """What would have been measured if the model were the truth."""
    shared, own = model.shared[0] + model.shared[1] * c, model.own[0] + model.own[1] * math.log2(n)
    own_first = round(model.own_first[0] + model.own_first[1] * n)
    served = round(c * n * shared + n * own + own_first)
    first = model.first[0] + model.first[1] * c + model.first[2] * n
    serving = model.connection_seconds * (c + 1) * n + model.request_seconds * served
    wall = model.fixed_seconds + first + serving
    if model.gateway is not None:
        served, joined = round(n * own + own_first), 2 * n * (c - 1)
        serving = model.connection_seconds * n + model.request_seconds * served
        wall = model.fixed_seconds + first + serving
        return Measured(
            c, n, wall, first, serving, 0.05, served, n, shared, own, own_first, 3 * n, 20,
            model.gateway[0] + model.gateway[1] * joined, joined,
        )  # fmt: skip
    return Measured(
        c, n, wall, first, serving, 0.05, served, (c + 1) * n, shared, own, own_first, 3 * n, 20
    )  # fmt: skip


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "start", *arguments])


@pytest.mark.parametrize("true", [TRUE, OVER_LINKS], ids=["gloo", "links"])
def test_a_fit_finds_the_coefficients_that_rows_were_made_of(true: StartModel) -> None:
    found = fit([row_of(true, c, n) for c, n in SIZES], 1e9, "dsx bench start", "here")
    for name in ("fixed_seconds", "connection_seconds", "request_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-3), name
    for name in ("first", "shared", "own", "own_first"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6), name
    assert (found.gateway or ()) == pytest.approx(true.gateway or (), rel=1e-6)
    assert read_model(found.write()) == found


def test_what_would_be_below_nothing_is_left_out() -> None:
    rows = [row_of(TRUE, c, n) for c, n in SIZES]
    falling = [Measured(**{**vars(r), "first_seconds": 0.1 - 0.001 * r.ranks}) for r in rows]
    found = fit(falling, 1e9, "", "")
    assert min(found.first) == 0 and 0.05 < found.first[0] < 0.11


def test_terms_are_what_the_module_says() -> None:
    terms = TRUE.terms(8, 1024, rtt_seconds=0.05, fragments=4)
    assert terms.fixed == 0.1 and terms.first_rank == pytest.approx(0.05 + 0.032 + 0.512)
    assert terms.store_of_all == pytest.approx(8192 * (3e-4 + 39e-5))
    assert terms.store_of_cluster == pytest.approx(1024 * (3e-4 + 66e-5) + 5160e-5)
    assert terms.round_trips == pytest.approx(0.05 * (39 + 8 + 10))
    assert terms.total == pytest.approx(sum(vars(terms).values()))
    assert TRUE.hash_seconds(2_000_000_000) == 2.0


def test_terms_over_links_have_none_that_grows_with_clusters_x_ranks() -> None:
    terms = OVER_LINKS.terms(8, 1024, rtt_seconds=0.05, fragments=4, streams=3)
    assert terms.store_of_all == 0.0 and terms.gateway == pytest.approx(0.05 + 8 * 7 * 4 * 1e-3)
    assert terms.round_trips == pytest.approx(0.05 * (36 + 10))
    assert terms.store_of_cluster == TRUE.terms(8, 1024).store_of_cluster
    more = OVER_LINKS.terms(16, 1024, rtt_seconds=0.05, streams=3)
    assert more.store_of_cluster == terms.store_of_cluster
    assert OVER_LINKS.terms(8, 1).gateway == 0.0  # one rank listens itself


@pytest.mark.parametrize("transport", ["gloo", "link"])
def test_the_models_that_come_with_dsx_start_8_x_1024_within_20_seconds(transport: Any) -> None:
    model = start_model(transport)
    assert f"dsx bench start --transport {transport}" in model.command
    assert (model.gateway is not None) == (transport == "link")
    assert 2 < model.terms(8, 1024, rtt_seconds=0.05, fragments=4).total < 20


def test_laps_are_summed_without_the_engines_own() -> None:
    laps = [Lap("stores", 1, 0.5, 0.1, 5, 7), Lap("world", 2, 1, 0.2, 0, 90),
            Lap("meet", 3, 0.25, 0.3, 2, 1), Lap("model", 9, 4, 0, 0, 0)]  # fmt: skip
    found = [Found(c, r, laps, 10 + r) for c in range(2) for r in range(2)]
    assert Found.read(found[0].write()) == found[0]
    row = summed([found])
    assert (row.num_clusters, row.ranks, row.sockets_first, row.sockets_other) == (2, 2, 10, 11)
    assert row.first_seconds == row.other_seconds == 0.75 and row.wall_seconds == 4
    assert row.serving_seconds == pytest.approx(0.6) and row.connections == 6
    assert row.served == 4 * 7 + 2 * 98 and (row.shared, row.own, row.own_first) == (7, 8, 8)


@pytest.mark.parametrize("text", ["8", "1x8", "2x0", "2x8,", "axb", ""])
def test_sizes_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write clusters x ranks of each"):
        require_sizes("--sizes", text)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--sizes 2x8,3", "--sizes '2x8,3': write clusters x ranks"),
        ("--to 1x4", "--to '1x4': write clusters x ranks"),
        ("--sizes 8x1024", "--sizes 8x1024: 8192 processes; at most 1024 are forked here"),
        ("--json no/such/file", "there is no such directory"),
    ],
)
def test_mistakes_are_answered_before_anything_starts(wrong: str, said: str) -> None:
    result = call(*wrong.split())
    assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_too_few_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="a fit takes two numbers of clusters"):
        fit([row_of(TRUE, 2, 8), row_of(TRUE, 2, 32), row_of(TRUE, 2, 2)], 1e9, "", "")


@pytest.mark.ci
def test_real_starts_are_measured_fitted_and_extrapolated(tmp_path: Path) -> None:
    path = tmp_path / "start.json"
    result = call("--sizes", "2x2,2x6,4x2", "--to", "8x1024", "--repeats", "1", "--json", str(path))
    assert result.exit_code == 0, result.output
    told = json.loads(path.read_text())
    rows = {(r["num_clusters"], r["ranks"]): Measured(**r) for r in told["rows"]}
    assert rows.keys() == {(2, 2), (2, 6), (4, 2)}
    known = start_model()
    for (c, n), row in rows.items():
        # requests do not depend on how busy the host is: what the model says, or it has grown old
        assert row.shared == pytest.approx(known.shared_requests(c), abs=3)
        assert row.own <= 1.5 * known.own_requests(n)
        assert row.connections == (c + 1) * n and row.served >= c * n * row.shared
    assert "extrapolated" in result.output and "8 x 1,024" in result.output


@pytest.mark.ci
def test_the_model_is_within_a_factor_of_two_of_a_real_start() -> None:
    """By processor time, of which other work on the host takes nothing: waits are the model's."""
    jobs = [Job(c, 4, *ports_for(c), 300.0) for c in (2, 4)]
    model = start_model()
    for job, found in zip(jobs, starts(jobs), strict=True):
        row = summed([found])
        terms = model.terms(job.num_clusters, job.ranks)
        real = model.fixed_seconds + row.first_seconds + row.serving_seconds
        assert real / 2 < terms.total < 2 * real


@pytest.mark.ci
def test_over_links_no_place_is_asked_by_all_ranks_of_all_clusters() -> None:
    """Connections, and requests between clusters, are counted: they do not depend on the host."""
    sizes = [(2, 1), (2, 2), (2, 6), (4, 2)]
    rows = measure(Options(sizes, 1, 300.0, over_links=True), lambda line: None)
    for (c, n), row in zip(sizes, rows, strict=True):
        # two connections of a rank to each peer: no other one goes through a host's gateway
        assert row.gateway_joined == (2 * n * (c - 1) if n > 1 else 0)
        assert row.own_first <= 30 + 10 * n and row.connections == n
    known = start_model("link")
    assert all(row.shared <= 3 * known.shared_requests(2) for row in rows)
    assert rows[0].gateway_seconds == 0.0 and (rows[2].gateway_seconds or 0.0) > 0.0
    with keys_of(3) as keys:
        jobs = [Job(3, 4, 0, free_low_ports(3), 300.0, keys, free_low_ports(3))]
        (found,) = starts(jobs)
    asked = {(one.cluster, one.rank): one.sum("shared", ()) for one in found}
    # ranks that are first nowhere ask nobody else's; the first one's log talks to two others
    assert all(count == 0 for (_, rank), count in asked.items() if rank), asked
    assert all(asked[cluster, 0] > 10 for cluster in (1, 2))


def ports_for(num_clusters: int) -> tuple[int, list[int]]:
    meeting, *ports = free_low_ports(1 + num_clusters)
    return meeting, ports


@pytest.mark.ci
def test_a_rank_that_cannot_start_is_told_of() -> None:
    """A store's port that is no one's to take: who should host it says so, and all are ended."""
    meeting, ports = ports_for(2)
    job = Job(2, 1, meeting, [ports[0], 1 << 16], 60.0)
    with pytest.raises(StartFailed, match=r"cluster 1, rank 0: MASTER_PORT='65536'"):
        list(starts([job]))


def test_of_several_times_the_least_counts() -> None:
    times = [
        [
            Found(c, 0, [Lap("stores", a, cpu, 0, 1, 1), Lap("meet", b, 0, 0, 1, 1)], 9)
            for c in (0, 1)
        ]
        for a, b, cpu in ((1.0, 5.0, 0.3), (4.0, 2.0, 0.2))
    ]
    row = summed(times)
    assert row.wall_seconds == 3.0 and row.first_seconds == 0.2


def test_options_have_a_bound() -> None:
    assert Options(require_sizes("--sizes", "2x512")).repeats == 20
