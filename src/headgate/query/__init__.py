"""Reads: many sources as one table."""
