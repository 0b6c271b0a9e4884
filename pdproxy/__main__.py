"""The command line: ``pdproxy serve``, ``pdproxy check``, ``pdproxy settings``."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from pdproxy import __version__
from pdproxy.errors import SettingsError
from pdproxy.settings import Settings
from pdproxy.settings.flags import Parser, add_flags, read_flags, refuse_unknown
from pdproxy.settings.load import load
from pdproxy.settings.reference import reference

UNUSABLE = 2
"""The exit status for settings that cannot be used, as for any command line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit status."""
    try:
        parsed, unknown = _parser().parse_known_args(arguments)
        refuse_unknown(unknown)
        run: Callable[[argparse.Namespace], int] = parsed.run
        return run(parsed)
    except SettingsError as error:
        print(f"pdproxy: {error}", file=sys.stderr)
        return UNUSABLE


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="pdproxy", description="Prefill and decode on separate vLLM nodes.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pdproxy {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, run, text in (
        ("serve", _serve, "Serve until a signal ends it."),
        ("check", _check, "Ask every node whether it can work with the others; status 1 when one cannot."),
    ):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        add_flags(command)
        command.set_defaults(run=run)
    text = "Print the reference of all settings."
    commands.add_parser("settings", help=text, description=text).set_defaults(run=_settings)
    return parser


def _loaded(parsed: argparse.Namespace) -> Settings:
    return load(read_flags(parsed), parsed.config, os.environ)


def _serve(parsed: argparse.Namespace) -> int:
    settings = _loaded(parsed)
    from pdproxy.app import serve

    return serve(settings)


def _check(parsed: argparse.Namespace) -> int:
    settings = _loaded(parsed)
    if not settings.nodes and not settings.discovery.wanted:
        raise SettingsError(
            "there are no nodes to check: name them with --prefill URL and --decode URL, or `discovery`."
        )
    from pdproxy.app import check

    return check(settings)


def _settings(parsed: argparse.Namespace) -> int:
    del parsed
    sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
