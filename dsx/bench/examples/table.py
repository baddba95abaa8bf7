"""What a row of the table is: a script of a project, how it is run, and where its loss is said."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WRAPPERS = {"DeepSpeed": "DeepSpeedEngine", "DDP": "DistributedDataParallel", "FSDP2": "FSDP"}


@dataclass(frozen=True)
class Tree:
    """A project's sources: the folder's name in DIR, where they are to be had, what was tested."""

    name: str
    url: str
    tested: str

    @property
    def how(self) -> str:
        """How the sources get into DIR."""
        if self.url.startswith("pip"):
            return f"{self.url} --dest . && tar xzf {self.tested}.tar.gz && mv {self.tested} " + (
                self.name
            )
        return f"git clone {self.url} {self.name} && git -C {self.name} checkout {self.tested}"


@dataclass(frozen=True)
class Row:
    """One script, run as its project's users run it, over `clusters` times `ranks` processes.

    In `arguments` {data} stands for the folder of prepared data, {out} for that of the run's
    output, {json} for a DeepSpeed JSON, {ranks} for those of a world, {accumulation} for twice as
    many; {cluster_id} is dsx.run's own, and "all" in the run without dsx, whose JSON is
    `plain_deepspeed` where that is another one. `prepared` names what of prepare.py is needed,
    `packages` what has to be installed, `shim` what of inside/cpu_shims.py stands in for a GPU.
    `loss` finds the loss in what is printed; `loss_of` says which that is, with "mean" where every
    cluster prints one of its own, and with "cluster 0" where a script prints on the first process
    of a host only. `steps` is what the script is to take, in `epochs` over its data, and `sha256`
    begins that of the tested script. A cluster may read a sample once an epoch, and a share of
    `drawn_twice` more where the script itself draws with replacement. It runs in `directory` of its
    tree, and without one in the folder of prepared data, with `environ`, in which the same stands
    for the same. Where the engine does not start on CPUs without dsx, `plain_engine` and
    `plain_environ` say what is beside it.
    """

    name: str
    framework: str
    tree: Tree
    script: str
    engine: str
    ranks: int
    arguments: tuple[str, ...]
    prepared: str
    packages: tuple[str, ...]
    loss: str
    loss_of: str
    steps: int
    sha256: str
    method: Mapping[str, Any]
    deepspeed: Mapping[str, Any] | None = None
    plain_deepspeed: Mapping[str, Any] | None = None
    clusters: int = 2
    shim: str = ""
    directory: str = ""
    epochs: int = 1
    drawn_twice: float = 0.0
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    plain_environ: Mapping[str, str] | None = None
    plain_engine: str = ""

    def wrapper(self, with_dsx: bool) -> str:
        """Return what the name of the class around the model has in it, by the engine."""
        engine = self.engine if with_dsx else self.plain_engine or self.engine
        found = [name for of, name in _WRAPPERS.items() if of in engine]
        return found[0] if found else ""

    @property
    def is_module(self) -> bool:
        """Whether the script is run by -m; otherwise it is a path in the tree."""
        return not self.script.endswith(".py")

    @property
    def file(self) -> str:
        """Where the script is in the tree."""
        return f"{self.script.replace('.', '/')}.py" if self.is_module else self.script


def checksum(file: Path) -> str:
    """Return the first 12 digits of a file's SHA-256."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
