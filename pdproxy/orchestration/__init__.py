"""One prompt's way through its life: prefill, hand-over, decode, relay, and whatever a failure asks for."""
