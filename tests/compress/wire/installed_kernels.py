"""Tests of native kernels need the library, and fail where it could have been built."""

from __future__ import annotations

import shutil

import pytest

from dsx.compress.wire.native import library


@pytest.fixture(scope="session")
def native() -> None:
    """Skips where no C compiler is; one that is there has built the library."""
    problem = library.unavailable()
    if problem is None:
        return
    if not any(map(shutil.which, ("gcc", "clang", "cc"))):
        pytest.skip(f"no native kernels: {problem}")
    pytest.fail(f"no native kernels: {problem}; a compiler is there: bash scripts/setup.sh")
