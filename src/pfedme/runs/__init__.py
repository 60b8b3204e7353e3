"""A run as it is described, and what it leaves behind."""
