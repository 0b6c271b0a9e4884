"""Metrics on an injected registry, logs, tracing."""
