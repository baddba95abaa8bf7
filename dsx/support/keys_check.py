"""`dsx keys check CONFIG`: whether the sites of a run can meet over their links.

    dsx keys check ds.json --cluster-id 0

is started at every site at about the same time. Exits with 1 where one cannot.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dsx.comm.links.extra import require_extra
from dsx.core.one_line_errors import one_line_errors


@one_line_errors("keys check", ModuleNotFoundError)
def keys_check(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help='A JSON with a "dsx" block.')],
    cluster_id: Annotated[
        int | None, typer.Option(help="Which cluster this is; default: that of the config.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="How long to wait for the other sites.", min=1.0, max=3600.0)
    ] = 60.0,
) -> None:
    """Say whether the sites of a run trust each other and reach each other's ports, and clocks.

    Start it at every site at about the same time. A run that is on is told of, and goes on.
    """
    from rich.console import Console
    from rich.table import Table

    from dsx.config.schema import load_config

    settings = load_config(config)
    own = settings.clusters.cluster_id if cluster_id is None else cluster_id
    link = settings.link.settings
    if link is None or link.security != "curve":
        raise ValueError(f'{config} has no "link": {{"security": "curve", ...}}: it needs no keys')
    if own is None or not 0 <= own < len(link.names):
        raise ValueError(
            f"cluster {own}: say which one this is, by --cluster-id 0 to {len(link.names) - 1}"
        )
    require_extra()
    from dsx.comm.links.check import check_sites
    from dsx.comm.links.keys import Keys

    keys = Keys.load(link.keys, link.names[own], group_read=link.group_read)
    here = link.address_of(own)
    where = "calls out only" if here is None else f"listens at {link.listens_at}:{link.port}"
    console = Console(highlight=False, markup=False)
    console.print(f"{keys.name} (cluster {own}), key {keys.fingerprint}, {where}")
    with console.status(f"waiting for the others, up to {seconds:g} s"):
        found = check_sites(link, own, seconds)
    table = Table()
    for title in ("site", "its key here", "how", ""):
        table.add_column(title)
    for site in found:
        table.add_row(site.name, " ".join(keys.fingerprints_of(site.name)), site.way, site.says)
    console.print(table)
    if any(site.problem is not None for site in found):
        raise typer.Exit(1)
