"""The report on deployed runs: who took part, from the ledger, and what is told if scores are not shared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Page
from test_deploy import NAMES, QUICK, STRICT, Room, deployed, owners, scaled
from test_html_report import HOSTILE, assert_drawn, close, shown

from pfedme.algorithms import FedAvg, PFedMe
from pfedme.cli import main
from pfedme.core.models import MLR
from pfedme.deploy.plan import Plan
from pfedme.deploy.progress import Stopped
from pfedme.deploy.record import DeploymentRecord
from pfedme.report.html.read import read_ledger
from pfedme.runs.ledger import Outcome, Part, ledger_csv

WORDS = ("counted", "dropped", "failed", "late", "absent")


def folder(
    out: Path,
    parts: list[Part],
    status: str = "finished",
    refused: dict[str, str] | None = None,
    **changes: Any,
) -> Path:
    """The folder of a run whose clients told nothing of their scores, with this ledger."""
    out.mkdir(parents=True)
    names = sorted({part.client for part in parts})
    rounds = max((part.round for part in parts), default=1)
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=rounds, cohort=4, min_clients=1)
    DeploymentRecord(plan, out, f"pfedme server --rounds {rounds}").write_record(
        status, None, changes.pop("reason", None)
    )
    record = json.loads((out / "record.json").read_text())
    record["config"]["data"] |= {"clients": len(names), "label": "sick"}
    record["config"]["cohort"] = 4
    record["deployment"] |= {"clients": names, "refused": refused or {}, "round": rounds}
    record |= changes
    (out / "record.json").write_text(json.dumps(record))
    (out / "ledger.csv").write_text(ledger_csv(parts))
    return out


def many(clients: int, rounds: int, seed: int = 0, name: str = "client {}") -> list[Part]:
    """The ledger of rounds with faults, some of which had to be repeated."""
    rng = np.random.default_rng(seed)
    parts = []
    for t in range(1, rounds + 1):
        cohort = rng.choice(clients, min(4, clients), replace=False)
        for attempt in range(1, 3 if rng.random() < 0.3 else 2):
            for c in cohort:
                outcome: Outcome = rng.choice(WORDS, p=(0.7, 0.1, 0.05, 0.1, 0.05))
                step = float(rng.uniform(1, 2))
                why = f"its update of length {rng.uniform(1e5, 1e6):.3g} is far beyond the usual 0.31"
                reason = {"dropped": why, "failed": "Values are missing", "late": "no reply within 3 seconds"}
                counted = outcome == "counted"
                parts.append(
                    Part(
                        t, attempt, name.format(c), outcome, reason.get(outcome, ""),
                        int(rng.integers(10, 99)) if counted else None,
                        float(rng.uniform(1, 2)) if counted else None,
                        1.0 if counted and t % 3 == 0 else None,
                        step if counted else None, step * float(rng.uniform(0.5, 1.2)) if counted else None,
                    )
                )  # fmt: skip
    return parts


def plainly(parts: list[Part]) -> dict[tuple[str, int], list[Part]]:
    """The tries of each client in each round."""
    found: dict[tuple[str, int], list[Part]] = {}
    for part in parts:
        found.setdefault((part.client, part.round), []).append(part)
    return found


# --- numbers


def test_the_grid_and_the_table_are_the_ledger(tmp_path: Path):
    parts = many(5, 12)
    (told,) = shown(folder(tmp_path / "run", parts))["parts"]
    tries = plainly(parts)
    grid = told["grid"]
    assert (grid["each"], grid["rounds"], told["rounds"]) == (1, 12, 12)
    assert len(grid["cells"]) == len(tries)
    for cell in grid["cells"]:
        own = tries[grid["clients"][cell["row"]], cell["column"] + 1]
        last = own[-1]
        assert cell["outcomes"] == [int(last.outcome == word) for word in WORDS]
        assert (cell["tries"], cell["reason"], cell["rows"]) == (len(own), last.reason, last.rows)
        assert cell["norm"] == (None if last.norm is None else close(last.norm))
        assert cell["clipped"] == last.clipped
        if last.step is not None and last.without is not None:
            assert cell["effect"] == pytest.approx((last.step - last.without) / last.step, abs=1e-5)
    assert told["repeated"] == len({p.round for p in parts if p.attempt == 2})
    assert len(told["table"]) == 5
    for line in told["table"]:
        own = [tries[key][-1] for key in tries if key[0] == line["client"]]
        assert line["asked"] == len(own)
        assert line["outcomes"] == [sum(p.outcome == word for p in own) for word in WORDS]
        counted = [p for p in own if p.outcome == "counted"]
        assert line["rows"] == counted[-1].rows
        assert line["norm"] == close(float(np.mean([p.norm or 0 for p in counted])))
        assert line["shortened"] == sum(p.clipped is not None for p in counted)
        effects = [(p.step - p.without) / p.step for p in counted if p.step and p.without]
        assert line["effect"] == pytest.approx(np.mean(effects), abs=1e-5)


@pytest.mark.parametrize(("clients", "rounds"), [(5, 1000), (300, 700), (2, 61), (60, 60)])
def test_many_rounds_and_clients_are_drawn_as_few_cells_that_hold_them_all(
    clients: int, rounds: int, tmp_path: Path
):
    parts = many(clients, rounds)
    (told,) = shown(folder(tmp_path / "run", parts))["parts"]
    tries, grid = plainly(parts), told["grid"]
    assert len(grid["cells"]) * (2 if grid["each"] > 1 else 1) <= 2000
    assert -(-rounds // grid["each"]) <= 60
    assert len(grid["clients"]) == min(60, told["clients"])
    drawn = {key: own for key, own in tries.items() if key[0] in grid["clients"]}
    assert sum(cell["tries"] for cell in grid["cells"]) == sum(map(len, drawn.values()))
    sums = np.sum([cell["outcomes"] for cell in grid["cells"]], axis=0).tolist()
    assert sums == [sum(own[-1].outcome == word for own in drawn.values()) for word in WORDS]
    assert sum(told["outcomes"]) == len(tries)
    # If not all are drawn, nobody is left out with whom more went wrong.
    wrong = {
        name: sum(own[-1].outcome != "counted" for (c, _), own in tries.items() if c == name)
        for name in {part.client for part in parts}
    }
    out = [wrong[name] for name in wrong if name not in grid["clients"]]
    assert max(out, default=0) <= min(wrong[name] for name in grid["clients"])


def test_who_was_refused_or_dropped_is_named_with_the_reason(tmp_path: Path):
    far = "its update of length {} is far beyond the usual 0.31"
    parts = [
        Part(1, 1, "north", "dropped", far.format("2e+06"), norm=2e6),
        Part(1, 2, "north", "dropped", far.format("3e+06"), norm=3e6),
        Part(2, 1, "north", "dropped", far.format("4e+06"), norm=4e6),
        Part(4, 1, "north", "dropped", "it contains numbers that are not finite"),
        Part(4, 1, "south", "failed", "Values are missing"),
        Part(4, 1, "west", "failed", "the round had too few good replies", norm=1.0),
    ]
    path = folder(tmp_path / "run", parts, refused={"east": "its table has no column 'age'"})
    (told,) = shown(path)["parts"]
    assert told["refused"] == {
        "of": 1,
        "lines": [{"client": "east", "reason": "its table has no column 'age'"}],
    }
    assert [(line["times"], line["rounds"], line["reason"]) for line in told["dropped"]["lines"]] == [
        (3, "rounds 1–2", far.format("4e+06")),
        (1, "round 4", "it contains numbers that are not finite"),
    ]
    assert [line["client"] for line in told["failed"]["lines"]] == ["south"]


def test_a_client_whose_part_was_the_whole_step(tmp_path: Path):
    parts = [Part(1, 1, "a", "counted", norm=2.0, step=2.0, without=0.0), Part(2, 1, "a", "counted", norm=0.0,
             step=0.0, without=0.0)]  # fmt: skip
    (line,) = shown(folder(tmp_path / "run", parts))["parts"][0]["table"]
    assert (line["norm"], line["effect"], line["rows"]) == (1, 1, None)


# --- what becomes of runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Deployed runs: one whose clients share their scores, one whose do not, one that stopped, one that
    nobody joined."""
    tmp = tmp_path_factory.mktemp("deployed")
    tables = owners(tmp)
    found = {}
    room = Room(tables, tmp / "state")
    room.tricks["north"] = scaled(1e6)
    plan = Plan(
        algorithm=PFedMe(**QUICK, aggregation="samples"),
        model=MLR(),
        rounds=4,
        min_clients=5,
        eval_every=2,
    )
    found["shared"] = deployed(tmp, plan, room, name="shared")
    silent = Room(tables, tmp / "silent-state", share=False)
    found["silent"] = deployed(tmp, plan, silent, name="silent")
    answers = [True, True]
    silent.tricks["süd-west"] = lambda content: content if answers and answers.pop() else None
    strict = Plan(algorithm=FedAvg(**QUICK), model=MLR(), **STRICT)
    with pytest.raises(Stopped):
        deployed(tmp, strict, silent, name="stopped")
    silent.gone = set(NAMES)
    with pytest.raises(Stopped):
        deployed(tmp, Plan(algorithm=FedAvg(**QUICK), model=MLR(), join_timeout=0.1), silent, name="nobody")
    return found | {"stopped": tmp / "stopped", "nobody": tmp / "nobody"}


@pytest.mark.slow
def test_the_server_leaves_a_report_when_a_run_ends_or_stops(runs: dict[str, Path]):
    for path in runs.values():
        assert "Who took part" in (path / "report.html").read_text()


@pytest.mark.slow
def test_a_run_with_scores_is_told_as_any_other(runs: dict[str, Path]):
    found = shown(runs["shared"])
    assert found["title"] == "Predicting sick at 5 clients"
    assert "5 clients that shared their scores" in found["about"][0]
    (group,) = found["groups"]
    final = json.loads((runs["shared"] / "record.json").read_text())["final"]
    for kind in ("global", "local", "personal"):
        assert group["final"][kind]["value"] == close(final[kind]["accuracy"])
    assert group["curves"]["rounds"] == [0, 2, 4]
    assert group["commands"] == ["pfedme server"]
    assert len(group["clients"]["client"]) == 5
    told = json.dumps(found["headline"])
    assert "pfedme's personal models reach" in told
    assert "pfedme compare" not in told
    (part,) = found["parts"]
    north = next(line for line in part["table"] if line["client"] == "north")
    assert north["outcomes"] == [0, 4, 0, 0, 0]
    assert "far beyond the usual" in part["dropped"]["lines"][0]["reason"]
    assert all(line["rows"] for line in part["table"] if line is not north)


def test_a_run_without_scores_says_so(runs: dict[str, Path]):
    found = shown(runs["silent"])
    assert found["headline"][0]["lead"].startswith("Clients did not share their scores")
    assert found["notices"] == found["worst"] == found["gains"] == []
    (group,) = found["groups"]
    assert (group["final"], group["kinds"], group["clients"]) == ({}, [], None)
    assert group["finished"] == 1
    assert group["cost"]["bytes"] > 0
    assert sum(found["parts"][0]["outcomes"]) == 20


def test_a_run_that_stopped_is_told_with_its_reason_and_how_it_goes_on(runs: dict[str, Path]):
    for name, why in (("stopped", "had too few good replies 2 times"), ("nobody", "clients came within")):
        found = shown(runs[name])
        (notice,) = found["notices"]
        assert notice["status"] == "stopped"
        assert why in notice["reason"]
        assert f"'pfedme server --resume {runs[name]}' continues it." in notice["reason"]
        assert "none of these runs has finished" in found["headline"][0]["lead"]
    assert found["title"] == "Predicting the label"
    assert "0 clients" not in found["about"][0]


def test_a_failed_run_and_one_that_goes_on(tmp_path: Path):
    parts = many(3, 5)
    done = len({p.round for p in parts if p.outcome == "counted"})
    lost = folder(tmp_path / "lost run", parts, "failed", reason="The shared model diverged in round 5.")
    (notice,) = shown(lost)["notices"]
    assert notice["reason"].startswith(
        f"The shared model diverged in round 5. {done} of 5 rounds are done. Once"
    )
    assert f"--resume '{lost}'" in notice["reason"]
    (notice,) = shown(folder(tmp_path / "on", parts, "running"))["notices"]
    assert notice["status"] == "unfinished"


def test_federations_that_look_alike_are_told_apart(tmp_path: Path):
    one = folder(tmp_path / "one", many(3, 5))
    other = folder(tmp_path / "other", many(3, 5, name="hospital {}"))
    found = shown(one, other)
    assert found["notices"] == []
    assert [group["label"] for group in found["groups"]] == ["fedavg, one", "fedavg, other"]
    assert [group["problem"] for group in found["groups"]] == [0, 1]
    assert [part["label"] for part in found["parts"]] == ["fedavg, one", "fedavg, other"]


def test_a_line_that_the_server_was_killed_in_is_left_out(tmp_path: Path):
    """The ledger is appended, so at most its last line is incomplete, and may end within a character."""
    parts = many(3, 5, name="hôpital {}")
    path = folder(tmp_path / "run", parts) / "ledger.csv"
    content = path.read_bytes()
    last = content.rindex(b"\n", 0, -1) + 1
    whole = read_ledger(path)
    assert whole is not None
    assert len(whole["round"]) == len(parts)
    for end in range(last, len(content)):
        path.write_bytes(content[:end])
        found = read_ledger(path)
        assert found is not None
        for name, values in whole.items():
            np.testing.assert_array_equal(found[name], values[:-1])


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("ledger.csv", "counted", "dancing", "no outcome 'dancing'"),
        ("ledger.csv", "attempt", "try", "no column 'attempt'"),
        ("ledger.csv", "\n1,", "\n1.5,", "not a whole number"),
        ("ledger.csv", "\n1,", "\n0,", "not a whole number"),
        ("ledger.csv", "\n1,", "\n,", "not a whole number"),
        ("record.json", '"clients": ["client 0",', '"clients": [7,', "not a string"),
    ],
)
def test_what_is_damaged_is_named(
    name: str, old: str, new: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = folder(tmp_path / "run", many(3, 5)) / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert main(["report", str(path.parent), "-o", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert str(path) in said


# --- in a browser


SECTIONS = {
    "shared": {"curves", "sizes", "parts"},
    "silent": {"parts"},
    "stopped": {"parts"},
    "nobody": set(),
    "few": {"parts"},
    "long": {"parts"},
    "hostile": {"parts"},
    "both": {"parts"},
}
"""Reports, and the sections in which they have charts."""


@pytest.fixture(scope="module")
def pages(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reports."""
    out = tmp_path_factory.mktemp("pages")
    few = folder(out / "few", many(5, 12), refused={"east": "its table has no column 'age'"})
    folders = {name: [path] for name, path in runs.items()} | {
        "few": [few],
        "long": [folder(out / "long", many(80, 2000))],
        "hostile": [folder(out / "hostile", many(4, 9, name=HOSTILE + " {}"), refused={HOSTILE: HOSTILE})],
        "both": [few, folder(out / "other", many(3, 30, 1, "hospital {}"), "failed", reason="Diverged.")],
    }
    for name, paths in folders.items():
        assert main(["report", *map(str, paths), "-o", str(out / f"{name}.html")]) == 0
    return {name: out / f"{name}.html" for name in folders}


@pytest.mark.parametrize(("width", "dark"), [(1440, False), (400, True)])
@pytest.mark.parametrize("name", SECTIONS)
def test_a_browser_draws_who_took_part_and_asks_for_nothing(
    tab: Page, pages: dict[str, Path], name: str, width: int, dark: bool
):
    assert_drawn(tab, pages[name], SECTIONS[name], width, dark)
    for grid in tab.evaluate(
        "[...document.querySelectorAll('#parts svg.chart')].map((g) => g.querySelectorAll('.cell').length)"
    ):
        assert 0 < grid <= 2000
    assert tab.evaluate("window.broken") is None


CELL = """(() => {
  const cell = [...document.querySelectorAll("#parts svg.chart .cell")].find((c) =>
    c.dataset.client === CLIENT && c.dataset.column === COLUMN);
  cell.scrollIntoView({ block: "center" });
  const box = cell.getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
})()"""
TIP = "(() => { const t = document.querySelector('#parts .tip'); return t.hidden ? null : t.innerText; })()"


@pytest.mark.parametrize("width", [1440, 400])
def test_hovering_a_cell_tells_about_it(tab: Page, pages: dict[str, Path], width: int):
    tab.open(pages["few"], width=width)
    for (client, t), own in plainly(many(5, 12)).items():
        column = CELL.replace("CLIENT", json.dumps(client)).replace("COLUMN", json.dumps(str(t - 1)))
        tab.move(*tab.evaluate(column))
        text, last = tab.evaluate(TIP), own[-1]
        assert text.startswith(f"{client}, round {t}\n")
        assert last.outcome in text
        assert re.search(rf"attempts\s+{len(own)}\b", text)
        assert last.reason.lower() in text.lower()
        if last.norm and last.step and last.without:
            effect = 100 * (last.step - last.without) / last.step
            assert f"{abs(float(f'{effect:.6g}')):.1f} %" in text
            assert f"{last.norm:.3g}" in text or f"{last.norm:.4g}" in text
            assert re.search(rf"rows\s+{last.rows}\b", text)
    tab.move(1, 1)
    assert tab.evaluate(TIP) is None
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_what_is_not_shared_is_said_and_no_table_is_empty(tab: Page, pages: dict[str, Path]):
    tab.open(pages["silent"])
    assert "Clients did not share their scores." in tab.evaluate(
        "document.querySelector('#results').innerText"
    )
    assert tab.evaluate("document.querySelectorAll('#results table').length") == 0
    assert "Run it again" not in tab.evaluate("document.body.innerText")
    assert "pfedme server" in tab.evaluate("document.querySelector('#again').innerText")
    tab.open(pages["stopped"])
    assert tab.evaluate("document.querySelector('#results')") is None


def test_the_grid_has_a_table_with_its_numbers_and_names_are_texts(tab: Page, pages: dict[str, Path]):
    tab.open(pages["hostile"])
    rows = tab.evaluate("""(async () => {
      document.querySelector("#parts details").open = true;
      await new Promise((done) => setTimeout(done, 100));
      return document.querySelectorAll("#parts details tbody tr").length;
    })()""")
    assert rows == len(plainly(many(4, 9)))
    text = tab.evaluate("document.querySelector('#parts').innerText")
    assert f"{HOSTILE}: {HOSTILE}" in text
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert tab.pdf().startswith(b"%PDF")
    assert tab.errors == []
