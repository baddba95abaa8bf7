"""Train a small ResNet on scikit-learn's digits: plain PyTorch, with dsx between the clusters.

In one process, as many clusters as the configuration has:

    python scripts/vision.py --config configs/paper/dreamddp/resnet18.json --simulate

As two launches, each of which would be a site of its own:

    torchrun --nproc-per-node 1 --master-port 29501 scripts/vision.py --config CONFIG \
        --clusters 2 --dsx-rendezvous tcp://127.0.0.1:29400 --dsx-cluster-id 0
    torchrun --nproc-per-node 1 --master-port 29502 scripts/vision.py --config CONFIG \
        --clusters 2 --dsx-rendezvous tcp://127.0.0.1:29400 --dsx-cluster-id 1

What is printed after each epoch is of the average of the clusters, on held-out images.

Batch norm's running statistics are buffers, which no optimizer holds and dsx does not send. Inner
training never reads them; the average of the clusters gets its own, measured anew on the same
images in every cluster (`torch.optim.swa_utils.update_bn`), so they are the same everywhere.
`--norm group` has no buffers at all.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import dsx
from dsx.core.units import format_bytes
from dsx.data import ClusterBatches
from dsx.examples.arguments import positive, seed
from dsx.examples.digits import Digits, images_and_labels, read_digits
from dsx.examples.resnet import ResNet, ResNetConfig

CALIBRATION_IMAGES = 512


@dataclass
class Inner:
    """What one cluster trains, with what, on what."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    batches: ClusterBatches

    def take_step(self) -> float:
        """Take one inner step; return its loss."""
        images, labels = images_and_labels(next(self.batches))
        self.optimizer.zero_grad()
        loss = self.model(images, labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()


class Simulated:
    """All clusters in this process, without a network."""

    def __init__(self, inners: list[Inner], config: dict[str, Any]) -> None:
        self.inners = inners
        models, optimizers = [i.model for i in inners], [i.optimizer for i in inners]
        method = dsx.load_config(config).method
        self.clusters = dsx.SimulatedClusters(models, optimizers, method)
        self.reports = True

    def step(self) -> float:
        """Take one inner step in every cluster; return their mean loss."""
        losses = [inner.take_step() for inner in self.inners]
        self.clusters.step()
        return sum(losses) / len(losses)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Yield a model that holds the average of the clusters."""
        with self.clusters.averaged() as model:
            yield model

    def finish(self) -> None:
        """Apply what is under way."""
        self.clusters.finish()

    @property
    def bytes_sent(self) -> int:
        """Return what one cluster has sent so far."""
        return max(self.clusters.bytes_sent)

    def close(self) -> None:
        """Nothing is open."""


class Launched:
    """This process is one cluster; the others are launched elsewhere."""

    def __init__(self, inner: Inner, config: dict[str, Any], facts: dict[str, Any]) -> None:
        self.inner = inner
        self.handle = dsx.attach(inner.model, inner.optimizer, config=config, facts=facts)
        self.handle.track(data=inner.batches)
        self.reports = self.handle.cluster_id == 0

    def step(self) -> float:
        """Take one inner step, at whose end dsx is called by the optimizer; return its loss."""
        loss = self.inner.take_step()
        self.handle.log_step(loss=loss)
        return loss

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Yield the model while it holds the average of the clusters; all of them call this."""
        with self.handle.averaged():
            yield self.inner.model

    def finish(self) -> None:
        """Apply what is under way."""
        self.handle.finish()

    @property
    def bytes_sent(self) -> int:
        """Return what this cluster has sent so far."""
        return self.handle.totals.bytes_sent

    def close(self) -> None:
        """Leave the other clusters."""
        self.handle.close()


def parse_arguments(given: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small ResNet on scikit-learn's digits with plain PyTorch and dsx.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, help='JSON with a "dsx" block')
    add("--simulate", action="store_true", help="all clusters in this process")
    add("--clusters", type=positive, help="how many; none: as the configuration says")
    add("--epochs", type=positive, default=10, help="passes over all clusters' images")
    add("--batch-size", type=positive, default=16, help="images per cluster and step")
    add("--lr", type=float, default=0.05, help="of SGD with momentum, at the start")
    add("--momentum", type=float, default=0.9, help="of SGD")
    add("--weight-decay", type=float, default=5e-4, help="of SGD")
    add("--blocks", type=positive, default=1, help="per stage: the depth is 6 times this + 2")
    add("--width", type=positive, default=16, help="channels of the first stage")
    add("--norm", choices=["batch", "group"], default="batch", help="in every block")
    add("--seed", type=seed, default=0, help="of the weights and of the order of the images")
    add("--out", type=Path, help="where the average of the clusters is written at the end")
    return dsx.add_launch_arguments(parser).parse_args(given)


def make_inner(
    arguments: argparse.Namespace, images: Digits, cluster_id: int, num_clusters: int
) -> Inner:
    """Return a cluster's model, its optimizer and schedule, and its part of the images."""
    shape = ResNetConfig(arguments.blocks, arguments.width, norm=arguments.norm)
    model = ResNet(shape, arguments.seed)
    optimizer = torch.optim.SGD(
        model.parameters(), arguments.lr, arguments.momentum, weight_decay=arguments.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    batches = ClusterBatches(
        images, arguments.batch_size, cluster_id=cluster_id, num_clusters=num_clusters,
        rank=0, world_size=1, seed=arguments.seed,
    )  # fmt: skip
    return Inner(model, optimizer, schedule, batches)


def read_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON with the number of clusters that was asked for; ConfigError if it is none."""
    dsx.load_config(arguments.config)
    config = json.loads(arguments.config.read_text())
    if arguments.clusters:
        config["dsx"]["clusters"]["num_clusters"] = arguments.clusters
    return config


def start(arguments: argparse.Namespace, images: Digits) -> Simulated | Launched:
    """Join the other clusters, or make them all."""
    config = read_config(arguments)
    if arguments.simulate:
        count = dsx.load_config(config).clusters.num_clusters
        return Simulated([make_inner(arguments, images, m, count) for m in range(count)], config)
    if "RANK" not in os.environ:
        raise ValueError(
            "no launcher has started this: give --simulate for all clusters in one process, or "
            "start it with torchrun"
        )
    world = dsx.init_distributed(config, args=arguments)
    inner = make_inner(arguments, images, world.cluster_id, world.num_clusters)
    compared = ("epochs", "batch_size", "lr", "blocks", "width", "norm", "seed")
    facts = {name: getattr(arguments, name) for name in compared}
    return Launched(inner, config, facts)


@torch.no_grad()
def evaluate(model: nn.Module, images: Digits, held_out: Digits) -> tuple[float, float]:
    """Return loss and accuracy on held-out images, with statistics of the norms for the average."""
    update_bn([images_and_labels(images.rows[:CALIBRATION_IMAGES])[0]], model)
    model.eval()
    inputs, labels = images_and_labels(held_out.rows)
    logits = model(inputs)
    model.train()
    loss = nn.functional.cross_entropy(logits, labels).item()
    return loss, (logits.argmax(dim=1) == labels).float().mean().item()


def train(arguments: argparse.Namespace, images: Digits, held_out: Digits) -> float:
    """Train and print; return the last accuracy."""
    run = start(arguments, images)
    inners = run.inners if isinstance(run, Simulated) else [run.inner]
    steps = len(inners[0].batches.shard) // arguments.batch_size
    accuracy, weights = 0.0, None
    for epoch in range(1, arguments.epochs + 1):
        train_loss = sum(run.step() for _ in range(steps)) / steps
        for inner in inners:
            inner.schedule.step()
        if epoch == arguments.epochs:
            run.finish()
        sent = run.bytes_sent  # before the average is, which some methods send for
        with run.averaged() as model:
            loss, accuracy = evaluate(model, images, held_out)
            if epoch == arguments.epochs:
                weights = copy.deepcopy(model.state_dict())
        if run.reports:
            print(
                f"epoch {epoch:>2}/{arguments.epochs}  step {epoch * steps}  "
                f"train loss {train_loss:.3f}  held-out loss {loss:.3f}  "
                f"accuracy {accuracy:.1%}  sent {format_bytes(sent)}",
                flush=True,
            )
    if arguments.out and run.reports:
        torch.save(weights, arguments.out)
    run.close()
    return accuracy


def main(given: list[str] | None = None) -> int:
    """Train; return the exit status."""
    arguments = parse_arguments(given)
    try:
        train(arguments, *read_digits())
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"vision.py: {error}", file=sys.stderr)
        return 2
    except dsx.PeerLost as error:
        print(f"vision.py: {error}", file=sys.stderr)
        os._exit(1)  # what is in flight to a lost cluster is not worth waiting for
    return 0


if __name__ == "__main__":
    sys.exit(main())
