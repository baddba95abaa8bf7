"""An environment in which older packages stand before all that is installed here.

For tests and tables of what other releases do: nothing of this environment is touched, and what is
not older is not installed twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TAIL = 2000  # characters of what pip has said
_LAUNCHERS = {"torchrun": "torch.distributed.run", "deepspeed": "deepspeed.launcher.runner"}


class NotInstalled(RuntimeError):
    """The packages could not be installed; `is_no_index`: there is no index that has them."""

    def __init__(self, said: str) -> None:
        super().__init__(said[-_TAIL:].strip())
        self.is_no_index = "Connection" in said or "No matching distribution" in said


def make_environment(folder: Path, packages: Sequence[str]) -> Path:
    """Return the Python of an environment that has these before all that is installed here.

    One that is there is taken, if it was made of the same packages; what is installed here may be
    another since.
    """
    python, stamp = folder / "bin" / "python", folder / "made_of"
    is_made = stamp.exists() and stamp.read_text().split() == [*packages]
    if not is_made:
        venv.create(folder, with_pip=False, symlinks=True, clear=True)
    own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    here = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in here]
    (Path(own) / "zz_installed_here.pth").write_text("\n".join(lines) + "\n")
    if is_made:
        return python
    _pip("--python", str(python), "install", "--quiet", "--no-build-isolation", *packages)
    for name, module in _LAUNCHERS.items():  # of this environment's Python
        launcher = folder / "bin" / name
        launcher.write_text(f'#!/bin/sh\nexec "{python}" -m {module} "$@"\n')
        launcher.chmod(0o755)
    stamp.write_text("\n".join(packages) + "\n")
    return python


def dependencies(package: str) -> list[str]:
    """Return what a package would bring with it, without installing anything."""
    report = _pip(
        "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-",
        package,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(report)["install"][0]["metadata"]
    return found.get("requires_dist", [])


def _pip(*arguments: str) -> str:
    """Run pip; return what it has printed. NotInstalled where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], env={**os.environ, "DS_BUILD_OPS": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise NotInstalled(done.stderr)
    return done.stdout
