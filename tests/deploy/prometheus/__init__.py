"""What Prometheus makes of our rules and panels: a small evaluator, for machines without promtool."""
