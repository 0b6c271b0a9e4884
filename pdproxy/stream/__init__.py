"""Server-sent events: framing, reading and rewriting them, and what a client has of a stream so far. No I/O."""
