"""One archive of all that a run left, for somebody else to read: without keys, tokens and passwords.

Files of known kinds alone are taken, and searched for what is secret; the finished archive is searched again.
"""

import io
import re
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from deploy.gpu.options import RunError

TAKEN = frozenset({".log", ".json", ".prom", ".txt", ".md"})
"""Kinds of files that are taken; links never are."""
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH(?!OR)", re.IGNORECASE)
SHORTEST = 8
"""Characters of a secret that is searched for: a shorter one would be found in every number."""
LOOKS_SECRET = (
    ("a token of the hub", re.compile(rb"hf_[A-Za-z0-9]{16,}")),
    ("an API key", re.compile(rb"\bsk-[A-Za-z0-9_-]{16,}")),
    ("an Authorization header", re.compile(rb"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}")),
    ("a password in an address", re.compile(rb"(?<=://)[^/\s:@\"']{1,128}:[^/\s@\"']{1,128}(?=@)")),
    ("a private key", re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)),
)
MOST_BYTES = 256 << 20
"""Of one file; what is beyond the end of a longer log is left out."""


def secrets_of(environment: Mapping[str, str]) -> dict[str, bytes]:
    """What is secret in an environment, by the variable's name: keys, files of keys, passwords in addresses."""
    found: dict[str, bytes] = {}
    for name, value in environment.items():
        if SECRET_NAME.search(name):
            for number, part in enumerate(_parts(name, value)):
                found[f"{name}{number or ''}"] = part.encode()
        elif "://" in value and (password := _password(value)):
            found[name] = password.encode()
    return {name: value for name, value in found.items() if len(value) >= SHORTEST}


def without_secrets(content: bytes, secret: Mapping[str, bytes]) -> bytes:
    """The same with a mark in the place of each secret."""
    for name, value in sorted(secret.items(), key=lambda one: len(one[1]), reverse=True):
        content = content.replace(value, f"[left out: {name}]".encode())
    for name, pattern in LOOKS_SECRET:
        content = pattern.sub(f"[left out: {name}]".encode(), content)
    return content


def pack(folder: Path, to: Path, secret: Mapping[str, bytes]) -> list[str]:
    """Write the archive and return the names in it. Raises RunError, and leaves none, where a secret is left in it."""
    names = list[str]()
    new = to.with_name(f".{to.name}.new")
    with tarfile.open(new, "w:gz") as archive:
        for path in files_in(folder):
            with path.open("rb") as source:
                content = without_secrets(source.read(MOST_BYTES), secret)
            entry = tarfile.TarInfo(f"{to.name.removesuffix('.tar.gz')}/{path.relative_to(folder)}")
            entry.size, entry.mtime, entry.mode = len(content), int(path.stat().st_mtime), 0o644
            archive.addfile(entry, io.BytesIO(content))
            names.append(entry.name)
    if left := search(new, secret):
        new.unlink()
        raise RunError(
            f"{', '.join(left)} is still in the archive, which was removed: send {folder / 'results'} by hand"
        )
    new.rename(to)
    return names


def search(archive: Path, secret: Mapping[str, bytes]) -> list[str]:
    """The names of secrets that an archive holds."""
    with tarfile.open(archive, "r:gz") as packed:
        held = [source.read() for member in packed if (source := packed.extractfile(member)) is not None]
        told = "\n".join(packed.getnames()).encode()
    return sorted(name for name, value in secret.items() if any(value in each for each in (*held, told)))


def files_in(folder: Path) -> Iterator[Path]:
    """What is taken of a folder, in order."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.suffix in TAKEN:
            yield path


def archive_name(folder: Path, now: float) -> Path:
    """Where the archive of a run's folder is written: beside it."""
    return folder.with_name(f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}.tar.gz")


def _parts(name: str, value: str) -> Iterator[str]:
    """A value, each of its parts where it is a list, and the lines of the file that it names."""
    yield value
    if "," in value:
        yield from (part.strip() for part in value.split(","))
    path = Path(value)
    if name.endswith("FILE") and path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            yield from (word for word in line.split()[:1] if not word.startswith("#"))


def _password(value: str) -> str:
    try:
        return urlsplit(value).password or ""
    except ValueError:
        return ""
