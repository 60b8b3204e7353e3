"""What a client does for each kind of message, and what its owner is told about it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pfedme.core.spec import build, field_types
from pfedme.data.schema import listed
from pfedme.data.table import OPTIONS, Table
from pfedme.deploy.answer import answer, explained, say
from pfedme.deploy.choosing import choose, sentences
from pfedme.deploy.client import SCORES, Client
from pfedme.deploy.ending import parse_choice, pinned_line
from pfedme.deploy.log import one_line
from pfedme.deploy.messages import STARTED_OVER, Content, Words
from pfedme.deploy.policy import Policy


def client_of(config: Mapping[str, Any], run: str) -> Client:
    """The client that a node's configuration describes, in one of Flower's runs."""
    fields = {name: config[key] for name in OPTIONS if (key := name.replace("_", "-")) in config}
    table = build(Table, {**fields, "path": config["data"], "owner": config["name"]}, "the client")
    limits = {name: config[key] for name in field_types(Policy) if (key := name.replace("_", "-")) in config}
    policy = build(Policy, limits, "the client's policy").checked()
    share = bool(config.get("share-metrics", False))
    how = parse_choice(str(config.get("personalize", "")))
    return Client(table, Path(str(config["state-dir"])), share, policy, run, how)


def bound(own: Client, asked: Content) -> Content:
    """`Client.join`, reported to the owner."""
    content = own.join(asked)
    if sha := content.words.get("bound"):
        names = listed(asked.words["agreement"]["names"], quote=False)
        say(f"Bound by the agreement of {names}; its SHA-256 is {sha}.")
        if line := pinned_line(own.pins.bound(sha), own.personalize):
            say(line)
    return content


def trained(own: Client, asked: Content) -> Content:
    """`Client.train`, reported to the owner with the outcome of its last part."""
    if line := news(asked.words.get("news")):
        say(line)
    content = own.train(asked)
    if STARTED_OVER in content.words:
        say("What this client kept of the run was lost; it has started over and tells the server so.")
    say(f"Round {asked.words['round'] + 1}: trained; the update leaves this machine.")
    return content


def finished(own: Client, asked: Content) -> Content:
    """`Client.finish`, reported to the owner with the quality of its models."""
    if line := news(asked.words.get("news")):
        say(line)
    content = own.finish(asked)
    if asked.words.get("last") is True:
        say(scores_line(json.loads((own.state / SCORES).read_text())))
        if not own.pins.supervised:  # otherwise `pfedme client` chooses, after the reply
            for line in sentences(choose(own) or {}):
                say(line)
            own.encoded.forget()
    return content


def news(told: Any) -> str:
    """The outcome of a client's last part, if it is of interest to its owner."""
    if not isinstance(told, dict) or (told.get("outcome") == "counted" and not told.get("clipped")):
        return ""
    where = f"Round {str(told.get('round'))[:10]}: this client's part"
    if told.get("outcome") == "counted":
        lengths = told.get("norm"), told.get("clipped")
        norm, clipped = (f"{x:.3g}" if isinstance(x, float) else one_line(x, 10) for x in lengths)
        return f"{where} counted, shortened from {norm} to {clipped}."
    return f"{where} did not count; the server says: {str(told.get('reason'))[:300]}."


def scores_line(entry: Words) -> str:
    """How good a client's models are on its own test rows.

    >>> scores_line({"round": 3, "global": {"accuracy": 0.9}, "personal": {"accuracy": 0.925}})
    'On its own test rows: shared model 90.0 % right, personal model 92.5 % right.'
    """
    names = {"global": "shared", "local": "local", "personal": "personal"}
    found = []
    for kind, name in names.items():
        score = entry.get(kind, {})
        if score.get("accuracy") is not None:
            found.append(f"{name} model {100 * score['accuracy']:.1f} % right")
        elif score.get("rmse") is not None:
            found.append(f"{name} model off by {score['rmse']:.4g} (RMSE), R² {score['r2']:.3f}")
    return f"On its own test rows: {', '.join(found)}." if found else "It has no test rows."


WORK: dict[str, Callable[[Client, Content], Content]] = {
    "agree": Client.agree,
    "hello": lambda own, _: Content({}, {}),
    "join": bound,
    "train": trained,
    "finish": finished,
    "refuse": Client.refused,
}
"""The work for each kind of message."""


def reply(config: Mapping[str, Any], run: str, kind: str, asked: Callable[[], Content]) -> Content:
    """The reply to a message. A client does not send the details of errors: an error may quote a row."""
    try:
        client = client_of(config, run)
        with ending_after(client.policy.max_seconds):
            return answer(client, kind, asked, WORK[kind])
    except Exception as error:
        return Content({"name": str(config.get("name", "")), **explained(error).words}, {})


@contextmanager
def ending_after(seconds: float) -> Iterator[None]:
    """Ends this process if the work takes longer, because a compiled program cannot be interrupted."""

    def end() -> None:
        say(f"Gave up: a message of the server took more than {seconds:g} seconds (--max-seconds).")
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
