"""The table that `pdproxy check` prints."""

from pdproxy.app.check import passed, table
from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.compatibility import Compatibility, Incompatibility
from pdproxy.nodes.node import Binding, Capacity, Node, Role
from pdproxy.nodes.node_info import ModelCard, NodeInfo
from pdproxy.nodes.preflight import CheckRow

PREFILL = Node("p1", "http://p1", (Role.PREFILL,))
DECODE = Node("d1", "http://d1", (Role.DECODE,))
HYBRID = Capacity(143_936, 1400, 9, Binding.STATE)
DENSE = Capacity(362_608, None, 88, Binding.ATTENTION)


def test_each_node_has_a_line_and_each_finding_a_note() -> None:
    rows = [
        CheckRow(PREFILL, NodeInfo(PREFILL, ModelCard(("tiny",)), "0.32.0", capacity=HYBRID)),
        CheckRow(
            DECODE,
            NodeInfo(DECODE, ModelCard(("tiny",)), "0.32.0", capacity=DENSE),
            Compatibility(
                (Incompatibility("block_size", "16 here, 256 on p1"),), (Incompatibility("tp_size", "2 here, 1 on p1"),)
            ),
        ),
        CheckRow(Node("d2", "http://d2", (Role.DECODE,)), NodeFault(Fault.REFUSED, "nobody there")),
    ]
    assert table(rows).splitlines() == [
        "NODE  ROLE     MODEL  COHORT  TOKENS   SEQUENCES  LONGEST  BINDS      VERDICT",
        "p1    prefill  tiny   0.32.0  143,936  1,400      9        state      ok",
        "d1    decode   tiny   0.32.0  362,608  any        88       attention  refused",
        "d2    decode   ?      ?       ?        ?          ?        ?          unreachable",
        "d1: refused: block_size: 16 here, 256 on p1",
        "d1: warning: tp_size: 2 here, 1 on p1",
        "d2: cannot be reached: nobody there",
    ]
    assert not passed(rows)
    assert passed(rows[:1])


def test_nodes_that_never_hand_over_fail_the_check() -> None:
    rows = [
        CheckRow(PREFILL, NodeInfo(PREFILL, ModelCard(("tiny",)), "0.32.0")),
        CheckRow(
            DECODE,
            NodeInfo(DECODE, ModelCard(("tiny",)), "0.32.0"),
            unpaired=(Incompatibility("checkpoint", "new here, old on p1: the same weights"),),
        ),
    ]
    lines = table(rows).splitlines()
    assert lines[2].split()[-2:] == ["no", "partner"]
    assert lines[3:] == ["d1: exchanges no tickets: checkpoint: new here, old on p1: the same weights"]
    assert not passed(rows)
