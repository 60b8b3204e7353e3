"""Processes: what is started is gone in the end, however its starter ends; and what commands refuse."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest

pytest.importorskip("flwr")

from live import federation
from live import table as live_table

from pfedme.algorithms import PFedMe
from pfedme.cli import main
from pfedme.cli import server as cli_server
from pfedme.deploy import connections, create_keys, door, flower, keys, processes, supervise_client
from pfedme.deploy.events import Event, emit
from pfedme.deploy.keeper import LOCK, descendants
from pfedme.deploy.plan import Plan
from pfedme.errors import InputError

# A command with a child, one in a session of its own, a deaf one and an orphan; each leaves its number.
FAMILY = """
import os, subprocess, sys, time
here = sys.argv[1]
sleep = "import time; time.sleep(600)"
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(99)"
orphan = f"import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {sleep!r}]); print(p.pid)"
children = [
    subprocess.Popen([sys.executable, "-c", sleep]).pid,
    subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True).pid,
]
stubborn = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
stubborn.stdout.readline()
lost = subprocess.Popen([sys.executable, "-c", orphan], stdout=subprocess.PIPE, start_new_session=True)
for pid in [*children, stubborn.pid, int(lost.stdout.readline()), os.getpid()]:
    open(f"{here}/{pid}.pid", "w").close()
open(f"{here}/ready", "w").close()
time.sleep(600)
"""

HOLDER = """
import sys, time
from pathlib import Path
from pfedme.deploy.processes import SupervisedProcess
here = Path(sys.argv[1])
with SupervisedProcess([sys.executable, "-c", sys.argv[2], str(here)], here / "log", here):
    {}
"""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def soon(true: object, within: float = 60.0) -> bool:
    """Whether something becomes true."""
    until = time.monotonic() + within
    assert callable(true)
    while time.monotonic() < until:
        if true():
            return True
        time.sleep(0.05)
    return False


def held(folder: Path, body: str, *, deaf: bool) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A process that keeps a family of processes, and their numbers."""
    family = FAMILY if deaf else FAMILY.replace("SIG_IGN", "SIG_DFL")
    words = [sys.executable, "-c", HOLDER.format(body), str(folder), family]
    holder = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    assert soon((folder / "ready").exists)
    return holder, [int(path.stem) for path in folder.glob("*.pid")]


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found on Linux")
@pytest.mark.parametrize("how", ["kill -9", "SIGTERM", "Ctrl-C", "exception"])
def test_nothing_is_left_however_the_holder_ends(tmp_path: Path, how: str):
    body = "time.sleep(1)\n    raise OSError" if how == "exception" else "time.sleep(600)"
    holder, family = held(tmp_path, body, deaf=how == "kill -9")
    assert len(family) == 5
    assert how == "exception" or all(map(alive, family))
    number = {"kill -9": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}.get(how)
    if number:
        holder.send_signal(number)
    holder.wait()
    assert soon(lambda: not any(map(alive, family)))


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells of a parent's death on Linux")
def test_the_command_does_not_outlive_its_keeper(tmp_path: Path):
    words = [
        sys.executable,
        "-c",
        f"open({str(tmp_path / 'ready')!r}, 'w').close(); import time; time.sleep(600)",
    ]
    with processes.SupervisedProcess(words, tmp_path / "log", tmp_path) as kept:
        assert soon((tmp_path / "ready").exists)
        (command,) = descendants(kept.process.pid)
        kept.process.kill()
        assert soon(lambda: not alive(command))


def test_a_commands_status_and_words_are_known(tmp_path: Path):
    words = [sys.executable, "-c", "print('first'); print('half', end=''); raise SystemExit(7)"]
    with processes.SupervisedProcess(words, tmp_path / "log", tmp_path) as kept:
        assert soon(lambda: kept.status is not None)
        assert kept.status == 7
        assert kept.news() == ["first"]
        assert kept.news() == []
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_what_a_command_tells_is_known_apart_from_its_words(tmp_path: Path):
    code = """
from pfedme.deploy.events import Event, emit
print("connected", flush=True)
emit(Event("round done", 3, "2 of 3\\nare here"))
"""
    emit(Event("idle"))
    with processes.SupervisedProcess([sys.executable, "-c", code], tmp_path / "log", tmp_path) as kept:
        assert soon(lambda: kept.status is not None)
        assert kept.events() == [Event("round done", 3, "2 of 3\nare here")]
        assert kept.events() == []
        assert kept.news() == ["connected"]
    with processes.SupervisedProcess([sys.executable, "-c", "pass"], tmp_path / "log", tmp_path) as kept:
        assert kept.events() == []


def test_it_is_known_which_flower_has_the_parts_that_are_changed():
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    major, minor = map(int, flower.HOLDS_FOR.split("."))
    assert project["optional-dependencies"]["flower"] == [f"flwr>={major}.{minor},<{major}.{minor + 1}"]
    assert importlib.metadata.version("flwr").startswith(f"{flower.HOLDS_FOR}.")


def test_a_flower_without_the_parts_that_are_changed_is_not_started(capsys: pytest.CaptureFixture[str]):
    theirs = ModuleType("flwr.theirs")
    theirs.__dict__["known"] = 1
    flower.put(theirs, known=2)
    with pytest.raises(SystemExit):
        flower.put(theirs, known=3, other=3)
    assert theirs.__dict__["known"] == 2
    assert "This version of Flower has no flwr.theirs.other; install a 1.41." in capsys.readouterr().out


@pytest.mark.parametrize(("trusted", "tls"), [("keys", True), ("others", True), ("keys", False)])
def test_a_server_that_is_not_the_right_one_is_told_from_one_that_does_not_answer(
    tmp_path: Path, trusted: str, tls: bool
):
    for name in ("keys", "others"):
        create_keys.make(tmp_path / name, ["localhost"], ["north"])
    own = keys.server_keys(tmp_path / "keys")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    verify = ssl.create_default_context(cafile=str(tmp_path / trusted / "ca.crt"))

    def answer() -> None:
        taken, _ = listening.accept()
        with contextlib.suppress(OSError), taken:
            if tls:
                context.wrap_socket(taken, server_side=True).close()
            else:
                taken.recv(1000)
                taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening, httpx.Client(verify=verify) as client:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(httpx.TransportError) as found:
            client.get(f"https://localhost:{listening.getsockname()[1]}")
        thread.join()
    assert flower.lasting(found.value) == (None if (trusted, tls) == ("keys", True) else "wrong server")


@pytest.mark.parametrize(
    ("path", "reason"), [(door.ACTIVATE, "refused"), (door.REGISTER, "refused"), ("/", None)]
)
def test_a_server_that_does_not_know_the_key_is_told_from_one_that_fails(path: str, reason: str | None):
    status, body = door.turned_away(path)
    response = httpx.Response(status, content=body)
    error = httpx.HTTPStatusError("", request=httpx.Request("POST", "https://localhost"), response=response)
    assert flower.lasting(error) == reason


def test_flowers_own_home_is_private_and_gone_in_the_end():
    with processes.private_home() as home:
        assert home.stat().st_mode & 0o077 == 0
        assert processes.environment(home)["FLWR_HOME"] == str(home)
    assert not home.exists()


AT_HOME = """
import sys, time
from pathlib import Path
from pfedme.deploy.processes import SupervisedProcess, private_home
here = Path(sys.argv[1])
busy = "import sys, tempfile, time; tempfile.mkdtemp(); open(sys.argv[1], 'w').close(); time.sleep(600)"
words = [sys.executable, "-c", busy, str(here / "busy")]
with private_home() as home, SupervisedProcess(words, here / "log", home) as kept:
    while not (here / "busy").exists():
        time.sleep(0.05)
    (here / "said").write_text(f"{home} {kept.process.pid}")
    (here / "said").rename(here / "ready")
    time.sleep(600)
"""


@contextlib.contextmanager
def at_home(here: Path, temporary: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path, int]]:
    """A process with a home folder, that folder, and its keeper."""
    here.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", AT_HOME, str(here)], env={**os.environ, "TMPDIR": str(temporary)}
    )
    try:
        assert soon((here / "ready").exists)
        home, keeper = (here / "ready").read_text().split()
        yield holder, Path(home), int(keeper)
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")
def test_a_killed_process_leaves_no_home(tmp_path: Path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with at_home(tmp_path / "a", temporary) as (holder, home, keeper):
        assert home.parent == temporary
        assert len(os.listdir(home)) == 2  # the lock, and what the command has put there
        holder.kill()
        assert soon(lambda: not home.exists())
        assert soon(lambda: not alive(keeper))
    assert os.listdir(temporary) == []


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")
def test_a_new_start_removes_what_killed_processes_left_and_nothing_else(tmp_path: Path):
    temporary, elsewhere = tmp_path / "tmp", tmp_path / "elsewhere"
    for folder in (temporary / "pfedme-notes", elsewhere):
        folder.mkdir(parents=True)
        (folder / "precious").touch()
    (elsewhere / LOCK).touch()
    (temporary / "pfedme-link").symlink_to(elsewhere)
    kept = {"pfedme-notes", "pfedme-link"}
    with (
        at_home(tmp_path / "a", temporary) as (holder, left, keeper),
        at_home(tmp_path / "b", temporary) as (_, used, _),
    ):
        os.kill(keeper, signal.SIGKILL)
        holder.kill()
        holder.wait()
        (left / "link").symlink_to(elsewhere)
        (left / "folder").symlink_to(elsewhere, target_is_directory=True)
        assert soon(lambda: not alive(keeper))
        assert left.exists()
        with at_home(tmp_path / "c", temporary) as (_, new, _):
            assert {path.name for path in temporary.iterdir()} == {used.name, new.name, *kept}
    assert sorted(os.listdir(elsewhere)) == [LOCK, "precious"]
    assert os.listdir(temporary / "pfedme-notes") == ["precious"]
    assert soon(lambda: set(os.listdir(temporary)) == kept)


def test_other_users_folders_are_let_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "pfedme-theirs").mkdir()
    (tmp_path / "pfedme-theirs" / LOCK).touch()
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    processes.remove_leftovers()
    assert os.listdir(tmp_path) == ["pfedme-theirs"]
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    processes.remove_leftovers()
    assert os.listdir(tmp_path) == []


def test_many_starts_at_once_do_not_take_each_others_homes(tmp_path: Path):
    start = """
import sys
from pfedme.deploy.processes import private_home
for _ in range(50):
    with private_home() as home:
        (home / "folder").mkdir()
        (home / "folder" / "file").touch()
        (home / "folder" / "file").unlink()
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", start], env=env) for _ in range(4)]
    assert [one.wait() for one in started] == [0] * 4
    assert os.listdir(tmp_path) == []


def test_a_taken_port_is_refused():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        with pytest.raises(InputError, match=f"127.0.0.1:{port}: Address already in use"):
            processes.refuse_taken("127.0.0.1", port)
    processes.refuse_taken("127.0.0.1", processes.free_port())


@pytest.mark.parametrize(
    "text", ["example.org", ":9092", "x:y", "x:0", "x:70000", "https://x:9092", "::1:9092"]
)
def test_what_is_no_address_is_refused(text: str):
    with pytest.raises(InputError, match="--server"):
        processes.parse_address(text, "--server")


def test_what_went_wrong_with_tls_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    create_keys.make(tmp_path / "keys", ["localhost"], ["north"])
    create_keys.make(tmp_path / "others", ["localhost"], ["north"])
    server = keys.server_keys(tmp_path / "keys")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = connections.Handshake
    context.load_cert_chain(server.certificate, server.key)

    def turned_away(come: ssl.MemoryBIO, go: ssl.MemoryBIO) -> str:
        with pytest.raises(ssl.SSLError):
            context.wrap_bio(come, go, server_side=True).do_handshake()
        return capsys.readouterr().out

    plain = ssl.MemoryBIO()
    plain.write(b"GET /health HTTP/1.1\r\n\r\n")
    assert "without TLS" in turned_away(plain, ssl.MemoryBIO())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.create_default_context(cafile=str(tmp_path / "others/ca.crt"))
    client = trusting.wrap_bio(to_client, to_server, server_hostname="localhost")
    at_server = context.wrap_bio(to_server, to_client, server_side=True)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    with pytest.raises(ssl.SSLWantReadError):
        at_server.do_handshake()
    with pytest.raises(ssl.SSLCertVerificationError):
        client.do_handshake()
    with pytest.raises(ssl.SSLError):
        at_server.do_handshake()
    assert "does not trust this server's certificate" in capsys.readouterr().out


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a table and keys."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.csv").write_text("a,b,outcome\n" + "".join(f"{i},{i % 3},{i % 2}\n" for i in range(20)))
    create_keys.make(tmp_path / "keys", ["localhost"], ["north"])
    return tmp_path


SERVER = ["server", "--min-clients", "2"]
CLIENT = ["client", "--server", "127.0.0.1:9", "--data", "my.csv", "--label", "outcome", "--state", "state"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*SERVER, "--algorithm", "pfedmee"], "did you mean 'pfedme'"),
        ([*SERVER, "--algorithm", "alone"], "cannot be deployed: nothing is shared"),
        ([*SERVER, "--algorithm", "fedavg", "--lam", "3"], "--lam is not an option of fedavg"),
        ([*SERVER, "--rechoose", "3"], "--rechoose"),
        ([*SERVER, "--max-attempts", "0"], "max_attempts of the run must be at least 1"),
        ([*SERVER, "--deadline", "x"], "invalid float"),
        ([*SERVER, "--listen", "9092"], "--listen must be HOST:PORT"),
        ([*SERVER, "--listen", "127.0.0.2:9092"], "does not cover 127.0.0.2"),
        ([*SERVER, "--keys", "nowhere"], "There is no folder"),
        ([*SERVER, "--insecure", "--keys", "keys"], "leave out one of"),
        ([*SERVER, "--insecure", "--listen", "0.0.0.0:9092"], "--insecure-network"),
        ([*SERVER, "--out", "my.csv"], "my.csv is a file"),
        ([*SERVER, "--algorithm", "ifca", "--regions", "north"], "the server of ifca needs what each"),
        ([*SERVER, "--upper", "example.org:9092"], "give its folder with --upper-keys"),
        ([*SERVER, "--upper", "example.org:9092", "--upper-keys", "nowhere"], "There is no folder"),
        ([*SERVER, "--upper", "example.org"], "--upper must be HOST:PORT"),
        ([*SERVER, "--upper", "example.org:9092", "--rounds", "3"], "--rounds is decided by the upper"),
        ([*SERVER, "--upper", "example.org:9092", "--insecure"], "--insecure-network"),
        (
            [*SERVER, "--upper", "127.0.0.1:9092", "--insecure", "--upper-keys", "keys"],
            "leave out one of --insecure and --upper-keys",
        ),
        (
            ["server", "--upper", "127.0.0.1:9092", "--insecure", "--min-clients", "0"],
            "min_clients of the run must be at least 1",
        ),
        (["server", "--resume", "nowhere"], "no run of 'pfedme server'"),
        (["server", "--resume", "nowhere", "--rounds", "3"], "--rounds cannot change"),
        ([*CLIENT, "--client", "a"], "--client"),
        ([*CLIENT, "--keys", "keys"], "is missing"),
        ([*CLIENT, "--keys", "keys/clients/north", "--label", "outcom"], "did you mean 'outcome'"),
        ([*CLIENT, "--keys", "keys/clients/north", "--data", "no.csv"], "no.csv"),
        ([*CLIENT, "--insecure", "--server", "example.org:9092"], "--insecure-network"),
        ([*CLIENT, "--insecure", "--server", "example.org"], "HOST:PORT"),
        ([*CLIENT, "--insecure", "--name", " "], "not a valid client name"),
    ],
)
def test_wrong_arguments_end_at_once_with_a_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
):
    before = sorted(os.listdir(here))
    assert main(argv) == 2
    assert said in capsys.readouterr().err
    assert sorted(os.listdir(here)) == before


@pytest.mark.parametrize("former", ["--far", "--tries", "--wait"])
def test_options_go_by_their_former_names_too_which_help_does_not_show(former: str):
    parser = cli_server.parser()
    name = {"--far": "max_norm_ratio", "--tries": "max_attempts", "--wait": "join_timeout"}[former]
    assert getattr(parser.parse_args([former, "7"]), name) == 7
    assert getattr(parser.parse_args([]), name) == getattr(Plan, name)
    assert f"--{name.replace('_', '-')}" in parser.format_help()
    assert f"{former} " not in parser.format_help()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc, which Linux has")
@pytest.mark.slow
def test_a_server_that_was_stopped_before_it_listened_is_begun_by_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with federation(tmp_path / "live", ("north",)) as live:
        begins = f"'pfedme server --resume {live.out}' starts it"

        def started(how: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
            """A server whose SuperLink is about to start, under a keeper; before there is one, a server that
            is killed leaves its folder to the next."""
            (live.out / "flower.log").unlink(missing_ok=True)
            server = how()
            assert soon(lambda: (live.out / "flower.log").exists() and len(live.processes("server")) > 1)
            return server

        def new(*options: str) -> subprocess.Popen[bytes]:
            return live.server(PFedMe(), "--rounds", "1", "--min-clients", "1", *options)

        started(new).send_signal(signal.SIGINT)
        assert live.wait("server", 60) == 130
        assert f"interrupted; the run has not begun; {begins}." in live.said("server")
        started(live.resume).kill()
        live.wait("server", 60)
        assert soon(lambda: not live.processes() and not os.listdir(temporary))
        new()
        assert live.wait("server", 60) == 2
        assert f"{live.out} holds a run that has not begun; {begins}, --force starts over." in live.said(
            "server"
        )
        started(lambda: new("--force")).kill()
        live.wait("server", 60)
        assert not (live.out / "record.json").exists()
        assert soon(lambda: not live.processes())
        live.resume()
        live.logged("Listening on")


def test_a_client_gives_up_on_a_server_that_never_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    live_table(0).write_csv(tmp_path / "north.csv")
    words = ["--server", f"127.0.0.1:{processes.free_port()}", "--data", str(tmp_path / "north.csv")]
    words += ["--label", "sick", "--state", str(tmp_path / "state"), "--insecure", "--wait", "2"]
    assert main(["client", *words]) == 1
    assert "has not answered for 2 seconds (--wait)" in capsys.readouterr().err


def test_a_message_that_takes_too_long_ends_its_program():
    code = "import time; from pfedme.deploy.work import ending_after\nwith ending_after(0.1): time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        "pfedme: Gave up: a message of the server took more than 0.1 seconds (--max-seconds)." in done.stdout
    )


def test_other_machines_may_ask_only_for_what_clients_need():
    assert door.is_here("127.0.0.1", "127.0.0.1")
    assert door.is_here("::ffff:127.0.0.1", "::")
    assert not door.is_here("10.0.0.8", "10.0.0.7")
    assert not door.is_here("", "")


def test_a_client_that_was_killed_is_let_in_again_at_once():
    from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
    from flwr.supercore.error import FlowerError
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager
    from flwr.superlink.servicer.fleet.fleet_handlers import activate_node

    memory = FLWR_IN_MEMORY_DB_NAME
    state = LinkStateFactory(memory, NoOpFederationManager(), ObjectStoreFactory(memory)).state()
    node = state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, b"north", 30)
    request, stranger = (
        ActivateNodeRequest(public_key=key, heartbeat_interval=30) for key in (b"north", b"-")
    )
    assert activate_node(request=request, state=state).node_id == node
    with pytest.raises(FlowerError):  # otherwise nothing of ours is needed
        activate_node(request=request, state=state)
    activate = flower.replacing(activate_node)
    assert activate(request=request, state=state).node_id == node
    with pytest.raises(FlowerError):
        activate(request=stranger, state=state)


def test_a_state_folder_has_one_client_at_a_time(tmp_path: Path):
    with (
        supervise_client.at_work(tmp_path / "state"),
        pytest.raises(InputError, match="Another process is using"),
        supervise_client.at_work(tmp_path / "state"),
    ):
        pass
    with supervise_client.at_work(tmp_path / "state"):
        pass


def test_flowers_programs_reach_this_machine_without_a_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    env = processes.environment(tmp_path)
    assert env["NO_PROXY"] == "example.org,127.0.0.1,localhost,::1"
    assert env["no_proxy"] == "127.0.0.1,localhost,::1"
    assert env["FORWARDED_ALLOW_IPS"] == "127.0.0.1"
