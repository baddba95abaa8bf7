"""One older release of each framework, beside the newest, in an environment that is made for it.

`pytest -m slow tests/run/test_older_versions.py` makes one in a temporary folder, in which the
older packages stand before what is installed here, and runs the tests below in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from older_packages import NotInstalled, make_environment  # noqa: E402

pytestmark = pytest.mark.slow
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
    try:
        python = make_environment(tmp_path / "older", packages)
    except NotInstalled as failure:
        if failure.is_no_index:
            pytest.skip(f"no package index is to be had for {', '.join(packages)}")
        raise
    command = [python, "-m", "pytest", "-q", "-rs", "-m", "not slow and not gpu", *tests]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:]
    assert "not installed" not in done.stdout, done.stdout
