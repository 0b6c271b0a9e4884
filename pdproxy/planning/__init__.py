"""Which nodes, and whether to disaggregate at all: pure functions of the state of the pool."""
