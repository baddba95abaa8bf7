"""Token datasets in Megatron's indexed format, and how clusters share them.

`build` turns text files into `train.bin/.idx` and `validation.bin/.idx`, which DeepSpeed and
Megatron scripts read alike. `TokenWindows` cuts such a file into fixed windows; `ClusterBatches`
(an endless iterator whose position is part of the checkpoint) and `ClusterShard` (a dataset view)
give each cluster a part of the windows that no other cluster ever reads.

Importing this package imports neither Megatron nor DeepSpeed, and torch only when a name that needs
it is first used: the command line stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dsx.data.build import BuildSummary, SkippedFiles, SplitSummary, build, read_summary
from dsx.data.corpus import Corpus, find_corpus
from dsx.data.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from dsx.data.cluster_batches import ClusterBatches, ClusterShard
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
]

_NEEDS_TORCH = {
    "ClusterBatches": "dsx.data.cluster_batches",
    "ClusterShard": "dsx.data.cluster_batches",
    "TokenWindows": "dsx.data.windows",
}


def __getattr__(name: str) -> object:
    if name in _NEEDS_TORCH:
        return getattr(import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
