"""dsx on a simulated accelerator, which is no GPU: `pytest -m slow tests/gpu/test_simulated.py`.

It runs in processes of its own, as it takes CUDA's place in all of a process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gpu.simulated import library
from tests.gpu.simulated.programs.low_rank import CASES

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        bool(library.missing()), reason=f"no simulated accelerator: {library.missing()}"
    ),
]
SHOWN = [
    "no_record_stream", "no_wait_for_a_stream", "no_wait_for_a_copy", "tensor_of_the_host",
    "tensor_of_another_device", "waits", "call_elsewhere",
]  # fmt: skip


class Accelerator:
    """Runs programs of tests/gpu/simulated on it."""

    def __init__(self, folder: Path) -> None:
        self.library = library.build(folder)

    def run(self, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run a program with its arguments; its end, and all that it has printed."""
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "SIMULATED_LIBRARY": str(self.library), **settings,
        }  # fmt: skip
        del environment["CUDA_VISIBLE_DEVICES"]  # which hides all devices from the tests
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.gpu.simulated", *words],
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip

    def lines(self, *words: str, **settings: str) -> Sequence[str]:
        """Return what a program prints that ends well."""
        done = self.run(*words, **settings)
        assert done.returncode == 0, done.stdout[-8000:]
        return done.stdout.splitlines()


@pytest.fixture(scope="session")
def accelerator(tmp_path_factory: pytest.TempPathFactory) -> Accelerator:
    return Accelerator(tmp_path_factory.mktemp("simulated_accelerator"))


@pytest.mark.parametrize("fault", ["host_read", "host_write"])
def test_it_ends_a_process_that_touches_memory_of_the_device(
    fault: str, accelerator: Accelerator
) -> None:
    done = accelerator.run("faults", fault)
    assert -done.returncode in (signal.SIGSEGV, signal.SIGBUS), done.stdout[-2000:]
    assert f"in {fault}" in done.stdout and "shown" not in done.stdout


@pytest.mark.parametrize("fault", SHOWN)
def test_it_shows_what_a_program_must_not_do(fault: str, accelerator: Accelerator) -> None:
    assert f"shown: {fault}" in accelerator.lines("faults", fault, SIMULATED_DEVICES="2")


def test_methods_have_the_bits_of_a_cpu(accelerator: Accelerator) -> None:
    """With the state on the device in fp32 and bf16, and on the host."""
    lines = accelerator.lines("presets")
    for name in CASES:
        for where in ("fp32 masters", "fp32 host", "bf16 masters"):
            assert f"the same: {name} {where}" in lines


@pytest.mark.parametrize("seed", ["0", "1"])
def test_they_have_them_whatever_the_order_of_streams(seed: str, accelerator: Accelerator) -> None:
    names = ("recommended", "dilocox, low rank")
    lines = accelerator.lines(
        "presets", *names, SIMULATED_ORDER="chance", SIMULATED_SEED=seed
    )  # fmt: skip
    assert {f"the same: {name} bf16 masters" for name in names} <= set(lines)


def test_what_was_saved_goes_on_bit_for_bit(accelerator: Accelerator) -> None:
    names = ("recommended", "dilocox, low rank")
    lines = accelerator.lines("saved", *names)
    assert {f"the same: {name} {stop}" for name in names for stop in (3, 6)} <= set(lines)


@pytest.mark.parametrize("order", ["late", "chance"])
@pytest.mark.parametrize("name", ["dilocox", "streaming_diloco"])
def test_training_waits_for_nothing_and_a_rank_keeps_to_its_device(
    name: str, order: str, accelerator: Accelerator
) -> None:
    """Of `dilocox` with factors that are made on the device."""
    lines = accelerator.lines(
        "second_device", name, SIMULATED_DEVICES="2", SIMULATED_ORDER=order
    )  # fmt: skip
    made = next(line for line in lines if line.startswith("rounds"))
    assert made.endswith("products: 0") == (name != "dilocox")


def test_a_line_of_dsx_that_makes_training_wait_is_seen(accelerator: Accelerator) -> None:
    """A state on the host makes it wait at each launch, which docs/results/gpu.md says."""
    done = accelerator.run("second_device", "streaming_diloco", "host", SIMULATED_DEVICES="2")
    assert done.returncode == 1 and "assert not waits" in done.stdout, done.stdout[-2000:]
    assert "Note(kind='wait', what='a copy to the host', thread='MainThread'" in done.stdout
    assert "engines/masters.py:" in done.stdout
