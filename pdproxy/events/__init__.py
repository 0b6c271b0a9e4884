"""KV events of nodes: off the wire, in order, into the prefix index; and the index asked for a request."""
