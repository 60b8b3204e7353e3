"""The Flower app: `client_update` and `server_update` of the simulator behind Flower's messages."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from pfedme.core.spec import build, field_types
from pfedme.data.schema import listed
from pfedme.data.table import OPTIONS, Table
from pfedme.deploy.answer import answer, explained, say
from pfedme.deploy.channel import Enough, never
from pfedme.deploy.choosing import choose, sentences
from pfedme.deploy.client import SCORES, Client
from pfedme.deploy.config import plan_of
from pfedme.deploy.door import write_limit
from pfedme.deploy.ending import parse_choice, pinned_line
from pfedme.deploy.log import one_line
from pfedme.deploy.messages import GONE, STARTED_OVER, Content, Kind, Reply, Words
from pfedme.deploy.policy import LONGEST_TEXT, Policy
from pfedme.deploy.progress import Progress
from pfedme.deploy.record import DeploymentRecord, carry_out
from pfedme.deploy.server import Server
from pfedme.engine.cost import size_of
from pfedme.engine.devices import keep_compiled_programs

client = ClientApp()
server = ServerApp()

TYPES: dict[Kind, str] = {
    "agree": "query.agree", "join": "query.join", "train": "train", "finish": "evaluate",
    "refuse": "query.refuse",
}  # fmt: skip
"""Flower's names for the kinds of messages."""
POLL_S = 0.2
BESIDE_W = 2**20
"""Bytes that an upload may have in addition to the model."""
EXPIRED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
"""Flower's reply for a client whose deadline passed a moment before ours."""


def packed(content: Content) -> RecordDict:
    """A message's content as Flower's records."""
    arrays = ArrayRecord({name: Array(array) for name, array in content.arrays.items()})
    return RecordDict({"arrays": arrays, "config": ConfigRecord({"words": json.dumps(content.words)})})


def unpacked(records: RecordDict) -> Content:
    """The inverse of `packed`."""
    arrays = {name: np.asarray(array.numpy()) for name, array in records.array_records["arrays"].items()}
    return Content(json.loads(str(records.config_records["config"]["words"])), arrays)


def client_of(config: Mapping[str, Any], run: str) -> Client:
    """The client that a node's configuration describes, in one of Flower's runs."""
    fields = {name: config[key] for name in OPTIONS if (key := name.replace("_", "-")) in config}
    table = build(Table, {**fields, "path": config["data"], "owner": config["name"]}, "the client")
    limits = {name: config[key] for name in field_types(Policy) if (key := name.replace("_", "-")) in config}
    policy = build(Policy, limits, "the client's policy").checked()
    share = bool(config.get("share-metrics", False))
    how = parse_choice(str(config.get("personalize", "")))
    return Client(table, Path(str(config["state-dir"])), share, policy, run, how)


def answered(kind: str, work: Callable[[Client, Content], Content]) -> Callable[[Message, Context], Message]:
    """The handler of a message. A client does not send the details of errors: an error may quote a row."""

    def handle(message: Message, context: Context) -> Message:
        keep_compiled_programs(0.0)  # the process for each message would recompile even the smallest
        name = str(context.node_config.get("name", ""))
        try:
            client = client_of(context.node_config, str(context.run_id))
            with ending_after(client.policy.max_seconds):
                content = answer(client, kind, lambda: unpacked(message.content), work)
        except Exception as error:
            content = Content({"name": name, **explained(error).words}, {})
        return Message(content=packed(content), reply_to=message)

    return handle


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


client.query("agree")(answered("agree", Client.agree))
client.query("hello")(answered("hello", lambda own, _: Content({}, {})))
client.query("join")(answered("join", bound))
client.query("refuse")(answered("refuse", Client.refused))
client.train()(answered("train", trained))
client.evaluate()(answered("finish", finished))


class FlowerChannel:
    """The channel to the clients through Flower's grid.

    If clients have keys, `names` maps nodes to names, and a client cannot impersonate another. If they have
    none, each is asked for its name.
    """

    def __init__(self, grid: Grid, names: Mapping[int, str] | None) -> None:
        self.grid, self.trusted = grid, names
        self.known: dict[int, str] = dict(names or {})

    def present(self) -> list[str]:
        """The names of the clients that are connected."""
        nodes = list(self.grid.get_node_ids())
        strangers = [node for node in nodes if node not in self.known]
        if strangers and self.trusted is None:
            for node, reply in self._exchange(
                "query.hello", dict.fromkeys(strangers, Content({}, {})), 30
            ).items():
                if reply.content is not None:
                    name = str(reply.content.words.get("name", ""))
                    # The others would not accept an agreement with any other name in it.
                    self.known[node] = name if len(name) <= LONGEST_TEXT and name.isprintable() else ""
        return sorted({name for node in nodes if (name := self.known.get(node))})

    def ask(
        self, kind: Kind, contents: Mapping[str, Content], deadline: float, enough: Enough = never
    ) -> dict[str, Reply]:
        """See `Channel.ask`."""
        online = set(self.grid.get_node_ids())
        nodes = {name: node for node, name in self.known.items() if node in online}
        asked = {nodes[name]: content for name, content in contents.items() if name in nodes}

        def done(waiting: set[int], seconds: float) -> bool:
            return enough({self.known[node] for node in waiting}, seconds)

        replies = self._exchange(TYPES[kind], asked, deadline, done)
        return {self.known[node]: self._checked(node, reply) for node, reply in replies.items()}

    def _checked(self, node: int, reply: Reply) -> Reply:
        """The reply, after a check that it does not come under another name."""
        claimed = reply.content.words.get("name") if reply.content else None
        if self.trusted is not None and claimed not in (None, self.known[node]):
            own, other = self.known[node], one_line(claimed, 60)
            return Reply(None, f"it calls itself '{other}', but its key is that of '{own}'")
        return reply

    def _exchange(
        self,
        kind: str,
        contents: Mapping[int, Content],
        deadline: float,
        done: Callable[[set[int], float], bool] = never,
    ) -> dict[int, Reply]:
        messages = [
            Message(content=packed(content), message_type=kind, dst_node_id=node, ttl=deadline)
            for node, content in contents.items()
        ]
        # Matched by message, because Flower's own reply for a client that has gone has no node.
        pushed = self.grid.push_messages(messages)
        waiting = {id: node for id, node in zip(pushed, contents, strict=True) if id}
        replies: dict[int, Reply] = {}
        began, seconds = time.monotonic(), 0.0
        while waiting and seconds < deadline and not done(set(waiting.values()), seconds):
            for message in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(message.metadata.reply_to_message_id)
                if not (message.has_error() and message.error.code in EXPIRED):
                    replies[node] = read_reply(message)
            if waiting:
                time.sleep(POLL_S)
            seconds = time.monotonic() - began
        return replies


def read_reply(message: Message) -> Reply:
    """What a client has answered; never raises an exception, whatever it sent."""
    if message.has_error() and message.error.code == ErrorCode.NODE_UNAVAILABLE:
        return Reply(None, GONE)
    if message.has_error():
        why = message.error.reason or message.error.code
        return Reply(None, one_line(f"its program failed ({why})", 300))
    try:
        content = unpacked(message.content)
        if not isinstance(content.words, dict):
            raise TypeError
    except Exception:
        # Whatever a malicious client sends, the server continues.
        return Reply(None, "its reply cannot be read")
    if "error" in content.words:
        return Reply(None, one_line(content.words["error"], 300))
    return Reply(content)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Carries out the run that the configuration describes."""
    config = context.run_config
    plan = plan_of(config)
    out = Path(str(config["out"]) or f"runs/flower-{context.run_id}").absolute()
    out.mkdir(parents=True, exist_ok=True)
    names = None
    if file := config["names"]:
        names = {int(node): name for node, name in json.loads(Path(str(file)).read_text()).items()}
    record = DeploymentRecord(plan, out, str(config["command"]) or "flwr run")

    def bound_uploads(progress: Progress) -> None:
        if config["limit"]:
            message = server.exchange(progress.agreement).message
            write_limit(Path(str(config["limit"])), size_of(message) + BESIDE_W)

    server = Server(plan, FlowerChannel(grid, names), record.tell)
    carry_out(server, record, resume=bool(config["resume"]), agreed=bound_uploads)
