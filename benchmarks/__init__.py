"""Benchmarks that print figures of the documentation's pages.

A benchmark that times something warms up and times its rows in turns.
"""
