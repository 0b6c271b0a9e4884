"""Prometheus' own checker, where the machine has it."""

import shutil
import subprocess

NO_PROMTOOL = shutil.which("promtool") is None


def promtool(*arguments: str) -> None:
    """Run it; its complaints are the assertion's."""
    ran = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
