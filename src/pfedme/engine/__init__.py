"""Rounds on this machine, and how good the models are that come out of them."""
