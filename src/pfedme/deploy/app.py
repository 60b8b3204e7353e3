"""The Flower app: `client_update` and `server_update` of the simulator behind Flower's messages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from pfedme.deploy import work
from pfedme.deploy.channel import Enough, never
from pfedme.deploy.config import plan_of, region_of
from pfedme.deploy.door import write_limit
from pfedme.deploy.envelope import TYPES, packed, unpacked
from pfedme.deploy.keys import ClientKeys
from pfedme.deploy.log import one_line
from pfedme.deploy.messages import GONE, Content, Kind, Reply
from pfedme.deploy.policy import LONGEST_TEXT
from pfedme.deploy.progress import Progress
from pfedme.deploy.record import DeploymentRecord, carry_out
from pfedme.deploy.region import Region, take_part
from pfedme.deploy.server import Server
from pfedme.deploy.supervise_client import Link
from pfedme.engine.cost import size_of
from pfedme.engine.devices import keep_compiled_programs
from pfedme.errors import InputError, RunError

client = ClientApp()
server = ServerApp()

POLL_S = 0.2
BESIDE_W = 2**20
"""Bytes that an upload may have in addition to the model."""
DAY_S, MOST_FROM_ABOVE = 86400.0, 2**28
"""Seconds for which a region waits for an upper server that does not answer, and the most bytes that it
accepts in one of its messages: both as much as clients do."""
EXPIRED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
"""Flower's reply for a client whose deadline passed a moment before ours."""


def answered(kind: str) -> Callable[[Message, Context], Message]:
    """The handler of a message."""

    def handle(message: Message, context: Context) -> Message:
        keep_compiled_programs(0.0)  # the process for each message would recompile even the smallest
        content = work.reply(
            context.node_config, str(context.run_id), kind, lambda: unpacked(message.content)
        )
        return Message(content=packed(content), reply_to=message)

    return handle


for kind in ("agree", "hello", "join", "refuse"):
    client.query(kind)(answered(kind))
client.train()(answered("train"))
client.evaluate()(answered("finish"))


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
    out = Path(str(config["out"]) or f"runs/flower-{context.run_id}").absolute()
    out.mkdir(parents=True, exist_ok=True)
    names = None
    if file := config["names"]:
        names = {int(node): name for node, name in json.loads(Path(str(file)).read_text()).items()}
    channel, command = FlowerChannel(grid, names), str(config["command"]) or "flwr run"

    def bound_uploads(server: Server, progress: Progress) -> None:
        if config["limit"]:
            message = server.exchange(progress.agreement).message
            write_limit(Path(str(config["limit"])), size_of(message) + BESIDE_W)

    if config["upper"]:
        upper = json.loads(str(config["upper"]))
        keys = ClientKeys(Path(upper["ca"]), Path(upper["key"]), upper["name"]) if upper["key"] else None
        link = Link(upper["server"], upper["name"], out, keys, DAY_S, MOST_FROM_ABOVE)
        region = Region(link.name, channel, out, region_of(config), command=command, agreed=bound_uploads)
        try:
            take_part(region, link)
        except (RunError, InputError) as error:
            region.stopped(str(error))
            raise
        return
    plan = plan_of(config)
    record = DeploymentRecord(plan, out, command)
    server = Server(plan, channel, record.tell)
    carry_out(server, record, resume=bool(config["resume"]), agreed=partial(bound_uploads, server))
