"""A real federation in its long form, `make test-live`: ten rounds with five clients, kills, ill-meaning
clients, and machines of their own."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("flwr", reason="pfedme[flower] is not installed")
if sys.platform != "linux":
    pytest.skip("processes are found by /proc, which Linux has", allow_module_level=True)

from live import LABEL, LIAR, NAMES, TRICKSTER, Live, federation, soon, table

from pfedme.algorithms import Algorithm, FedAvg, PerFedAvg, PFedMe
from pfedme.deploy import BUNDLE
from pfedme.deploy.events import FOREIGN
from pfedme.deploy.processes import SupervisedProcess, await_health, environment

pytestmark = pytest.mark.slow

ROUNDS = 10
PFEDME = PFedMe(lam=5.0, eta=0.05, alpha=0.05, R=10, B=16, K=3)
LEARNT = PFedMe(lam=5.0, eta=0.15, alpha=0.1, R=30, B=60, K=5)
"""Is at its best after few rounds; before that, means that others have a part in make a difference."""
ALL = ("--min-clients", "5", "--cohort", "5", "--min-replies", "5", "--max-attempts", "20", "--clip", "0")
"""Every round has all five clients as they are, or is repeated."""


def tell(what: str, live: Live, differences: dict[str, float], began: float) -> None:
    """What was measured, for those who run the tests with -s."""
    worst = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
    print(f"\n{what}: {time.monotonic() - began:.0f} s; relative differences: {worst}\n{live.log()}")


@pytest.mark.parametrize(
    "algorithm",
    [
        PFEDME,
        FedAvg(eta=0.05, R=10, B=16, aggregation="samples"),
        PerFedAvg(eta=0.05, R=10, B=16, alpha=0.02),
    ],
    ids=lambda a: a.name,
)
def test_ten_rounds_are_those_of_a_simulation(algorithm: Algorithm, tmp_path: Path):
    began = time.monotonic()
    with federation(tmp_path / "live") as live:
        live.server(algorithm, "--rounds", str(ROUNDS), *ALL)
        live.clients()
        live.finished()
    differences = live.against_simulation(algorithm, ROUNDS)
    tell(algorithm.name, live, differences, began)
    assert set(differences) == {"w", *(() if algorithm.name == "fedavg" else NAMES)}
    assert max(differences.values()) < 1e-5, differences
    assert [line["outcome"] for line in live.ledger()] == ["counted"] * 5 * ROUNDS


def test_a_client_that_is_killed_comes_back(tmp_path: Path):
    began = time.monotonic()
    with federation(tmp_path / "live") as live:
        live.server(PFEDME, "--rounds", str(ROUNDS), *ALL, "--deadline", "40")
        live.clients()
        live.done(ROUNDS // 3)
        soon(lambda: "train" in _last_asked(live, "north"), 60, "north is at work")
        assert live.kill("north") >= 3
        soon(lambda: not live.processes("north"), 20, "end of north")
        live.client("north")
        live.kill_part("west", "supernode")
        live.kill_part("east", "pfedme.deploy.worker")
        live.finished()
    assert "The connection to the server has ended; connecting again." in live.said("west")
    differences = live.against_simulation(PFEDME, ROUNDS)
    tell("client killed", live, differences, began)
    assert max(differences.values()) < 1e-5, differences
    counted = [(line["round"], line["client"]) for line in live.ledger() if line["outcome"] == "counted"]
    assert sorted(counted) == sorted((str(t), name) for t in range(1, ROUNDS + 1) for name in NAMES)


def _last_asked(live: Live, name: str) -> str:
    lines = (live.state(name) / "client.log").read_text().splitlines()
    return [line for line in lines if "Receiving: " in line or "Sent successfully" in line][-1]


def test_a_server_that_is_killed_goes_on_and_clients_connect_by_themselves(tmp_path: Path):
    began = time.monotonic()
    with federation(tmp_path / "live") as live:
        live.server(PFEDME, "--rounds", str(ROUNDS), *ALL)
        live.clients()
        live.done(ROUNDS // 3)
        assert live.kill("server") >= 4
        soon(lambda: not live.processes("server"), 20, "end of the server")
        assert live.record()["status"] == "running"
        assert all(live.children[name].poll() is None for name in NAMES)
        live.resume()
        live.finished()
    differences = live.against_simulation(PFEDME, ROUNDS)
    tell("server killed", live, differences, began)
    assert max(differences.values()) < 1e-5, differences
    assert "Resumed before round" in live.log()
    counted = [(line["round"], line["client"]) for line in live.ledger() if line["outcome"] == "counted"]
    assert sorted(counted) == sorted((str(t), name) for t in range(1, ROUNDS + 1) for name in NAMES)


TRICKS = {"hanger": "time.sleep(3600)", "nan": "w = w * float('nan')", "scaler": "w = w * 1e6"}


def test_clients_that_mean_ill_are_turned_away_and_the_others_train_on(tmp_path: Path):
    began, rounds = time.monotonic(), 4
    bad = [*TRICKS, "other"]
    with federation(tmp_path / "live", (*NAMES, *bad)) as live:
        mine = live.folder / "bad"
        mine.mkdir()
        for name in bad:
            (live.tables / f"{name}.csv").rename(mine / f"{name}.csv")
        table(7).rename({"age": "years"}).write_csv(mine / "other.csv")
        live.server(
            LEARNT, "--rounds", str(rounds), "--min-clients", "8", "--cohort", "8", "--min-replies", "5",
            "--deadline", "45",
        )  # fmt: skip
        live.client("other", data=mine / "other.csv")
        for name, trick in TRICKS.items():
            live.client(name, data=mine / f"{name}.csv", code=TRICKSTER.format(trick))
        live.client("stranger", data=mine / "nan.csv", trust=live.stranger())
        live.client("plain", data=mine / "nan.csv", trust=["--insecure"])
        for name in NAMES:
            live.client(name, "--share-metrics")
        assert live.wait("server") == 0, live.said("server")
        assert all(live.wait(name, 60) == 0 for name in NAMES)
        assert live.wait("other", 60) == 2
        assert live.wait("stranger", 60) == 2
    log = live.log()
    print(f"\nill-meaning clients: {time.monotonic() - began:.0f} s\n{log}")
    for line in (
        "Refused other: its table has no column 'age', which the others have",
        "Round 1: nan dropped (it contains numbers that are not finite)",
        "Round 1: scaler dropped (its update of length ",
        "Round 1: hanger late (no reply within 45 seconds)",
        "Refused a client at 127.0.0.1: the server does not know its key",
        "Refused a connection: it came without TLS",
    ):
        assert line in log, line
    assert "turned this client away: its table has no column 'age'" in live.said("other")
    assert "does not know the key" in live.said("stranger")
    assert "does not answer in plain text" in live.said("plain")
    for name in ("stranger", "plain"):
        assert not (live.state(name) / "model").exists()
        assert not [url for url, _ in live.requests(name) if "push" in url]
    for line in live.ledger():
        assert (line["outcome"] == "counted") == (line["client"] in NAMES), line
    live.names = NAMES
    undisturbed = live.simulated(LEARNT, rounds).record["history"][-1]
    disturbed = live.record()["final"]
    for kind in ("global", "personal"):
        mine, theirs = (100 * one[kind]["accuracy"] for one in (disturbed, undisturbed))
        print(f"{kind} accuracy: {mine:.2f} %, undisturbed {theirs:.2f} %")
        assert abs(mine - theirs) <= 1, (kind, mine, theirs)


def test_a_server_that_asks_for_what_was_not_agreed_on_gets_nothing(tmp_path: Path):
    """An answered round with another w, twice, a changed step size, a changed seed, and then the truth."""
    names, rounds = ("east", "north"), 3
    with federation(tmp_path / "live", names) as live:
        live.server(
            PFEDME, "--rounds", str(rounds), "--min-clients", "2", "--min-replies", "2", "--max-attempts",
            "5", "--clip", "0", code=LIAR,
        )  # fmt: skip
        for name in names:
            live.client(name)
        live.finished()
    print(live.log(), live.said("east"))
    for name in names:
        said = live.said(name)
        sent = [message.words for message in live.sent(name) if message.kind == "train"]
        assert [set(words) for words in sent] == [{"name"}] + 4 * [{"name", "error"}] + 2 * [{"name"}]
        for why in ("it has answered round 1 for another w", "it is bound by the agreement "):
            assert f"Refused what the server asked for: {why}" in said, said
            assert f"Round 2: {name} failed ({why}" in live.log()
    assert max(live.against_simulation(PFEDME, rounds).values()) < 1e-5


def test_clients_of_a_run_that_has_failed_end(tmp_path: Path):
    names = ("east", "north")
    with federation(tmp_path / "live", names) as live:
        for name in names:
            rows = table(1).with_columns(pl.lit("no").alias(LABEL))
            rows.write_csv(live.tables / f"{name}.csv")
        live.server(PFEDME, "--rounds", "2", "--min-clients", "2")
        for name in names:
            live.client(name)
        assert live.wait("server", 120) == 1
        assert [live.wait(name, 60) for name in names] == [1, 1]
    for who in ("server", *names):
        assert "The run " in live.said(who)
        assert "there is nothing to learn" in live.said(who)


def test_a_client_runs_no_program_but_its_own(tmp_path: Path):
    """A bare SuperLink sends what it is given: here our app with another description."""
    app, home = tmp_path / "app", tmp_path / "home"
    shutil.copytree(BUNDLE, app)
    described = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(described.replace("pFedMe and its rivals", "Something"))
    home.mkdir()
    with federation(tmp_path / "live", ["east"]) as live:
        (home / "config.toml").write_text(
            f'[superlink.here]\naddress = "{live.host}:{live.port}"\ninsecure = true\n'
        )
        words = ["flower-superlink", "--insecure", "--host", live.host, "--port", str(live.port)]
        words += ["--disable-runtime-dependency-installation"]
        with SupervisedProcess(words, tmp_path / "link.log", home) as link:
            await_health(link, live.host, live.port, None)
            live.client("east", trust=["--insecure"])
            soon(lambda: "Connected to" in live.said("east"), 60, "a connection")
            flwr = str(Path(sys.executable).with_name("flwr"))
            out = f"min-clients=1 out={str(live.out)!r}"
            run = [flwr, "run", str(app), "here", "-c", out]
            subprocess.run(run, env=environment(home), check=True, capture_output=True)
            assert live.wait("east", 60) == 1
        assert f"{FOREIGN}; it was not run." in live.said("east")
        assert not (live.state("east") / "model").exists()


class Hosts:
    """Machines of their own: network namespaces, each with an address, joined by a bridge in another."""

    def __init__(self, mark: str, count: int) -> None:
        self.hub = f"pf{mark}-hub"
        self.names = [f"pf{mark}-{i}" for i in range(count)]

    def address(self, i: int) -> str:
        """The address of a machine."""
        return f"10.77.0.{i + 1}"

    def within(self, i: int) -> list[str]:
        """What starts a command on a machine."""
        return ["ip", "netns", "exec", self.names[i]]

    def link(self, i: int, state: str) -> None:
        """Plugs a machine's cable in (up) or pulls it out (down)."""
        ip("-n", self.hub, "link", "set", f"port{i}", state)

    def make(self) -> None:
        """Sets them up."""
        ip("netns", "add", self.hub)
        ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.hub, "link", "set", "bridge", "up")
        for i, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            peer = ("peer", "name", "eth0", "netns", name)
            ip("-n", self.hub, "link", "add", f"port{i}", "type", "veth", *peer)
            ip("-n", self.hub, "link", "set", f"port{i}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{self.address(i)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def remove(self) -> None:
        """Takes them away, whatever there is of them."""
        there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
        for name in (*self.names, self.hub):
            if name in {line.split()[0] for line in there.splitlines() if line}:
                ip("netns", "delete", name)


def ip(*words: str) -> None:
    """Runs `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def hosts(mark: str, count: int) -> Iterator[Hosts]:
    """Machines, or a reason why there are none."""
    made = Hosts(mark, count)
    try:
        try:
            made.make()
        except FileNotFoundError:
            pytest.skip("there is no `ip` program (iproute2)")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield made
    finally:
        with contextlib.suppress(FileNotFoundError):
            made.remove()


ASK = """
import http.client, ssl, sys
host, port, ca = sys.argv[1:]
for path in ("/health", "/v1/control/list-runs"):
    connection = http.client.HTTPSConnection(host, int(port), context=ssl.create_default_context(cafile=ca))
    connection.request("GET", path)
    print(connection.getresponse().status)
"""
"""Asks a server for something that is for all, and for something that is for its own machine."""


def test_machines_of_their_own_one_of_them_cut_off(tmp_path: Path):
    began, rounds, cut = time.monotonic(), 14, "south"
    with (
        hosts(tmp_path.parent.name[-3:].strip("-"), 6) as machines,
        federation(tmp_path / "live", NAMES, [machines.address(0)]) as live,
    ):
        live.server(
            PFEDME, "--rounds", str(rounds), "--min-clients", "5", "--cohort", "5", "--deadline", "25",
            within=machines.within(0),
        )  # fmt: skip
        for i, name in enumerate(NAMES, start=1):
            live.client(name, within=machines.within(i))
        at = 1 + NAMES.index(cut)
        live.done(1)
        for i, control in ((0, "405"), (1, "404")):
            words = [*machines.within(i), sys.executable, "-c", ASK, live.host, str(live.port)]
            answers = subprocess.run(
                [*words, str(live.folder / "keys/ca.crt")], capture_output=True, text=True, check=True
            )
            assert answers.stdout.split() == ["200", control]
        live.logged("Refused 10.77.0.2: '/v1/control/list-runs' is only for this machine", 10)
        live.done(2)
        machines.link(at, "down")
        live.logged(f": {cut} ")
        live.done(live.log().count(" is done, ") + 2)
        machines.link(at, "up")
        live.finished()
    print(f"\nmachines of their own: {time.monotonic() - began:.0f} s\n{live.log()}")
    lines = live.ledger()
    assert sorted((int(line["round"]), line["client"]) for line in lines) == [
        (t, name) for t in range(1, rounds + 1) for name in NAMES
    ]
    assert {line["outcome"] for line in lines if line["client"] != cut} == {"counted"}
    own = [line["outcome"] for line in lines if line["client"] == cut]
    print(own)
    assert own[:2] == ["counted"] * 2
    assert {"late", "absent", "failed"} & set(own)
    assert own[-1] == "counted"
    for t, outcome in enumerate(own, start=1):
        assert outcome == "counted" or f"Round {t}: {cut} {outcome} (" in live.log()
