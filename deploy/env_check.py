"""Refuse a `.env` with a name that compose.yaml does not know: compose passes over it, and the setting has no effect.

    python3 deploy/env_check.py FOLDER [NAME …]

It refuses also where a variable of these names is not set. `docker compose up` runs it before any node, in a container
of its own (service `env-check`), with what Python itself has alone. It sees the file `.env` of the project's folder. It
does not see the shell's environment, which has other programs' names, nor a file that `--env-file` or COMPOSE_ENV_FILES
names instead.
"""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

OTHERS = re.compile(r"(COMPOSE|DOCKER|BUILDKIT|BUILDX|PODMAN)_\w+|(HTTP|HTTPS|NO|ALL|FTP)_PROXY", re.IGNORECASE)
"""Names that compose and the container engine read themselves."""
USED = re.compile(r"\$\{?(\w+)|^ +([A-Z][A-Z0-9_]*): *$", re.MULTILINE)
"""`${NAME…}`, or a variable of a container without a value, which is passed on."""
SET = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)\s*[=:]", re.MULTILINE)


def known(compose: str) -> set[str]:
    """The names that compose.yaml uses."""
    return {found[1] or found[2] for found in USED.finditer(compose)}


def unknown(env: str, names: Iterable[str]) -> Iterator[str]:
    """A sentence for each name of `.env` that is none of these."""
    names = sorted(names)
    for name in dict.fromkeys(found[1] for found in SET.finditer(env)):
        if name not in names and not OTHERS.fullmatch(name):
            near = difflib.get_close_matches(name.upper(), names, n=1)
            yield f".env: compose.yaml has no {name}" + (f": did you mean {near[0]}?" if near else ": see .env.example")


ADVICE = {
    "NODE_ADDRESS": "the address by which the other hosts reach this one; where none has a node, 127.0.0.1",
}
"""The value to set a variable to, by its name."""


def main(folder: Path, required: Iterable[str], environ: Mapping[str, str]) -> int:
    """1 where a name is unknown or missing, or the file cannot be read. No `.env` is fine by itself."""
    file = folder / ".env"
    try:
        env = file.read_text(encoding="utf-8") if file.exists() else ""
        found = list(unknown(env, known((folder / "compose.yaml").read_text(encoding="utf-8"))))
    except (OSError, UnicodeError) as error:
        found = [f"{error}"]
    found += [f"set {name} in .env: {ADVICE[name]}" for name in required if not environ.get(name)]
    sys.stderr.write("".join(f"{each}\n" for each in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:], os.environ))
