"""The bench's words for a Python."""

import sys
from pathlib import Path

import pytest

from deploy.bench.interpreters import Interpreter, interpreter
from deploy.local.bootstrap import BootstrapError
from tests.other_python import PACKAGES, TESTED, pins


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--enable-optimizations", "--with-lto"), "PGO yes, LTO yes"),
        (("--enable-shared", "--with-lto=full"), "PGO no, LTO yes"),
        (("--with-lto=no",), "PGO no, LTO no"),
    ],
)
def test_how_it_was_configured(arguments: tuple[str, ...], said: str) -> None:
    assert said in Interpreter(Path("python"), "3.13.5", arguments, 9.0).describe()


def test_a_python_is_asked_about_itself() -> None:
    found = interpreter(Path(sys.executable))
    assert found.version == sys.version.split()[0]
    assert 0.0 < found.milliseconds < 10_000.0


def test_the_tests_of_another_python_have_all_packages_pinned_once_and_are_there() -> None:
    assert sorted(pin.partition("==")[0] for pin in pins()) == sorted(PACKAGES)
    assert all((Path(__file__).parents[1] / each).is_dir() for each in TESTED)


def test_what_is_no_python_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((BootstrapError, OSError)):
        interpreter(tmp_path)
