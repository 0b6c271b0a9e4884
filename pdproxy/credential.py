"""Words that grant access, read from files, and replaced when their files change: credentials and tokens."""

from collections.abc import Callable
from pathlib import Path

from pdproxy.errors import SettingsError
from pdproxy.request import Headers

OwnHeaders = Callable[[], Headers]
"""The headers of the proxy's own requests to nodes (health, preflight, events), as of now."""


def no_headers() -> Headers:
    """No headers, for nodes that ask for no credential."""
    return ()


class Secret:
    """One word; "" for none. `replace` it, and whoever holds the object uses the new one from then on."""

    def __init__(self, word: str = "") -> None:
        self.word = word

    def __repr__(self) -> str:
        return "Secret(…)"  # a word that is logged is known

    def replace(self, word: str) -> None:
        """Use another word from now on."""
        self.word = word

    def headers(self) -> Headers:
        """The header that carries it, as a bearer token."""
        return (("authorization", f"Bearer {self.word}"),) if self.word else ()


def read_secret(path: Path | None, setting: str) -> str:
    """The one word that a file holds; "" without a file.

    Raises:
        SettingsError: it cannot be read, or is empty, or holds several words, or what no header can carry.
    """
    if path is None:
        return ""
    words = read_text(path, setting).split()
    if len(words) != 1:
        raise SettingsError(f"{setting}: {path} must hold one word, and holds {len(words)}.")
    if not (words[0].isascii() and words[0].isprintable()):
        raise SettingsError(f"{setting}: {path} must hold ASCII characters only: a header carries them.")
    return words[0]


def read_text(path: Path, setting: str) -> str:
    """The content of a file.

    Raises:
        SettingsError: it cannot be read, or is no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{setting}: {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{setting}: {path} is no text in UTF-8.") from error
