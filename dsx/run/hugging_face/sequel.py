"""The order of training samples where a run goes on from one of a Trainer without dsx.

That run was in an epoch, in the order of its sampler. Of the samples left there, in that order,
cluster m reads every C-th from the m-th on; from the next epoch on it reads its part. A Trainer
knows its place by its step alone: by how many whole epochs of its loader that is, and how many
batches of the next. So the sampler begins an epoch of the loader, wherever the step falls, with
what was read before (of the first, anything: the Trainer skips it), and goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler

FILE = "dsx_begun.json"


@dataclass(frozen=True)
class Begun:
    """Where a run without dsx was: at a step, behind so many samples of an epoch."""

    step: int
    epoch: int
    read: int

    def write(self, folder: Path) -> None:
        """Leave it in a checkpoint's folder, which may not be there yet."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def of(cls, folder: Path) -> Begun | None:
        """Return what was left there; None in a run that began anew."""
        file = folder / FILE
        return cls(**json.loads(file.read_text())) if file.is_file() else None


@dataclass(frozen=True)
class Part:
    """Which samples of a dataset are a cluster's.

    Of data of its own (`is_own`), which the run without dsx has not read, all.
    """

    num_samples: int
    cluster_id: int = 0
    num_clusters: int = 1
    is_own: bool = False

    def __len__(self) -> int:
        return self.num_samples // self.num_clusters

    def sample(self, index: int) -> int:
        """Return the number in the dataset of one of the part."""
        return index * self.num_clusters + self.cluster_id


class SequelSampler(Sampler[int]):
    """One cluster's samples, an epoch of the Trainer's loader at a time, as numbers in the whole.

    `order(count, epoch)` is the order of so many samples in an epoch; `samples_per_step` are the
    cluster's, of all its ranks. `steps_per_epoch` of the loader is set once there is one.
    """

    def __init__(
        self,
        part: Part,
        begun: Begun,
        order: Callable[[int, int], list[int]],
        samples_per_step: int,
        step_now: Callable[[], int],
    ) -> None:
        self._part, self._begun, self._order = part, begun, order
        self._samples_per_step, self._step_now = samples_per_step, step_now
        self.steps_per_epoch = 0
        is_new = part.is_own or not begun.read
        left = [] if is_new else order(part.num_samples, begun.epoch)[begun.read :]
        self.rest = left[part.cluster_id :: part.num_clusters][: len(left) // part.num_clusters]
        self._first_epoch = begun.epoch + bool(begun.read)

    def __len__(self) -> int:
        return len(self._part)

    def __iter__(self) -> Iterator[int]:
        size, steps = len(self._part), self.steps_per_epoch
        since = self._step_now() // steps - self._begun.step // steps
        start = since * size - self._begun.step % steps * self._samples_per_step
        found = self._from(max(start, 0), size - max(-start, 0))
        return iter(self._from(0, max(-start, 0)) + found)

    def _from(self, start: int, count: int) -> list[int]:
        """Return so many samples from a place in the cluster's sequence on."""
        found = self.rest[start : start + count]
        size = len(self._part)
        place = start + len(found) - len(self.rest)
        while len(found) < count:
            epoch, offset = divmod(place, size)
            order = self._order(size, self._first_epoch + epoch)[offset:]
            found += [self._part.sample(i) for i in order[: count - len(found)]]
            place += len(order)
        return found


def seeded_order(seed: int) -> Callable[[int, int], list[int]]:
    """Return the order of accelerate's sampler that shuffles, by the number of the epoch."""

    def order(count: int, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed + epoch)
        return torch.randperm(count, generator=generator).tolist()

    return order


def in_order(count: int, epoch: int) -> list[int]:
    """Return the order of a sampler that does not shuffle."""
    return list(range(count))


def begun_of_plain(state: dict[str, Any], num_ranks: int, total: int, drops: bool) -> Begun:
    """Return where a Trainer's run was, by its `trainer_state.json` and its number of ranks.

    `total` samples were dealt in batches; `drops`: the last ones, of fewer samples, were not.
    """
    together = state["train_batch_size"] * num_ranks
    batches = total // together if drops else -(-total // together)
    epoch, done = divmod(float(state["epoch"]), 1.0)
    read = min(round(done * batches) * together, total)
    ended = read >= total or round(done * batches) >= batches
    return Begun(state["global_step"], int(epoch) + ended, 0 if ended else read)
