"""`dsx net-test`: what the link between clusters gives, before a run is started on it.

    dsx net-test --clusters 2 --cluster-id 0 --rendezvous tcp://HOST:29400

A mistake of the user ends with one line on stderr and exit code 2, a cluster that is missing or
lost with 1.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dsx.config.files import require_place

Clusters = Annotated[int, typer.Option(help="How many take part, at least 2.")]
ClusterId = Annotated[int, typer.Option(help="Which one this is, from 0; 0 holds the store.")]
Address = Annotated[
    str | None, typer.Option(metavar="tcp://HOST:PORT", help="Where to meet: a host of cluster 0.")
]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help='The run\'s JSON, whose "link" is measured as it stands.'),
]
Interface = Annotated[
    str | None, typer.Option(help="Network interface towards the others, as clusters.interface.")
]
Seconds = Annotated[float, typer.Option(help="Of each measurement, about; cluster 0's counts.")]
Streams = Annotated[
    str, typer.Option(metavar="N,N", help="Numbers of TCP connections; cluster 0's count.")
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the figures there; any cluster may."),
]
Deadline = Annotated[float, typer.Option(help="How long to wait for another cluster.")]
Params = Annotated[float, typer.Option(help="For H: parameters of the model.")]
Layers = Annotated[int, typer.Option(help="For H: layers, of equal size.")]
StepSeconds = Annotated[float, typer.Option(help="For H: pure compute of one inner step.")]
Target = Annotated[float, typer.Option(help="For H: percentage of the time spent computing.")]


def net_test(
    clusters: Clusters,
    cluster_id: ClusterId,
    rendezvous: Address = None,
    config: Config = None,
    interface: Interface = None,
    seconds: Seconds = 3.0,
    streams: Streams = "1,2,4,8",
    json_file: JsonFile = None,
    deadline_seconds: Deadline = 300.0,
    params: Params = 1e9,
    layers: Layers = 24,
    step_seconds: StepSeconds = 1.0,
    target: Target = 95.0,
) -> None:
    """Measure the links between clusters, without training.

    Run it once in every cluster. It takes round trips, the bandwidth of every pair, one direction
    at a time and both at once, and that of an all-reduce of all, each over several numbers of TCP
    connections. With --config messages go as in that run: over links, with its security, members,
    keys and link.streams, where it has them. Cluster 0 prints them, the best link.streams, and the
    least H for a model. To try it on one machine, start it twice, in two shells.
    """
    from rich.console import Console

    from dsx.bench.net_test.advice import Model, plans
    from dsx.bench.net_test.settings import Settings, link_of, read_streams
    from dsx.comm.connections import Way
    from dsx.core.transport import PeerLost

    try:
        model = Model(params, layers, step_seconds, target)
        counts = read_streams(streams)
        way = Way(rendezvous, None if config is None else link_of(config, clusters), interface)
        if way.link is not None:
            counts = [way.link.streams]  # of all connections of a link, made at its start
        settings = Settings(clusters, cluster_id, way, seconds, counts, deadline_seconds)
        require_place("--json", json_file)
        from dsx.bench.net_test.net_test import measure

        figures = measure(settings, lambda line: typer.echo(line, err=True))
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        typer.echo(f"dsx net-test: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, PeerLost) else 2) from error
    found = plans(model, clusters, figures.best.bits_per_second, figures.latency_seconds)
    if json_file is not None:
        record = {**figures.as_json(), "plans": [asdict(plan) for plan in found]}
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    if cluster_id != 0:
        typer.echo(f"cluster {cluster_id}: measured; cluster 0 shows what was found")
        return
    from dsx.bench.net_test.show import show

    show(figures, model, found, Console())
