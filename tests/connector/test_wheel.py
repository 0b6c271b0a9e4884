"""The nodes' distribution installs one package, under a name that is ours alone."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "connector"
IMPORT_ALL = """
import importlib, pkgutil, sys, pdproxy_connector
for found in pkgutil.walk_packages(pdproxy_connector.__path__, "pdproxy_connector."):
    importlib.import_module(found.name)
print(pdproxy_connector.__file__, *(name for name in sys.modules if name.partition(".")[0] == "connector"))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, by way of the source distribution, as who installs that gets it."""
    made = tmp_path_factory.mktemp("wheel")
    hatch = [sys.executable, "-m", "hatchling", "build", "--directory", str(made)]
    subprocess.run([*hatch, "--target", "sdist"], cwd=FOLDER, check=True, capture_output=True)
    [archive] = made.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", archive, "-C", made], check=True)
    source = made / archive.name.removesuffix(".tar.gz")
    subprocess.run([*hatch, "--target", "wheel"], cwd=source, check=True, capture_output=True)
    [wheel] = made.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(made / "site")
    return made / "site"


def test_it_claims_one_name(unpacked: Path) -> None:
    found = {path.name.partition("-")[0] for path in unpacked.iterdir()}
    assert found == {"pdproxy_connector"}


def test_it_holds_the_folders_modules(unpacked: Path) -> None:
    installed = {
        str(path.relative_to(unpacked / "pdproxy_connector")) for path in unpacked.glob("pdproxy_connector/**/*.py")
    }
    assert installed == {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py")}


def test_every_module_is_imported_by_that_name_alone(unpacked: Path, tmp_path: Path) -> None:
    """An absolute import of `connector` would find the checkout here, and another package or none on a node."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], cwd=tmp_path, env={"PYTHONPATH": str(unpacked), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(unpacked / "pdproxy_connector" / "__init__.py")]
