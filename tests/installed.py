"""Skip what needs a package that is not installed, without importing it to collect the tests."""

from __future__ import annotations

import importlib.util

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return the mark that skips where one of these top-level packages is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
