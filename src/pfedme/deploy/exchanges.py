"""What each client was asked, and what it answers: a client can fetch, confirm and answer its own messages,
and nothing else."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pfedme.deploy.door import Orders
from pfedme.deploy.log import amount, say
from pfedme.deploy.trees import is_as_stored, is_plain, most_objects, walk

KEPT = 3
"""Messages to a client that are remembered, with the replies to them: the latest, and a few in case of late
replies."""
TRIES = 8
"""How often a client may fetch the same object, or announce the same reply; connections fail at times."""


@dataclass
class Exchange:
    """A message to a client, and the client's reply."""

    run: int
    objects: set[str]
    """What the client may fetch."""
    fetched: Counter[str] = field(default_factory=Counter)
    """How often it has fetched each of them."""
    tree: bytes = b""
    """The reply as the client has announced it,"""
    root: str = ""
    """the id of its root,"""
    announced: set[str] = field(default_factory=set)
    """and of all its objects."""
    tries: int = 0
    stored: dict[str, int] = field(default_factory=dict)
    """The size in bytes of each object of the reply that has arrived."""


class Exchanges:
    """The exchanges with all clients, as wrappers around Flower's request handlers.

    Flower makes sure that a request comes from the node whose key has signed it, but believes whatever the
    request says. Each wrapper checks that first.
    """

    def __init__(self, orders: Orders) -> None:
        from flwr.common.constant import SUPERLINK_NODE_ID

        self.orders, self.server, self.lock = orders, SUPERLINK_NODE_ID, threading.RLock()
        self.by_node: dict[int, OrderedDict[str, Exchange]] = {}
        """By node, and by the id of the message."""
        self.replaced: dict[int, deque[float]] = {}

    def handlers(self, own: dict[str, Any]) -> dict[str, Callable[..., Any]]:
        """The wrappers around Flower's `own` handlers, by name."""
        wrappers = {
            "pull_messages": self._given,
            "push_messages": self._announced,
            "push_object": self._sent,
            "pull_object": self._fetched,
            "confirm_message_received": self._confirmed,
        }
        return {name: functools.partial(wrapper, own[name]) for name, wrapper in wrappers.items()}

    def replace(self, node: int) -> None:
        """Notes that a client has connected although it was connected already."""
        times = self.replaced.setdefault(node, deque(maxlen=3))
        times.append(time.monotonic())
        if contended(times):
            say(
                f"Two clients are using the key of {self._name(node)} at once and keep replacing each other "
                "(or one client keeps restarting)."
            )

    def _name(self, node: int) -> str:
        return self.orders.names.get(node, f"node {node}")

    def _refuse(self, node: int, why: str) -> NoReturn:
        from fastapi import HTTPException

        say(f"Refused {self._name(node)}: {why}.")
        raise HTTPException(403, why)

    def _given(self, pull: Callable[..., Any], **given: Any) -> Any:
        response = pull(**given)
        with self.lock:
            own = self.by_node.setdefault(given["request"].node.node_id, OrderedDict())
            for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
                ids = {node.object_id for node in walk(tree)}
                own[message.metadata.message_id] = Exchange(message.metadata.run_id, ids)
            while len(own) > KEPT:
                _, old = own.popitem(last=False)
                if old.root:
                    given["store"].delete(old.root)
        return response

    def _announced(self, push: Callable[..., Any], **given: Any) -> Any:
        request, store = given["request"], given["state"].object_store
        node, most = request.node.node_id, most_objects(self.orders.limit)
        with self.lock:
            if (len(request.messages_list), len(request.message_object_trees)) != (1, 1):
                self._refuse(node, "what it sends is not a single message")
            about, tree = request.messages_list[0].metadata, request.message_object_trees[0]
            if about.src_node_id != node or about.dst_node_id != self.server:
                self._refuse(node, "it sends a message in another client's name, or to another client")
            exchange = self.by_node.get(node, {}).get(about.reply_to_message_id)
            if exchange is None or exchange.run != about.run_id:
                self._refuse(node, "it replies to a message that it was not sent")
            ids = [one.object_id for one in walk(tree)]
            if len(ids) > most:
                self._refuse(node, f"it announces more than {most} objects")
            if tree.object_id != about.message_id or not is_plain(tree) or not is_as_stored(tree, store):
                self._refuse(node, "what it announces contradicts itself")
            announced = tree.SerializeToString(deterministic=True)
            if exchange.tree not in (b"", announced) or exchange.tries >= TRIES:
                self._refuse(node, "it replies more than once to the same message")
            exchange.tree, exchange.root, exchange.announced = announced, tree.object_id, set(ids)
            exchange.tries += 1
            return push(**given)

    def _sent(self, push: Callable[..., Any], **given: Any) -> Any:
        request = given["request"]
        node, limit = request.node.node_id, self.orders.limit
        with self.lock:
            stored = self._exchange(request, lambda exchange: exchange.announced).stored
            stored[request.object_id] = len(request.object_content)
            if sum(stored.values()) > limit:
                del stored[request.object_id]
                self._refuse(node, f"it sends more than {amount(limit)}")
        return push(**given)

    def _fetched(self, pull: Callable[..., Any], **given: Any) -> Any:
        request = given["request"]
        with self.lock:
            fetched = self._exchange(request, lambda exchange: exchange.objects).fetched
            if fetched[request.object_id] >= TRIES:
                self._refuse(request.node.node_id, "it fetches the same object again and again")
            response = pull(**given)
            fetched[request.object_id] += response.object_available
        return response

    def _confirmed(self, confirm: Callable[..., Any], **given: Any) -> Any:
        request = given["request"]
        node = request.node.node_id
        with self.lock:
            exchange = self.by_node.get(node, {}).get(request.message_object_id)
            if exchange is None or exchange.run != request.run_id:
                self._refuse(node, "it confirms a message that it was not sent")
        return confirm(**given)

    def _exchange(self, request: Any, objects: Callable[[Exchange], set[str]]) -> Exchange:
        """The exchange that the object of a request belongs to."""
        for exchange in self.by_node.get(request.node.node_id, {}).values():
            if exchange.run == request.run_id and request.object_id in objects(exchange):
                return exchange
        return self._refuse(request.node.node_id, "it asks for, or sends, an object of none of its messages")


def contended(times: Sequence[float], within: float = 60.0) -> bool:
    """Whether the last three of these times lie within `within` seconds.

    >>> contended([0.0, 50.0]), contended([0.0, 50.0, 61.0]), contended([0.0, 1.0, 50.0, 60.0])
    (False, False, True)
    """
    return len(times) >= 3 and times[-1] - times[-3] <= within
