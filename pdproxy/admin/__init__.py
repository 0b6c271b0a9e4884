"""Operator HTTP: health, ready, metrics, nodes."""
