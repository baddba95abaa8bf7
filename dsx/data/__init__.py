"""Token datasets in Megatron's indexed format, and how clusters share them.

`build` turns text files, and files with a text in each row, into `train.bin/.idx` and
`validation.bin/.idx`, which DeepSpeed and Megatron scripts read alike. `TokenWindows` cuts such a
file into fixed windows; `ClusterBatches` (an endless iterator whose position is part of the
checkpoint) and `ClusterShard` (a dataset view) give each cluster a part of the windows that no
other cluster ever reads.

Imports nothing else of dsx but core. Its names are imported when they are first used, numpy and
torch with them: the command line stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsx.data.cluster_batches import ClusterBatches, ClusterShard
    from dsx.data.corpus import Corpus, find_corpus
    from dsx.data.dataset import build
    from dsx.data.identity import require_same
    from dsx.data.manifest import BuildSummary, SkippedFiles, SplitSummary, read_summary
    from dsx.data.tokenizer import ByteTokenizer
    from dsx.data.windows import TokenWindows

__all__ = [
    "BuildSummary",
    "ByteTokenizer",
    "ClusterBatches",
    "ClusterShard",
    "Corpus",
    "SkippedFiles",
    "SplitSummary",
    "TokenWindows",
    "build",
    "find_corpus",
    "read_summary",
    "require_same",
]

_NAMES = {  # no public name may be that of a module here, which would take its place
    "cluster_batches": ("ClusterBatches", "ClusterShard"),
    "corpus": ("Corpus", "find_corpus"),
    "dataset": ("build",),
    "identity": ("require_same",),
    "manifest": ("BuildSummary", "SkippedFiles", "SplitSummary", "read_summary"),
    "tokenizer": ("ByteTokenizer",),
    "windows": ("TokenWindows",),
}


def __getattr__(name: str) -> object:
    """Import what a public name stands for, when it is first asked for."""
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"dsx.data.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
