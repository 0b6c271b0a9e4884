"""Commands for the operator's shell on the proxy's host, complete as they are pasted. Pure."""

import dataclasses
import shlex
import urllib.parse
from collections.abc import Iterable, Sequence

from pdproxy.nodes.node import BOTH, NodeView, Role

HERE = "{here}"
"""Stands in commands for the address of the operators' port, which the browser knows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Commands:
    """Makes commands that reach the operators' port and the nodes as this proxy does.

    Attributes:
        token_file: holds the token that the operators' port asks for; "" where it asks for none.
        check_options: of ``pdproxy check`` beside the nodes' addresses: how this proxy reaches nodes.
    """

    token_file: str = ""
    check_options: Sequence[str] = ()

    def operators(self, path: str, *options: str) -> str:
        """Ask a path of the operators' port that is the operator's alone."""
        token = [f'-H "authorization: Bearer $(cat {shlex.quote(self.token_file)})"'] if self.token_file else []
        return " ".join(["curl -sS", *options, *token, f"{HERE}{path}"])

    def rejoin(self, view: NodeView) -> str:
        """End the drain of a node."""
        return self.operators(f"/nodes/{urllib.parse.quote(view.name)}/rejoin", "-X POST")

    def check(self, views: Iterable[NodeView]) -> str:
        """Ask these nodes whether they can work together, and hand a short prompt over between them."""
        words = ["pdproxy", "check"]
        for view in views:
            words += [_option(view), view.node.url]
        return shlex.join([*words, *self.check_options])


def ask(view: NodeView, path: str = "/health") -> str:
    """Ask a node over HTTP."""
    return f"curl -sS -i -m 5 {shlex.quote(view.node.url + path)}"


def processes(view: NodeView) -> str:
    """List the processes of vLLM on a node's host, each with its state."""
    host = urllib.parse.urlsplit(view.node.url).hostname or view.name
    return f"ssh {shlex.quote(host)} \"ps -eo pid,stat,args | grep -i '[v]llm'\""


def _option(view: NodeView) -> str:
    return "--node" if view.node.roles == BOTH else f"--{Role(view.node.roles[0])}"
