"""Carrying out runs: how long to train, rounds, checkpoints, comparisons, trackers."""
