"""Dockerfiles: what they are made of, and the image for CPUs where there is a builder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dsx
from tests.installed import needs

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "configs" / "launch"


def instructions(path: Path) -> list[list[str]]:
    """Return a Dockerfile's instructions, as words."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", path.read_text(), flags=re.M))
    return [line.split() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_images_are_made_of_what_a_checkout_has(kind: str) -> None:
    words = instructions(LAUNCH / "docker" / f"{kind}.Dockerfile")
    allowed = {"FROM", "ARG", "RUN", "COPY", "ENV", "WORKDIR", "CMD"}
    assert {first for first, *_ in words} <= allowed and words[0][0] == "FROM"
    copied = [line[1] for line in words if line[0] == "COPY"]
    assert copied == ["dist/dsx_train-${VERSION}-cp310-abi3-linux_*.whl", "configs/launch/node.sh"]
    assert ["ARG", "VERSION"] in words[: words.index(["COPY", copied[0], "/tmp/"])]
    assert (ROOT / copied[1]).is_file()
    extras = re.search(
        r"dsx-train\[([\w,]+)\]", (LAUNCH / "docker" / f"{kind}.Dockerfile").read_text()
    )
    assert extras is not None
    declared = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", declared, re.M) for extra in extras[1].split(","))


def builder() -> str | None:
    """Return what builds images here, None if nothing does."""
    for name in ("docker", "podman", "buildah"):
        if shutil.which(name):
            done = subprocess.run([name, "info"], capture_output=True, timeout=60, check=False)
            if done.returncode == 0:
                return name
    return None


@needs("build")
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_image_for_cpus_is_built_and_runs(tmp_path: Path) -> None:
    tool = builder()
    if tool is None:
        pytest.skip("no builder of images answers here (docker, podman or buildah)")
    wheel = [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", ROOT]
    subprocess.run(wheel, check=True)
    shutil.copytree(LAUNCH, tmp_path / "configs" / "launch")
    file, tag = "configs/launch/docker/cpu.Dockerfile", "dsx-test:cpu"
    (tmp_path / "dist" / "dsx_train-0.0.1-cp310-abi3-linux_x86_64.whl").write_bytes(
        b"of another build"
    )
    version = ["--build-arg", f"VERSION={dsx.__version__}"]
    subprocess.run([tool, "build", "-f", file, "-t", tag, *version, "."], cwd=tmp_path, check=True)
    if tool == "buildah":
        pytest.skip("built; buildah runs no images")
    done = subprocess.run([tool, "run", "--rm", tag], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("ok    versions"), done.stderr
