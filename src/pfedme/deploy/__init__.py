"""A real federation: clients on their own machines, and a server that never sees their rows.

`server` and `client` are the two sides and know of no network; `app` puts them behind Flower, `processes`
starts Flower for people who do not know it, and `create_keys` creates the keys of both sides.
"""

from pathlib import Path

BUNDLE = Path(__file__).with_name("bundle")
"""The Flower app."""
