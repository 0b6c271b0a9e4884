"""The only place that rewrites a request. Pure; its parts lie beside it as ``body_*.py``.

::

    raw bytes ─ parse ─ scrub ─┬─ shape                    what it is
                               ├─ split                    one body per prompt
                               ├─ prefill_body             asks for exactly one token
                               ├─ decode_body              what the client sent, and the ticket
                               └─ continuation_body        the rest of a broken stream, as a request

No function changes the mapping that it is given.
"""

from pdproxy.legs.body_continue import continuation_body
from pdproxy.legs.body_decode import decode_body
from pdproxy.legs.body_parse import check_values, parse, scrub
from pdproxy.legs.body_prefill import prefill_body
from pdproxy.legs.body_shape import shape
from pdproxy.legs.body_split import split

__all__ = ["check_values", "continuation_body", "decode_body", "parse", "prefill_body", "scrub", "shape", "split"]
