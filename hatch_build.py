"""Builds the compiled scan of streams (`pdproxy/stream/_scan.c`) into the wheel, where there is a C compiler.

The extension is optional: without a compiler, or off Linux, the wheel is pure Python and does the same
(`pdproxy.stream.scan`). One build serves Python 3.11 and all later versions, by Python's stable ABI. ``CC`` names the
compiler. ``HATCH_BUILD_NO_HOOKS=true`` builds the pure wheel.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE, BUILT = Path("pdproxy/stream/_scan.c"), Path("pdproxy/stream/_scan.abi3.so")
FLAGS = ["-std=c11", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-Wl,--strip-all"]


class ScanBuildHook(BuildHookInterface[Any]):
    """Runs before each build of a wheel, and when the project is installed as editable."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the result to the wheel; for an editable install, beside its source."""
        root = Path(self.root)
        if version == "editable":
            compile_scan(root / SOURCE, root / BUILT)
            return
        self._folder = TemporaryDirectory()
        built = Path(self._folder.name) / BUILT.name
        if compile_scan(root / SOURCE, built):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data |= {"pure_python": False, "tag": f"cp311-abi3-{platform}"}
            build_data["force_include"][str(built)] = BUILT.as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel is written: the compiled file outside it is not needed any more."""
        del build_data, artifact_path
        if version != "editable":
            self._folder.cleanup()


def compile_scan(source: Path, built: Path) -> bool:
    """Whether the compiler made it; if not, its reason is on stderr, and what was built before is removed."""
    built.unlink(missing_ok=True)
    if sys.platform != "linux":
        return False
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, *FLAGS, f"-I{sysconfig.get_path('include')}", "-o", str(built), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        sys.stderr.write(f"pdproxy is built without its compiled scan: {compiler[0]}: {error.strerror}\n")
        return False
    if done.returncode:
        sys.stderr.write(f"pdproxy is built without its compiled scan:\n{done.stderr}")
    return done.returncode == 0
