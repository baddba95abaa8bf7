"""What is published installs and runs away from the checkout: the wheel, and the sdist."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import dsx
from tests.distributed import the_default_port
from tests.installed import needs

pytestmark = [
    pytest.mark.ci, pytest.mark.timeout(600), needs("build", "deepspeed", "megatron"),
]  # fmt: skip

ROOT = Path(__file__).parents[2]
NOT_SOURCE = ("*.so", ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info")
NOT_SOURCE += ("build", "dist", "data", "runs", "site")
KERNELS = "kernels.c", "loops.h", "steps.h", "form.h"
SHORT = ["--hidden", "64", "--sequence-length", "16", "--validation-batches", "1", "--steps", "6"]


def run(command: Sequence[str | Path], where: Path) -> str:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=where, env=environment, capture_output=True, text=True,
        timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build an sdist, and the wheel from it, of a copy: nothing is written into the checkout."""
    base = tmp_path_factory.mktemp("build")
    source, out = base / "source", base / "dist"

    def left_out(directory: str, names: list[str]) -> set[str]:
        is_package = Path(directory).is_relative_to(ROOT / "dsx")  # which has a data of its own
        ignored = shutil.ignore_patterns(*NOT_SOURCE[:7] if is_package else NOT_SOURCE)
        return ignored(directory, names)

    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source], base)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def test_the_wheel_holds_the_packages_and_nothing_else(built: dict[str, Path]) -> None:
    names = zipfile.ZipFile(built["wheel"]).namelist()
    metadata = f"dsx_train-{dsx.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"dsx", "megatron_patches", metadata}
    examples = {f"dsx/examples/quickstart.{kind}" for kind in ("json", "flags")}
    assert {"dsx/py.typed", *examples} <= set(names)
    assert "dsx/compress/wire/native/kernels.abi3.so" in names  # for every Python
    assert built["wheel"].name.split("-")[2:4] == ["cp310", "abi3"]
    in_tree = {str(file.relative_to(ROOT)) for file in (ROOT / "dsx").rglob("*.py")}
    assert in_tree == {name for name in names if name.startswith("dsx/") and name.endswith(".py")}


def test_the_sdist_holds_what_tests_and_documentation_need(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in ("tests/conftest.py", "tests/golden/diloco.json", "configs/quickstart.json",
                   "docs/index.md", "scripts/quickstart.sh", "README.md", "CHANGELOG.md",
                   "mkdocs.yml", ".ci/run", "LICENSE",
                   *(f"dsx/compress/wire/native/{name}" for name in KERNELS)):  # fmt: skip
        assert wanted in names, wanted


def test_an_installation_without_a_compiler_goes_without_native_kernels(
    built: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "/nonexistent/cc")
        run([*install, "--no-build-isolation", built["sdist"]], tmp_path)
    assert not [*target.rglob("*.so")]
    code = (
        "import dsx; from dsx.compress.wire.native import library; "
        "print(dsx.__file__, library.unavailable())"
    )
    printed = run([sys.executable, "-c", code], target)
    place, _, why = printed.partition(" ")
    assert place == str(target / "dsx" / "__init__.py")
    assert why == "they were not built: no C compiler was there at installation, or it failed\n"


@pytest.mark.parametrize("kind", ["wheel", pytest.param("sdist", marks=pytest.mark.slow)])
def test_it_runs_from_an_installation(built: dict[str, Path], tmp_path: Path, kind: str) -> None:
    run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    packages = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                        tmp_path).strip())  # fmt: skip
    # torch and the engines are this environment's; its own dsx, an editable one, is not seen
    (packages / "engines.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    run([*install, "--no-build-isolation", "--ignore-installed", built[kind]], tmp_path)
    command = tmp_path / "venv" / "bin" / "dsx"
    assert run([command, "--version"], tmp_path) == f"dsx {dsx.__version__}\n"
    where = run([python, "-c", "import dsx; print(dsx.__file__)"], tmp_path)
    missing = "from dsx.compress.wire.native import library; print(library.unavailable())"
    assert run([python, "-c", missing], tmp_path) == "None\n"
    assert where.strip() == str(packages / "dsx" / "__init__.py")
    if kind == "sdist":  # what it installs are the files of the wheel
        return
    with the_default_port():
        printed = run([command, "quickstart", *SHORT], tmp_path)
    assert "step    6/6" in printed
    summary = json.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_text())
    assert summary["steps"] == 6 and len(summary["val_loss_clusters"]) == 2
