"""Strategies that share the work among processes."""
