"""The tables of `dsx bench start`: what was measured, the fit beside it, what it comes to."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dsx.plan.start_time import Measured, StartModel


def show(rows: Sequence[Measured], console: Console) -> None:
    """Print what was measured."""
    over_links = any(row.gateway_seconds is not None for row in rows)
    caption = (
        "s: of a core; requests: what a store of the first rank was asked, and what another rank "
        "asked the store of all and its cluster's; sockets of both; wall: here, the slowest rank"
    )
    if over_links:
        caption = (
            "s: of a core; requests: what the first rank's store of its cluster was asked, what "
            "another cluster's first rank asked it, and another rank its cluster's store; sockets "
            "of both ranks; gateway: the first cluster's, and connections through it; wall: here, "
            "the slowest rank"
        )
    table = Table(title="measured", title_justify="left", caption=caption, caption_justify="left")
    names = ["", "first", "serving", "another", "asked", "all", "own", "sockets"]
    for name in (*names, *(["gateway"] if over_links else []), "wall"):
        table.add_column(name, justify="right")
    for row in rows:
        gateway = f"{row.gateway_seconds or 0.0:.3f} s, {row.gateway_joined}"
        table.add_row(
            f"{row.num_clusters} x {row.ranks}", f"{row.first_seconds:.3f} s",
            f"{row.serving_seconds:.3f} s", f"{row.other_seconds:.3f} s", f"{row.served:,}",
            f"{row.shared:.0f}", f"{row.own:.0f}", f"{row.sockets_first}, {row.sockets_other}",
            *([gateway] if over_links else []), f"{row.wall_seconds:.1f} s",
        )  # fmt: skip
    console.print(table)


def show_fit(rows: Sequence[Measured], model: StartModel, console: Console) -> None:
    """Print the coefficients, and how far each measurement is from them."""
    a, per_cluster, per_rank = model.first
    who = "a rank" if model.gateway is None else "a first rank"
    lines = [
        f"fixed: {model.fixed_seconds:.3f} s",
        f"first rank: {a:.3f} s + {1e3 * per_cluster:.2f} ms C + {1e3 * per_rank:.3f} ms N",
        f"a store: {1e6 * model.connection_seconds:.0f} us a connection, "
        f"{1e6 * model.request_seconds:.1f} us a request",
        f"requests of {who} to the store of all: {model.shared[0]:.1f} + {model.shared[1]:.2f} C; "
        f"of a rank to its cluster's: {model.own[0]:.1f} + {model.own[1]:.2f} log2 N, of a first "
        f"one {model.own_first[0]:.1f} + {model.own_first[1]:.2f} N",
        f"digests of weights: {model.hash_bytes_per_second / 1e9:.2f} GB/s",
    ]
    if model.gateway is not None:
        start, each = model.gateway
        lines.insert(-1, f"a gateway: {start:.3f} s + {1e3 * each:.2f} ms a connection")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    table = Table(title="fit / measured", title_justify="left")
    for name in ("", "first rank", "serving", "requests to all", "to its cluster"):
        table.add_column(name, justify="right")
    for row in rows:
        terms = model.terms(row.num_clusters, row.ranks)
        serving = model.connection_seconds * row.connections + model.request_seconds * row.served
        shared, own = model.shared_requests(row.num_clusters), model.own_requests(row.ranks)
        table.add_row(
            f"{row.num_clusters} x {row.ranks}", f"{terms.first_rank / row.first_seconds:.2f}",
            f"{serving / row.serving_seconds:.2f}",
            *((f"{shared / row.shared:.2f}", f"{own / row.own:.2f}") if row.ranks > 1 else ()),
        )  # fmt: skip
    console.print(table)


def show_sizes(
    sizes: Sequence[tuple[int, int]], rtt_seconds: float, model: StartModel, console: Console
) -> None:
    """Print what starts of some sizes come to."""
    title = f"extrapolated, {1e3 * rtt_seconds:g} ms there and back between sites"
    table = Table(title=title, title_justify="left")
    over_links = model.gateway is not None
    of_all = "gateway" if over_links else "store of all"
    for name in ("", "fixed", "first", of_all, "cluster's", "trips", "start"):
        table.add_column(name, justify="right")
    for c, n in sizes:
        terms = model.terms(c, n, rtt_seconds)
        numbers = (
            terms.fixed, terms.first_rank, terms.gateway if over_links else terms.store_of_all,
            terms.store_of_cluster, terms.round_trips,
        )  # fmt: skip
        table.add_row(
            f"{c} x {n:,}",
            *(f"{number:.2f} s" for number in numbers),
            f"{terms.total:.1f} s",
        )
    console.print(table)
