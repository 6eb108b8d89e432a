"""Benchmarks: each measurement in a process of its own, results as JSON and as a table."""
