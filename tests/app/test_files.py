"""The process's limit of open files."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import resource
from pdproxy.server.server import raise_file_limit

for soft, hard in {limits}:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    raise_file_limit()
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_of_open_files_is_raised() -> None:
    """In a process of its own: a hard limit that was lowered stays low."""
    script = SCRIPT.format(limits=[(256, 512), (512, 512)])
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, check=True, timeout=60)
    assert (done.stdout.decode().splitlines(), done.stderr) == (["512 512", "512 512"], b"")
