"""The command line: ``pdproxy serve``, ``pdproxy check``, ``pdproxy settings``, ``pdproxy settings-schema``.

Each command imports what it needs when it runs: help and the version are there at once.
"""

import gc
import os
import sys
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from pdproxy import __version__
from pdproxy.errors import SettingsError

if TYPE_CHECKING:
    from pdproxy.settings.model import Settings

UNUSABLE = 2
"""The exit status for settings that cannot be used, as for any command line."""
INTERRUPTED = 130
"""The exit status after Ctrl-C during a start, as shells have it. A proxy that serves ends in order, with 0."""

COMMANDS = {
    "serve": "Serve until a signal ends it.",
    "check": "Ask every node whether it can work with the others; status 1 when one cannot.",
    "settings": "Print the reference of all settings.",
    "settings-schema": "Print the JSON schema of the settings file, for editors.",
}


class Parser(ArgumentParser):
    """Raises `SettingsError` for what is wrong, as every source of settings does."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if not words:
        _commands().print_help(sys.stderr)
        return UNUSABLE
    gc.disable()  # imports make objects that stay: to look through them again and again is a twentieth of the start
    try:
        return _run(_commands().parse_args(words[:1]).command, words[1:])
    except SettingsError as error:
        for line in str(error).splitlines():
            print(f"pdproxy: {line}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        gc.enable()


def _commands() -> Parser:
    """The parser of the first word alone."""
    listed = "".join(f"  {name:<16} {text}\n" for name, text in COMMANDS.items())
    parser = Parser(
        prog="pdproxy", usage="pdproxy COMMAND …", allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter,
        description=f"Prefill and decode on separate vLLM nodes.\n\ncommands (COMMAND --help says more):\n{listed}",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"pdproxy {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=SUPPRESS)
    return parser


def _run(command: str, words: Sequence[str]) -> int:
    parser = Parser(prog=f"pdproxy {command}", description=COMMANDS[command], allow_abbrev=False)
    if command in ("settings", "settings-schema"):
        parser.parse_args(words)
        from pdproxy.settings.reference import printed_schema, reference

        sys.stdout.write(reference() if command == "settings" else printed_schema())
        return 0
    settings = _loaded(parser, words)
    if command == "serve":
        from pdproxy.app.run import serve

        return serve(settings)
    if not settings.nodes and not settings.discovery.wanted:
        raise SettingsError(
            "there are no nodes to check: name them with --node URL, or --prefill URL and --decode URL, or `discovery`."
        )
    from pdproxy.app.check import check

    return check(settings)


def _loaded(parser: Parser, words: Sequence[str]) -> "Settings":
    # Nobody needs pydantic's plugins here; to look for them, each package that is installed is read.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from pdproxy.settings.load import load
    from pdproxy.settings.sources import FlagSource, add_flags, refuse_unknown

    add_flags(parser, words)
    parsed, unknown = parser.parse_known_args(words)
    refuse_unknown(unknown)
    return load(FlagSource(parsed), parsed.config, os.environ)


if __name__ == "__main__":
    sys.exit(main())
