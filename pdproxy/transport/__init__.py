"""The port to nodes and APIs: one small interface (`port`), its implementation, and the mapping of foreign errors."""
