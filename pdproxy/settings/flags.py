"""Settings from the command line: a flag for each, made from its meaning."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pdproxy.errors import SettingsError
from pdproxy.settings.convert import expected
from pdproxy.settings.given import Given, Said, did_you_mean
from pdproxy.settings.leaves import leaves, sections

SHORT = {
    "listen.host": "--host",
    "listen.port": "--port",
    "listen.admin_port": "--admin-port",
}
"""Shorter names of what is said most often."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong by raising `SettingsError`, as every other source does."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}.")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a command's parser the flags of every setting."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings.")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", action="append", default=[], metavar="URL", help=f"Address of a {role} node; repeatable."
        )
    groups = {name: parser.add_argument_group(name, kind.__doc__) for name, kind in sections().items()}
    for leaf in leaves():
        names = [leaf.flag, SHORT[leaf.key]] if leaf.key in SHORT else [leaf.flag]
        text = f"{leaf.meaning.text} Takes {expected(leaf.kind, leaf.meaning)}."
        groups[leaf.section].add_argument(*names, dest=leaf.key, metavar="VALUE", help=text.replace("%", "%%"))


def read_flags(parsed: argparse.Namespace) -> Given:
    """What the flags say."""
    said = vars(parsed)
    values = {leaf.key: Said(said[leaf.key], leaf.flag) for leaf in leaves() if said.get(leaf.key) is not None}
    nodes = tuple(
        {"url": Said(url, f"--{role}"), "role": Said(role, f"--{role}")}
        for role in ("prefill", "decode")
        for url in said[role]
    )
    return Given(values, nodes)


def refuse_unknown(unknown: Sequence[str]) -> None:
    """Complain of what the parser did not know.

    Raises:
        SettingsError: there was something.
    """
    if unknown:
        known = ["--config", "--prefill", "--decode", *SHORT.values(), *(leaf.flag for leaf in leaves())]
        near = did_you_mean(unknown[0].partition("=")[0], known)
        raise SettingsError(f"{unknown[0]} is no flag of this command.{near}")
