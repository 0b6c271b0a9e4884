"""Checks of alert rules and dashboard queries: by promtool where it is installed, by regular expressions everywhere."""
