"""API keys: who may come in, and how many requests at a time.

A key file has one key a line: ``key [name [limit]]``; ``#`` begins a comment. ``name`` goes to logs, ``limit`` is the
number of requests that the key may have open at once. Keys are kept as SHA-256 digests and looked up by digest, so the
time of a look-up tells nothing about the key.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from pdproxy.errors import ClientError, SettingsError
from pdproxy.request import Headers, header


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """Who a key belongs to. ``limit``: open requests at once; None: no limit of its own."""

    name: str
    limit: int | None = None


ANYBODY = Holder("anybody")


class Keys:
    """The accepted keys; without any, everybody comes in."""

    def __init__(self, holders: Mapping[bytes, Holder]) -> None:
        self._holders = holders

    def holder(self, headers: Headers) -> Holder:
        """Whose request this is.

        Raises:
            ClientError: 401 for no key or an unknown one.
        """
        if not self._holders:
            return ANYBODY
        found = self._holders.get(digest(presented(headers)))
        if found is None:
            raise ClientError(
                401,
                "Incorrect or missing API key: send it as 'Authorization: Bearer KEY'.",
                kind="authentication_error",
                code="invalid_api_key",
                headers=(("www-authenticate", "Bearer"),),
            )
        return found


def presented(headers: Headers) -> str:
    """The key in a request's headers, "" without one: OpenAI's place, then Anthropic's."""
    scheme, _, key = (header(headers, "authorization") or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else (header(headers, "x-api-key") or "")


def digest(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


def read_keys(path: Path | None) -> Keys:
    """The keys of a file; no path: no keys.

    Raises:
        SettingsError: the file cannot be read, holds no key, or a line is wrong (by its number; never the key itself).
    """
    if path is None:
        return Keys({})
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise SettingsError(f"keys.file: {path} cannot be read: {error.strerror}.") from error
    holders = dict(parse_lines(lines))
    if not holders:
        raise SettingsError(
            f"keys.file: {path} holds no key: nobody could come in. Leave the setting out to let all in."
        )
    return Keys(holders)


def parse_lines(lines: Iterable[str]) -> Iterable[tuple[bytes, Holder]]:
    """Digest and holder of each line.

    Raises:
        SettingsError: a line with more than three words or a limit that is no positive number.
    """
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 3 or (len(words) == 3 and not (words[2].isdecimal() and int(words[2]) > 0)):
            raise SettingsError(f"keys.file, line {number}: write 'key [name [limit]]', with a limit of 1 or more.")
        name = words[1] if len(words) > 1 else f"line-{number}"
        yield digest(words[0]), Holder(name, int(words[2]) if len(words) == 3 else None)
