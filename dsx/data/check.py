"""Whether a dataset is what its manifest says, and what several have in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from dsx.data.manifest import SPLITS, BuildSummary
from dsx.data.overlap import share_in
from dsx.data.splits import digest_of
from dsx.data.windows import open_tokens


def check_files(summary: BuildSummary) -> str | None:
    """Return what is wrong with a dataset's files, all of which are read; None if nothing is."""
    folder, again = Path(summary.path), "copy it again, or run dsx data build --force"
    for split in SPLITS:
        told, found = getattr(summary, split).num_tokens, open_tokens(folder / split).size
        if told != found:
            return f"{folder / split}: {found} tokens, and dataset.json says {told}; {again}"
    digest = digest_of([folder / f"{split}.bin" for split in SPLITS])
    if digest != summary.content_digest:
        return f"{folder}: its tokens have the digest {digest}, and not that above; {again}"
    return None


def tell_overlap(summaries: Sequence[BuildSummary]) -> list[str]:
    """Return a line for each two of several datasets."""
    lines: list[str] = []
    for first, second in combinations(summaries, 2):
        both = f"{first.path} and {second.path}"
        if first.content_digest == second.content_digest:
            lines.append(f"{both} are the same, to the bit")
        elif not (first.sketch and second.sketch):
            older = first.path if not first.sketch else second.path
            lines.append(f"{both}: what they share is not known, as {older} is of an earlier dsx")
        else:
            there, back = (share_in(a.sketch, b.sketch) for a, b in _both_ways(first, second))
            lines.append(
                f"{both}: about {100 * there:.0f} % of the first one's documents are in the "
                f"second, and {100 * back:.0f} % the other way round"
            )
    return lines


def _both_ways(
    first: BuildSummary, second: BuildSummary
) -> list[tuple[BuildSummary, BuildSummary]]:
    return [(first, second), (second, first)]
