"""The command line: ``pdproxy serve``, ``pdproxy check``, ``pdproxy settings``, ``pdproxy settings-schema``.

Each command imports what it needs when it runs: help and the version are there at once.
"""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from pdproxy import __version__
from pdproxy.errors import SettingsError

if TYPE_CHECKING:
    from pdproxy.settings.model import Settings

UNUSABLE = 2
"""The exit status for settings that cannot be used, as for any command line."""


class Parser(ArgumentParser):
    """Says what is wrong by raising `SettingsError`, as every source of settings does."""

    def error(self, message: str) -> NoReturn:
        """Raise SettingsError."""
        raise SettingsError(f"{message}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        command: Callable[[Sequence[str]], int] = _commands().parse_args(words[:1]).run
        return command(words[1:])
    except SettingsError as error:
        for line in str(error).splitlines():
            print(f"pdproxy: {line}", file=sys.stderr)
        return UNUSABLE


def _commands() -> Parser:
    """The parser of the first word alone."""
    parser = Parser(prog="pdproxy", description="Prefill and decode on separate vLLM nodes.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pdproxy {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, run in (("serve", _serve), ("check", _check), ("settings", _settings), ("settings-schema", _schema)):
        commands.add_parser(name, help=run.__doc__, add_help=False).set_defaults(run=run)
    return parser


def _parser(command: str, text: str | None) -> Parser:
    return Parser(prog=f"pdproxy {command}", description=text, allow_abbrev=False)


def _loaded(parser: Parser, words: Sequence[str]) -> "Settings":
    from pdproxy.settings.load import load
    from pdproxy.settings.sources import FlagSource, add_flags, refuse_unknown

    add_flags(parser)
    parsed, unknown = parser.parse_known_args(words)
    refuse_unknown(unknown)
    return load(FlagSource(parsed), parsed.config, os.environ)


def _serve(words: Sequence[str]) -> int:
    """Serve until a signal ends it."""
    settings = _loaded(_parser("serve", _serve.__doc__), words)
    from pdproxy.app.run import serve

    return serve(settings)


def _check(words: Sequence[str]) -> int:
    """Ask every node whether it can work with the others; status 1 when one cannot."""
    settings = _loaded(_parser("check", _check.__doc__), words)
    if not settings.nodes and not settings.discovery.wanted:
        raise SettingsError(
            "there are no nodes to check: name them with --prefill URL and --decode URL, or `discovery`."
        )
    from pdproxy.app.check import check

    return check(settings)


def _settings(words: Sequence[str]) -> int:
    """Print the reference of all settings."""
    _parser("settings", _settings.__doc__).parse_args(words)
    from pdproxy.settings.reference import reference

    sys.stdout.write(reference())
    return 0


def _schema(words: Sequence[str]) -> int:
    """Print the JSON schema of the settings file, for editors."""
    _parser("settings-schema", _schema.__doc__).parse_args(words)
    from pdproxy.settings.reference import printed_schema

    sys.stdout.write(printed_schema())
    return 0


if __name__ == "__main__":
    sys.exit(main())
