"""Processes whose CPU time counts."""

import os
import subprocess
import sys

from deploy.bench.cpu import Stat, processes, read_stat, seconds_of_tree, tree

LINE = "42 (a) b (c) S 7 42 42 0 -1 4194304 100 200 0 0 11 22 33 44 20 0 1 0 12345 1000 10"
BURN = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"


def test_a_name_may_hold_parentheses_and_spaces() -> None:
    assert read_stat(LINE) == Stat(pid=42, parent=7, ended=33 + 44)


def test_descendants_count_in_any_order_and_other_processes_do_not() -> None:
    stats = [Stat(4, 3, 1000), Stat(3, 2, 100), Stat(2, 1, 10), Stat(9, 1, 7), Stat(1, 0, 1)]
    assert {stat.ended for stat in tree(stats, 2)} == {1000, 100, 10}
    assert {stat.pid for stat in tree(stats, 1)} == {1, 2, 3, 4, 9}


def test_a_process_that_is_gone_has_used_nothing() -> None:
    assert tree([Stat(2, 1, 10)], 5) == []
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
        assert seconds_of_tree(gone.pid) == 0.0


def test_little_work_is_seen() -> None:
    before = seconds_of_tree(os.getpid())
    sum(range(100_000))
    assert 0.0 < seconds_of_tree(os.getpid()) - before < 1.0
    assert os.getpid() in processes(os.getpid())


def test_the_cpu_time_of_an_ended_child_counts() -> None:
    before = seconds_of_tree(os.getpid())
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert seconds_of_tree(os.getpid()) - before >= 0.15


def test_the_cpu_time_of_a_running_child_counts() -> None:
    before = seconds_of_tree(os.getpid())
    then_wait = f"{BURN}\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", then_wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        used = seconds_of_tree(os.getpid()) - before
        child.communicate(b"\n")
    assert used >= 0.15
