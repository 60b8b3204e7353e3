"""A message's content as Flower carries it."""

from __future__ import annotations

import json

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from pfedme.deploy.messages import Content, Kind

TYPES: dict[Kind, str] = {
    "agree": "query.agree", "join": "query.join", "train": "train", "finish": "evaluate",
    "refuse": "query.refuse",
}  # fmt: skip
"""Flower's names for the kinds of messages."""


def packed(content: Content) -> RecordDict:
    """A message's content as Flower's records."""
    arrays = ArrayRecord({name: Array(array) for name, array in content.arrays.items()})
    return RecordDict({"arrays": arrays, "config": ConfigRecord({"words": json.dumps(content.words)})})


def unpacked(records: RecordDict) -> Content:
    """The inverse of `packed`."""
    arrays = {name: np.asarray(array.numpy()) for name, array in records.array_records["arrays"].items()}
    return Content(json.loads(str(records.config_records["config"]["words"])), arrays)
