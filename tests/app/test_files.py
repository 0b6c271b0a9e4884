"""The process's limit of open files."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource
from pdproxy.app.run import raise_file_limit

resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
raise_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "then"), [(256, 512, "512 512"), (512, 512, "512 512")])
def test_the_limit_of_open_files_is_raised(soft: int, hard: int, then: str) -> None:
    script = SCRIPT.format(soft=soft, hard=hard)
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, check=True, timeout=60)
    assert (done.stdout.decode().strip(), done.stderr) == (then, b"")
