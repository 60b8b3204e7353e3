"""Advice: whether and how the owners of a table should train together."""
