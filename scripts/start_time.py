"""How long a start takes on a slow line, from equal weights and from others: in every cluster

    dsx bench line --mbit 100 -- python scripts/start_time.py --clusters {clusters} \
        --cluster {cluster} --rendezvous {rendezvous} --interface {interface} [--unequal]
"""

from __future__ import annotations

import argparse
import os

import torch

import dsx


def main() -> None:
    """Attach a model of 100 MB, and print what the start has sent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", type=int, required=True)
    parser.add_argument("--clusters", type=int, required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--interface")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--unequal", action="store_true", help="other weights in every cluster")
    given = parser.parse_args()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29499"}
    os.environ.update(alone)
    clusters = {
        "num_clusters": given.clusters,
        "cluster_id": given.cluster,
        "rendezvous": given.rendezvous,
        "interface": given.interface,
    }
    link = {"streams": given.streams, "security": "none"}  # a line of this host
    config = {"dsx": {"preset": "diloco", "clusters": clusters, "link": link}}
    dsx.init_distributed(config)
    torch.manual_seed(given.cluster if given.unequal else 0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2500, 2500) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = dsx.attach(model, optimizer, config=config)
    begun = handle.loop.beginning.begun
    print(
        f"{begun.seconds:.2f} s: {begun.bytes_sent:,} bytes sent, "
        f"{begun.bytes_received:,} received",
        flush=True,
    )
    handle.gather("compared")  # nobody leaves before all have read
    handle.close()


if __name__ == "__main__":
    main()
