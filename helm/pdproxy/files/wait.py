"""Waits for the mark that the Job leaves when a model is fetched as a whole."""

import os
import sys
import time
from pathlib import Path

EVERY = 5.0
SAID_EVERY = 60.0


def main() -> None:
    """Say now and then what is waited for; a pod's log is where one looks."""
    mark, said = Path(os.environ["MARK"]), 0.0
    while not mark.exists():
        if not said or time.monotonic() - said >= SAID_EVERY:
            said = time.monotonic()
            sys.stdout.write(f"waiting for the download Job to fetch {os.environ['MODEL']} (its mark is {mark})\n")
            sys.stdout.flush()
        time.sleep(EVERY)
    sys.stdout.write(f"fetched: {mark.read_text(encoding='utf-8').strip()}\n")


main()
