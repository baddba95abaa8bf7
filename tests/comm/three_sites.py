"""A site of three, as one script: trains until it is killed, or loses another."""

from __future__ import annotations

import sys
import time

import torch

import dsx


def main(cluster: int, port: int) -> None:
    """Train; say "training" once, and what ended it."""
    clusters = {
        "num_clusters": 3,
        "cluster_id": cluster,
        "rendezvous": f"tcp://127.0.0.1:{port}",
        "deadline_seconds": 60,
    }
    config = {"dsx": {"preset": "streaming_diloco", "clusters": clusters}}
    dsx.init_distributed(config)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = dsx.attach(model, optimizer, config=config)
    while True:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        try:
            optimizer.step()
        except dsx.PeerLost as error:
            print(f"PeerLost: {error}", flush=True)
            return
        if handle.step == 30:
            print("training", flush=True)
        time.sleep(0.002 * cluster)  # so that they come to a transfer one after another


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
