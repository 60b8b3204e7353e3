"""The server's door, attacked: a real server on loopback, and clients that do not keep to the rules."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import re
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="pfedme[flower] is not installed")
if sys.platform != "linux":
    pytest.skip("processes are found by /proc, which Linux has", allow_module_level=True)

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import SUPERLINK_NODE_ID, TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.recorddict_pb2 import RecordDict
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from live import Live, federation, soon

from pfedme.algorithms import PFedMe
from pfedme.deploy import connections, door, intake
from pfedme.deploy.door import AT_ONCE
from pfedme.deploy.events import TURNED_OUT
from pfedme.deploy.intake import Intake, TooMuch
from pfedme.deploy.log import MIB

NAMES = ("north", "south")
INTERVAL = 1800.0
"""Seconds for which a client is there without another word."""


class Caller:
    """A client that says what it likes, with a key."""

    def __init__(self, live: Live, folder: Path) -> None:
        self.live = live
        key = load_ssh_private_key((folder / "key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self.key, self.public = key, public_key_to_bytes(key.public_key())
        self.node = Node(node_id=0)
        self.message, self.tree = Message(), ObjectTree()

    def client(self, which: str = "") -> FleetHttpClient:
        """Flower's own client with this key."""
        made = FleetHttpClient.from_server_address(
            f"{self.live.host}:{self.live.port}", False, (self.live.folder / "keys/ca.crt").read_bytes(),
            [NodeAuthHttpInterceptor(self.key, self.key.public_key())],
        )  # fmt: skip
        if which:
            made._client.headers[intake.WHICH] = which
        return made

    def ask(self, method: str, request: Any, which: str = "") -> Any:
        """The server's answer, or the status by which it refuses."""
        with self.client(which) as client:
            try:
                return getattr(client, method)(request)
            except httpx.HTTPStatusError as error:
                return error.response.status_code

    def activate(self, which: str = "") -> None:
        """Joins."""
        request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=INTERVAL)
        self.node = Node(node_id=self.ask("ActivateNode", request, which).node_id)

    def pull(self) -> bool:
        """Whether there was a message; it is kept."""
        response = self.ask("PullMessages", PullMessagesRequest(node=self.node))
        if response.messages_list:
            self.message, self.tree = response.messages_list[0], response.message_object_trees[0]
        return bool(response.messages_list)

    def reply(self, tree: ObjectTree, **other: Any) -> PushMessagesRequest:
        """An answer to the message, with something else in its envelope."""
        asked = self.message.metadata
        envelope = {
            "run_id": asked.run_id, "message_id": tree.object_id, "src_node_id": self.node.node_id,
            "dst_node_id": SUPERLINK_NODE_ID, "reply_to_message_id": asked.message_id,
            "message_type": asked.message_type, "created_at": now().timestamp(), "ttl": 60.0, **other,
        }  # fmt: skip
        message = Message(metadata=Metadata(**envelope), content=RecordDict())
        return PushMessagesRequest(node=self.node, messages_list=[message], message_object_trees=[tree])

    def headers(self) -> dict[str, str]:
        """What the head of a request of this client has."""
        stamp = now().isoformat()
        return {
            FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(self.public).decode(),
            TIMESTAMP_HEADER: stamp,
            FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(sign_message(self.key, stamp.encode())).decode(),
        }


def name(content: object) -> str:
    """What Flower would call an object."""
    return hashlib.sha256(str(content).encode()).hexdigest()


def tree_of(root: object, *children: ObjectTree) -> ObjectTree:
    """A tree of objects, announced."""
    return ObjectTree(object_id=name(root), children=children)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that waits for the answers of its two clients."""
    with federation(tmp_path_factory.mktemp("door"), NAMES) as live:
        live.server(PFedMe(), "--min-clients", "2", "--rounds", "2", "--deadline", "900")
        live.logged("Listening on", 60)
        yield live


@pytest.fixture(scope="module")
def callers(live: Live) -> dict[str, Caller]:
    """Both clients, each of which was asked something; and somebody whose key the server has not."""
    live.stranger()
    made = {who: Caller(live, live.own(who)) for who in NAMES}
    for one in made.values():
        one.activate()
    for one in made.values():
        soon(one.pull, 60, "a message of the server's")
    return {**made, "stranger": Caller(live, live.folder / "others/clients/stranger")}


@pytest.fixture
def north(callers: dict[str, Caller]) -> Caller:
    """A client."""
    return callers["north"]


@pytest.fixture
def south(callers: dict[str, Caller]) -> Caller:
    """Another."""
    return callers["south"]


def connected(live: Live) -> ssl.SSLSocket:
    """A connection to the server."""
    context = ssl.create_default_context(cafile=str(live.folder / "keys/ca.crt"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # which sends nothing that one did not ask for
    raw = socket.create_connection((live.host, live.port), timeout=30)
    return context.wrap_socket(raw, server_hostname=live.host)


def head(path: str, headers: dict[str, str], length: int | None) -> bytes:
    """The head of a request, whose body has so many bytes or does not tell."""
    size = {"Transfer-Encoding": "chunked"} if length is None else {"Content-Length": str(length)}
    fields = {"Host": "x", "Content-Type": PROTOBUF_MEDIA_TYPE, **size, **headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{field}: {value}" for field, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode()


def upload(live: Live, headers: dict[str, str], size: int, *, chunked: bool = False) -> int:
    """Sends so many bytes, or as many as the server takes; returns its status, 0 if it just ended."""
    piece = bytes(MIB)
    with connected(live) as link:
        with contextlib.suppress(OSError):
            link.sendall(head("/v1/fleet/push-object", headers, None if chunked else size))
            for _ in range(size // MIB):
                if select.select([link], [], [], 0)[0]:
                    break
                link.sendall(f"{MIB:x}\r\n".encode() + piece + b"\r\n" if chunked else piece)
        with contextlib.suppress(OSError):
            return int(link.recv(100).split()[1])
    return 0


def superlink(live: Live) -> Path:
    """The folder in /proc of the server's SuperLink."""
    for pid in live.processes("server"):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"superlink" in words and b"pfedme.deploy.flower" in words and b"-S" not in words:
            return Path(f"/proc/{pid}")
    raise AssertionError("there is no SuperLink")


@contextlib.contextmanager
def little_memory(live: Live) -> Iterator[None]:
    """An error if the SuperLink meanwhile needs 60 MB more than before, even for a moment."""
    process = superlink(live)

    def memory(field: str) -> int:
        found = re.search(rf"{field}:\s+(\d+) kB", (process / "status").read_text())
        assert found
        return int(found[1]) * 1024

    (process / "clear_refs").write_text("5")  # the highest so far is what there is now
    before = memory("VmRSS")
    yield
    more = (memory("VmHWM") - before) / 1e6
    print(f"the SuperLink, of {before / 1e6:.0f} MB, needed {more:.0f} MB more")
    assert more < 60


def test_of_strangers_nothing_is_read(live: Live, callers: dict[str, Caller]):
    whose = [
        {},
        {},
        callers["stranger"].headers(),
        {**callers["north"].headers(), TIMESTAMP_HEADER: "2020-01-01"},
    ]
    with little_memory(live), ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda headers: upload(live, headers, 400 * MIB), whose)) == [401] * 4
    live.logged("Refused a client at 127.0.0.1: the server does not know its key", 10)
    live.logged("Refused a client at 127.0.0.1: its signature is not valid now", 10)


@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "without its length"])
def test_a_body_that_is_too_long_is_not_kept(live: Live, north: Caller, chunked: bool):
    with little_memory(live):
        assert upload(live, north.headers(), 400 * MIB, chunked=chunked) in (413, 0)
        assert upload(live, north.headers(), 8 * MIB, chunked=chunked) == 413
    live.logged("Refused north: it sends more than 4 MiB.", 10)


def test_a_request_that_carries_no_model_is_short(north: Caller):
    request = PullMessagesRequest(node=north.node, message_ids=["x" * 100_000])
    assert north.ask("PullMessages", request) == 413


@pytest.mark.slow
def test_what_is_half_sent_is_closed(live: Live, north: Caller):
    signed = head("/v1/fleet/push-object", north.headers(), MIB)
    waiting: list[socket.socket] = [socket.create_connection((live.host, live.port)) for _ in range(2)]
    waiting[1].sendall(b"\x16\x03\x01")
    for start in (b"", b"POST /v1/fleet/push-object HTTP/1.1\r\nHost:", signed, signed + bytes(1000)):
        link = connected(live)
        link.sendall(start)
        waiting.append(link)
    with contextlib.ExitStack() as stack:
        for link in waiting:
            stack.enter_context(link)
            link.settimeout(30)
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                while link.recv(1000):
                    pass


def test_a_client_sends_in_its_own_name_and_to_the_server_alone(live: Live, north: Caller, south: Caller):
    tree = tree_of("forged")
    forged = [
        {"src_node_id": SUPERLINK_NODE_ID, "dst_node_id": south.node.node_id, "reply_to_message_id": ""},
        {"src_node_id": south.node.node_id, "reply_to_message_id": south.message.metadata.message_id},
        {"dst_node_id": south.node.node_id},
        {"reply_to_message_id": ""},
        {"reply_to_message_id": south.message.metadata.message_id},
        {"run_id": 1},
        {"message_id": name("other")},
    ]
    for other in forged:
        assert north.ask("PushMessages", north.reply(tree, **other)) == 403, other
    assert not south.pull()
    live.logged("Refused north: it sends a message in another client's name, or to another client.", 10)


def test_a_client_asks_in_its_own_name(north: Caller, south: Caller):
    other, run = south.node, south.message.metadata.run_id
    whole, confirm = south.message.metadata.message_id, ConfirmMessageReceivedRequest
    for method, request in (
        ("PullMessages", PullMessagesRequest(node=other)),
        ("PullObject", PullObjectRequest(node=other, run_id=run, object_id=whole)),
        ("ConfirmMessageReceived", confirm(node=other, run_id=run, message_object_id=whole)),
        ("SendNodeHeartbeat", SendNodeHeartbeatRequest(node=other, heartbeat_interval=INTERVAL)),
        ("DeactivateNode", DeactivateNodeRequest(node_id=other.node_id)),
        ("ActivateNode", ActivateNodeRequest(public_key=south.public, heartbeat_interval=INTERVAL)),
    ):  # fmt: skip
        assert north.ask(method, request) == 401, method
    for method, request in (
        ("PullObject", PullObjectRequest(node=north.node, run_id=run, object_id=whole)),
        ("ConfirmMessageReceived", confirm(node=north.node, run_id=run, message_object_id=whole)),
        ("PushObject", PushObjectRequest(node=north.node, run_id=run, object_id=name("x"))),
    ):  # fmt: skip
        assert north.ask(method, request) == 403, method
    assert south.ask("PullObject", PullObjectRequest(node=other, run_id=run, object_id=whole)).object_found


def test_a_client_has_few_requests_under_way(live: Live, north: Caller):
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(connected(live)) for _ in range(AT_ONCE + 4)]
        for link in links:
            link.sendall(head("/v1/fleet/push-object", north.headers(), 1000) + b"x")
            link.settimeout(5)
        soon(lambda: len(select.select(links, [], [], 0)[0]) >= 4, 5, "refusals")
        refused = select.select(links, [], [], 0)[0]
        assert [link.recv(100).split()[1] for link in refused] == [b"429"] * 4
    live.logged("Refused north: it sends too much at once.", 10)
    soon(lambda: north.ask("PullMessages", PullMessagesRequest(node=north.node)) != 429, 10, "an end of it")


def test_there_are_few_connections_from_one_place(live: Live):
    most = connections.PER_KEY * len(NAMES) + connections.BESIDES
    with contextlib.ExitStack() as stack:
        links = [
            stack.enter_context(socket.create_connection((live.host, live.port))) for _ in range(most + 40)
        ]
        soon(lambda: len(select.select(links, [], [], 0)[0]) >= 40, 5, "refusals")
        assert len(select.select(links, [], [], 0)[0]) < 80
    live.logged("Refused a connection from 127.0.0.1: too many are open.", 10)

    def answered() -> bool:
        with contextlib.suppress(ConnectionError):
            return upload(live, {}, 0) == 401
        return False

    soon(answered, 15, "an answer")


def test_what_a_client_announces_is_bounded(live: Live, north: Caller):
    many = tree_of("root", *(tree_of(i) for i in range(1000)))
    assert north.ask("PushMessages", north.reply(many)) == 403
    live.logged("Refused north: it announces more than 260 objects", 10)
    more = tree_of("root", *(tree_of(i) for i in range(10_000)))
    assert north.ask("PushMessages", north.reply(more)) == 413
    # As Flower keeps it, each level has the one below twice: 2 ** 40 objects.
    bomb = tree_of(0)
    for level in range(1, 41):
        bomb = tree_of(level, bomb, tree_of(level - 1))
    assert north.ask("PushMessages", north.reply(bomb)) == 403


def test_what_a_client_has_in_store_is_bounded(live: Live, north: Caller):
    parts = [tree_of(f"part {i}") for i in range(3)]
    tree = tree_of("answer", *parts)
    assert set(north.ask("PushMessages", north.reply(tree)).objects_to_push) == {
        one.object_id for one in (tree, *parts)
    }
    assert north.ask("PushMessages", north.reply(tree)).session_id  # as if the first had been lost
    assert north.ask("PushMessages", north.reply(tree_of("another"))) == 403
    changed = tree_of("answer", *parts[:2])
    assert north.ask("PushMessages", north.reply(changed)) == 403

    def push(one: ObjectTree, count: int) -> Any:
        run = north.message.metadata.run_id
        return north.ask(
            "PushObject",
            PushObjectRequest(
                node=north.node, run_id=run, object_id=one.object_id, object_content=bytes(count)
            ),
        )

    assert push(parts[0], 2 * MIB) == push(parts[1], MIB) == push(parts[0], 2 * MIB)
    assert push(parts[2], 2 * MIB) == 403
    assert push(tree_of("not announced"), 10) == 403


def test_the_limit_is_what_the_servers_app_says(tmp_path: Path):
    orders = door.Orders(tmp_path / "gate")
    assert (orders.limit, orders.open, orders.names) == (door.FIRST_LIMIT, False, {})
    door.write_limit(tmp_path / "limit", 100 * MIB)
    assert orders.limit == 100 * MIB


def test_two_clients_with_one_key_are_told_apart(live: Live, south: Caller):
    alive = SendNodeHeartbeatRequest(node=south.node, heartbeat_interval=INTERVAL)
    for one, other in (("first", "second"), ("second", "first"), ("first", "second")):
        south.activate(one)
        assert south.ask("SendNodeHeartbeat", alive, one).success
        assert south.ask("SendNodeHeartbeat", alive, other) == intake.REPLACED
        assert south.ask("DeactivateNode", DeactivateNodeRequest(node_id=south.node.node_id), other) == 409
    live.logged("Two clients are using the key of south at once", 10)


class Flood(http.server.BaseHTTPRequestHandler):
    """A server that sends more than it was asked for."""

    protocol_version = "HTTP/1.1"
    sent = 0

    def do_GET(self) -> None:
        """Sends 256 MiB, if they are taken."""
        chunked = "chunked" in self.path
        self.send_response(200)
        self.send_header(
            "Transfer-Encoding" if chunked else "Content-Length", "chunked" if chunked else str(256 * MIB)
        )
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(256):
                self.wfile.write(b"100000\r\n" + bytes(MIB) + b"\r\n" if chunked else bytes(MIB))
                Flood.sent += MIB
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def flood() -> Iterator[str]:
    """The address of such a server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Flood) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("path", ["/v1/fleet/pull-object", "/chunked/pull-object", "/chunked/get-fab"])
def test_a_client_takes_no_more_than_it_should(flood: str, path: str):
    Flood.sent = 0
    taken = Intake(2 * MIB)
    assert taken.begin(tree_of("message"))
    with (
        httpx.Client(event_hooks={"response": [taken.meter]}, trust_env=False) as client,
        pytest.raises(TooMuch),
    ):
        client.get(flood + path)
    assert Flood.sent < 64 * MIB


def test_a_client_takes_no_message_of_too_many_parts(capsys: pytest.CaptureFixture[str]):
    assert not Intake(2 * MIB).begin(tree_of("root", *(tree_of(i) for i in range(1000))))
    assert "too many parts" in capsys.readouterr().out


@pytest.mark.slow
def test_a_client_is_told_that_another_has_come_with_its_key(tmp_path: Path):
    with federation(tmp_path / "live", ["east"]) as live:
        live.server(PFedMe(), "--min-clients", "2", "--rounds", "2")
        live.client("east")
        soon(lambda: "Connected to" in live.said("east"), 60, "a connection")
        Caller(live, live.own("east")).activate("another")
        soon(lambda: TURNED_OUT in live.said("east"), 30, "a word")


@pytest.mark.slow
def test_a_client_that_is_sent_too_much_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PFEDME_MOST_BYTES", "200")
    with federation(tmp_path / "live", ["east"]) as live:
        live.server(
            PFedMe(), "--min-clients", "1", "--rounds", "2", "--deadline", "10", "--max-attempts", "1"
        )
        live.client("east")
        soon(lambda: "nothing of it was used" in live.said("east"), 60, "a refusal")
        assert "The server sent more than 0.1953 KiB; nothing of it was used." in live.said("east")
        time.sleep(3)
        assert live.children["east"].poll() is None
        assert "has ended" not in live.said("east")
