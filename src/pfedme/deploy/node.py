"""A client's side of Flower's connection: it fetches messages one at a time, and sends the replies."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from functools import partial
from logging import ERROR, INFO
from typing import Any, NoReturn

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.supercore import log
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.run import RunNotRunningException

from pfedme.deploy.envelope import TYPES, packed, unpacked
from pfedme.deploy.events import FOREIGN, Event, emit
from pfedme.deploy.intake import Intake, TooMuch
from pfedme.deploy.log import say
from pfedme.deploy.messages import Content
from pfedme.deploy.worker import Elsewhere, Failed, Worker

KINDS = {flower: kind for kind, flower in TYPES.items()} | {"query.hello": "hello"}
OFTEN_S, SELDOM_S = 0.2, 3.0
"""The shortest and the longest time after which a client asks again whether there is work. In between, it is
a tenth of the time that it has waited for this message or for the one before, so that many clients do not
keep their server busy with that. With Flower, it would always be three seconds."""


def attend(
    connection: tuple[Any, ...], intake: Intake, worker: Worker | Elsewhere, program: bytes
) -> NoReturn:
    """Replies to messages until the connection ends, which raises an exception.

    `connection` holds Flower's functions that receive and send. A server whose runs are not of `program` is
    not listened to.
    """
    receive, send, get_run, get_fab, pull, push, confirm = connection
    known, last, waited = set[int](), time.monotonic(), 10.0
    while True:
        # Flower raises the second if a run has ended in the meantime; it is not an Exception.
        with contextlib.suppress(TooMuch, RunNotRunningException):
            got = receive()
            if got is not None and intake.begin(got[1]):
                waited = time.monotonic() - last
                emit(Event("working"))
                try:
                    if (run := got[0].metadata.run_id) not in known:
                        _refuse_foreign(get_fab(get_run(run).fab_hash, run).content, program)
                        known.add(run)
                    if (message := _fetched(got[1], partial(pull, run), partial(confirm, run))) is not None:
                        began = time.monotonic()
                        reply = _reply(message, worker)
                        _send(reply, partial(send, clientapp_runtime=time.monotonic() - began), push)
                finally:
                    emit(Event("idle"))
                last = time.monotonic()
                continue
        worker.rest()
        waited = max(waited, time.monotonic() - last)
        time.sleep(min(SELDOM_S, max(OFTEN_S, waited / 10)))


def _refuse_foreign(sent: bytes, program: bytes) -> None:
    """Ends this process if a server's program is not the one that belongs to this version."""
    if hashlib.sha256(sent).digest() != hashlib.sha256(program).digest():
        say(FOREIGN)
        emit(Event("foreign program"))
        raise SystemExit(1)


def _fetched(tree: Any, pull: Callable[[str], bytes], confirm: Callable[[str], None]) -> Message | None:
    """A message from its objects; None if they could not be fetched."""
    try:
        message = pull_and_inflate_object_from_tree(tree, pull, confirm, return_type=Message)
    except Exception as error:
        log(ERROR, "Failed to receive message %s: %s", tree.object_id, error)
        return None
    message.metadata.__dict__["_message_id"] = tree.object_id  # which is not part of the object itself
    log(INFO, "Receiving: %s message", message.metadata.message_type)
    return message


def _reply(message: Message, worker: Worker | Elsewhere) -> Message:
    """The client's reply, or an error if there is none."""
    kind = KINDS.get(message.metadata.message_type)
    if kind is None:
        return _error(message, "it does not know this kind of message")
    asked: Content | None = None
    with contextlib.suppress(Exception):  # whatever a malicious server sends, the client continues
        asked = unpacked(message.content)
    try:
        return Message(packed(worker.ask(kind, str(message.metadata.run_id), asked)), reply_to=message)
    except Failed as why:
        say(f"A message of the server could not be answered: the program for it failed ({why}).")
        return _error(message, str(why))


def _error(message: Message, reason: str) -> Message:
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _send(reply: Message, send: Callable[..., Any], push: Callable[..., None]) -> None:
    """Sends a reply: its tree of objects, and those of them that the server does not have."""
    try:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        wanted, session = send(reply, get_object_tree(reply))
        objects = get_all_nested_objects(reply)
        push_objects(objects, partial(push, reply.metadata.run_id, session), object_ids_to_push=wanted)
        log(INFO, "Sent successfully")
    except Exception as error:
        log(ERROR, "Failed to send message %s: %s", reply.metadata.message_id, error)
