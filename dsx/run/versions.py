"""Another version of a framework than those that dsx.run is tested with: tried, and said."""

from __future__ import annotations

import logging
import os

from dsx.core.requirements import installed_version, outside_of_ranges

logger = logging.getLogger(__name__)
_told: set[str] = set()


def tell_of_version(package: str) -> None:
    """Warn, once and on one rank, if a package's version lies outside of what is tested."""
    version = installed_version(package)
    if version is None or package in _told or os.environ.get("RANK", "0") != "0":
        return
    _told.add(package)
    for outside in outside_of_ranges({package: version}) or []:
        logger.warning(
            "dsx: %s %s is tried; dsx.run is tested with %s", outside.name, outside.version,
            outside.wanted,
        )  # fmt: skip
