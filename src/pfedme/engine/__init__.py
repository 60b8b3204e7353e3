"""Rounds on this machine, and the evaluation of the resulting models."""
