"""One older release of each framework, beside the newest, in an environment that is made for it.

`pytest -m slow tests/run/test_older_versions.py` makes one in a temporary folder, in which the
older packages stand before what is installed here, and runs the tests below in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RUN, ENGINES = "tests/run", "tests/engines"
OLDER = {  # what is installed, and what is run with it; docs/trainers.md has the same table
    "transformers": (
        ["transformers==4.57.6", "accelerate==1.10.1", "datasets==4.2.0", "trl==0.24.0",
         "peft==0.17.1"],
        [f"{RUN}/test_trainer.py", f"{RUN}/test_trl.py", f"{RUN}/test_accelerate.py"],
    ),
    "deepspeed": (
        ["deepspeed==0.19.6"],
        [f"{RUN}/test_run.py", f"{ENGINES}/test_deepspeed_data.py",
         f"{ENGINES}/test_deepspeed_checkpoint.py"],
    ),
    "lightning": (
        ["lightning==2.5.6", "pytorch_lightning==2.5.6"],
        [f"{RUN}/test_lightning.py"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("framework", OLDER)
@pytest.mark.timeout(3600)
def test_an_older_release_is_served(framework: str, tmp_path: Path) -> None:
    packages, tests = OLDER[framework]
    python = make_environment(tmp_path / "older", packages)
    command = [python, "-m", "pytest", "-q", "-rs", "-m", "not slow and not gpu", *tests]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:]
    assert "not installed" not in done.stdout, done.stdout


def make_environment(folder: Path, packages: list[str]) -> Path:
    """Return the Python of an environment that has these before all that is installed here."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    here = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in here]
    (Path(own) / "zz_installed_here.pth").write_text("\n".join(lines) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    done = subprocess.run(
        [*pip, "--no-build-isolation", *packages], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        if "Connection" in done.stderr or "No matching distribution" in done.stderr:
            pytest.skip(f"no package index is to be had for {', '.join(packages)}")
        pytest.fail(done.stderr)
    return python
