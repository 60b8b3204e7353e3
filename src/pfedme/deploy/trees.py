"""Trees of objects: Flower cuts a message into objects, announces the tree of their ids, and sends them
one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pfedme.deploy.log import MIB


def most_objects(limit: int) -> int:
    """The most objects that a message of `limit` bytes may have; Flower cuts arrays into pieces of 5 MiB."""
    return 256 + limit // MIB


def walk(tree: Any) -> Iterator[Any]:
    """Every node of a tree."""
    yield tree
    for child in tree.children:
        yield from walk(child)


def is_plain(tree: Any) -> bool:
    """Whether an object that occurs more than once in a tree has the same children each time.

    Flower stores the children of each object once. If they could differ, a small tree might represent a huge
    one.
    """
    children: dict[str, list[str]] = {}
    for node in walk(tree):
        own = [child.object_id for child in node.children]
        if children.setdefault(node.object_id, own) != own:
            return False
    return True


def is_as_stored(tree: Any, store: Any) -> bool:
    """Whether the objects of a tree that are already in a store have the same children there."""
    if tree.object_id in store:
        return store.get_object_tree(tree.object_id) == tree
    return all(is_as_stored(child, store) for child in tree.children)
