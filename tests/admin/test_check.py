"""`pdproxy check` as a person reads it."""

from pdproxy.admin.check import passed, table
from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.facts import Card, Facts
from pdproxy.nodes.judge import Finding, Verdict
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.preflight import Checked

PREFILL = Node("p1", "http://p1", Role.PREFILL)
DECODE = Node("d1", "http://d1", Role.DECODE)


def test_each_node_has_a_line_and_each_finding_a_note() -> None:
    rows = [
        Checked(PREFILL, Facts(PREFILL, Card(("tiny",)), "0.32.0")),
        Checked(
            DECODE,
            Facts(DECODE, Card(("tiny",)), "0.32.0"),
            Verdict((Finding("block_size", "16 here, 256 on p1"),), (Finding("tp_size", "2 here, 1 on p1"),)),
        ),
        Checked(Node("d2", "http://d2", Role.DECODE), NodeFault(Fault.REFUSED, "nobody there")),
    ]
    assert table(rows).splitlines() == [
        "NODE  ROLE     MODEL  COHORT  VERDICT",
        "p1    prefill  tiny   0.32.0  ok",
        "d1    decode   tiny   0.32.0  refused",
        "d2    decode   ?      ?       unreachable",
        "d1: refused: block_size: 16 here, 256 on p1",
        "d1: warning: tp_size: 2 here, 1 on p1",
        "d2: refused: nobody there",
    ]
    assert not passed(rows)
    assert passed(rows[:1])
