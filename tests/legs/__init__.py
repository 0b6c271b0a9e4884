"""Tests of pdproxy/legs."""
