"""Runs carried out: how long to train, rounds, checkpoints, comparisons, trackers."""
