"""Personalized federated learning with Moreau envelopes."""

__version__ = "0.1.0"
