"""Tests of pdproxy/stream."""
