"""`scripts/matrix.sh`: how it reads trees and tests, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import matrix  # noqa: E402

INFO = "MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = ''\n"
TESTS = """
import pytest
def test_right(): pass
def test_wrong():
    try: raise ValueError("what it says | here")
    except ValueError as error: raise RuntimeError("[gloo] Connection reset by peer") from error
@pytest.mark.skip
def test_left(): pass
"""


def tree(folder: Path) -> Path:
    """A folder that looks like a Megatron-LM tree, and has nothing in it."""
    (folder / "megatron/core").mkdir(parents=True)
    (folder / "megatron/core/package_info.py").write_text(INFO)
    return folder


def test_trees_are_found_with_their_releases(tmp_path: Path) -> None:
    second, first = tree(tmp_path / "b"), tree(tmp_path / "a")
    (tmp_path / "other").mkdir()
    assert matrix.trees_in(tmp_path) == [first, second]
    assert matrix.trees_in(first) == [first]
    assert matrix.release_of(first) == "core 0.16.1"
    assert len(matrix.day_of(first)) == len("2026-01-01")


def test_tests_are_counted_and_the_reason_is_the_error(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    cases, trouble = matrix._tested(sys.executable, [str(tmp_path / "test_some.py")])
    told, reasons = matrix._counted(cases)
    assert not trouble and told == "1 of 2, 1 skipped"
    assert reasons == ["test_wrong: ValueError: what it says | here"]
    row = matrix.Row("core 1", cells={"trained": told}, why=reasons).as_markdown()
    assert row == (
        "| core 1 | - | - | - | 1 of 2, 1 skipped | - | - | test_wrong: ValueError: what it says "
        "\\| here |"
    )
    nobody = [str(tmp_path / "test_some.py"), "-k", "no_one"]
    assert matrix._tested(sys.executable, nobody)[1].startswith("no test has run: ")


@pytest.mark.parametrize(
    ("test", "is_among"),
    [
        ("tests/engines", True), ("tests/engine", False), ("tests/engines/test_torch.py", True),
        ("tests/engines/test_torch_ranks.py", False),
        ("tests/engines/test_torch.py::test_a", True),
        ("tests/engines/test_torch.py::test_a[one]", True),
        ("tests/engines/test_torch.py::test_a[two]", False),
    ],
)  # fmt: skip
def test_a_case_is_of_the_column_that_asked_for_it(test: str, is_among: bool) -> None:
    case = ElementTree.Element("testcase", classname="tests.engines.test_torch", name="test_a[one]")
    assert matrix._is_among(case, test) == is_among


def test_parts_are_of_tests_that_are_there() -> None:
    for parts in matrix.PARTS.values():
        assert set(parts) <= set(matrix.COLUMNS)
        for part in parts.values():
            for test in (*part.tests, *part.quick):
                file, _, name = test.partition("::")
                assert (ROOT / file).exists(), test
                function, _, parameters = name.partition("[")
                text = (ROOT / file).read_text() if name else ""
                assert not name or f"def {function}(" in text, test
                assert not parameters or f'"{parameters[:-1]}"' in text, test


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "give --trees DIR, --deepspeed VERSIONS or --torch"), (["--trees", "."], "holds no")],
)
def test_what_is_missing_is_named(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/matrix.py", *arguments], cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and said in done.stderr
