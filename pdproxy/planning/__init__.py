"""Which nodes, and whether to disaggregate at all: pure functions over a snapshot."""
