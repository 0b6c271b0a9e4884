"""Operators' views (metrics, alerts, live page) of a real proxy under load while one of its nodes is killed."""
