"""Differential privacy: what it is asked for, how much noise it takes, and what it has cost."""
