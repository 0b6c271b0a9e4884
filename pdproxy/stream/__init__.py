"""Server-sent events: framing, what was said so far, and passing it on."""
