"""`pfedme audit`: what a finished run gives away about rows, beside what it claims."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfedme import __version__
from pfedme.audits import canaries as planted
from pfedme.audits import mechanism as made
from pfedme.audits.membership import Membership, compare
from pfedme.audits.onerun import LEVEL
from pfedme.audits.rows import Recovered, recover
from pfedme.audits.settings import Settings
from pfedme.audits.subject import Subject
from pfedme.data.federation import Federation
from pfedme.deploy.private import fresh_key
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError
from pfedme.files import atomic_write, refuse_file, writing
from pfedme.privacy.rows import RowPlan
from pfedme.privacy.units import Rows

DELTA = 1e-5
"""δ of a run that claims nothing."""
SHOWN = 6
"""Recovered rows that are shown."""
FILES = ("audit.json", "audit.html", "rows.png", "membership.png", "canaries.png", "epsilon.png")
BOUND_LEVEL, CHECK_LEVEL = 0.02, 0.0025
"""The levels of the two lower bounds on ε, and of the four checks of the mechanism in which chance plays a
part: size, freshness and secrecy of noise, and sampling. Together they are `LEVEL`. Checks are sharp enough
for much less than an equal part."""
AUDIT = 2**32 - 7
"""Folded into keys for the audit's own training, so that it has noise of its own."""

Watch = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Audit:
    """What was found."""

    subject: Subject
    rows: list[Recovered]
    membership: dict[str, Membership]
    canaries: planted.Audited
    worst_case: made.WorstCase | None
    checks: list[made.Check]
    seconds: float

    @property
    def claimed(self) -> float:
        """ε that the run claims for every row; infinite if it claims nothing."""
        privacy = self.subject.run.privacy
        return privacy.epsilon if privacy else math.inf

    @property
    def measured(self) -> float:
        """The best lower bound on ε."""
        found = [self.canaries.bound, *([self.worst_case.bound] if self.worst_case else [])]
        return max(one.epsilon for one in found)

    @property
    def failed(self) -> list[made.Check]:
        """The checks that do not hold."""
        return [check for check in self.checks if not check.passed]

    @property
    def exceeded(self) -> bool:
        """Whether the run gives away more than it claims."""
        return self.measured > self.claimed or bool(self.failed)

    def sentence(self) -> str:
        """The result in words."""
        at_least = f"canaries show that ε is at least {self.measured:.2f}"
        if self.measured < 0.005:
            at_least = "canaries show nothing"
        if math.isinf(self.claimed):
            return f"The run claims nothing about privacy; {at_least}."
        if self.measured > self.claimed:
            return f"The run gives away more than it claims: {at_least}, and it claims {self.claimed:g}."
        if self.failed:
            names = "; ".join(check.name[:1].lower() + check.name[1:] for check in self.failed)
            return (
                f"The run does not do what its claim of ε = {self.claimed:g} rests on. This fails: {names}."
            )
        return f"Nothing contradicts the claim of ε = {self.claimed:g}; {at_least}."

    def to_json(self) -> dict[str, Any]:
        """The content of audit.json."""
        run, f = self.subject.run, self.subject.simulation.federation
        return {
            "version": __version__,
            "run": run.command(),
            "algorithm": run.algorithm.name,
            "clients": f.clients,
            "rows_trained_on": int(f.n_train.sum()),
            "claim": None
            if run.privacy is None
            else {"unit": run.privacy.name, "epsilon": run.privacy.epsilon, "delta": run.privacy.delta},
            "exceeded": self.exceeded,
            "sentence": self.sentence(),
            "measured": self.measured,
            "level": LEVEL,
            "upload": [found.to_json(f, SHOWN) for found in self.rows],
            "columns": column_names(f),
            "shape": list(f.shape),
            "membership": {kind: found.to_json() for kind, found in self.membership.items()},
            "canaries": self.canaries.to_json(f),
            "worst_case": None if self.worst_case is None else self.worst_case.to_json(),
            "checks": [check.to_json() for check in self.checks],
            "seconds": round(self.seconds, 1),
        }


def column_names(federation: Federation) -> list[str]:
    """The name of each feature of a table; empty if rows did not come from a table."""
    if federation.schema is None:
        return []
    return [
        column.name if column.kind == "number" else f"{column.name} = {value}"
        for column in federation.schema.columns
        for value in (column.categories or ("",))
    ]


def audit(path: Path, settings: Settings | None = None, watch: Watch = lambda *_: None) -> Audit:
    """Audits the run in a folder; `watch` is called with what comes next, the steps done and their total."""
    settings = settings or Settings()
    seed = settings.seed
    began = time.monotonic()
    watch("reading the run", 0, 5)
    subject = Subject.open(path)
    simulation, f = subject.simulation, subject.simulation.federation
    coins = planted.Canaries.draw(
        f, _clients(f, settings.client), settings.canaries, np.random.default_rng([seed, 1])
    )

    watch("rows in one upload", 1, 5)
    rows = recover(simulation, subject.w, seed)

    watch("membership", 2, 5)
    everyone = np.arange(f.clients)
    models = {"global": (subject.w, everyone), "personal": (subject.theta, subject.who)}
    membership = {
        kind: found
        for kind, (theta, members) in models.items()
        if theta is not None
        and (found := compare(simulation.model, theta, f, members, shared=kind == "global"))
    }

    privacy = subject.run.privacy
    watch("the mechanism", 3, 5)
    level, delta = (BOUND_LEVEL, privacy.delta) if privacy else (LEVEL, DELTA)
    checks, worst = [], None
    if isinstance(privacy, Rows):
        checks, worst = check_mechanism(simulation, delta, seed)

    last = time.monotonic()

    def told(done: int, of: int) -> None:
        nonlocal last
        if time.monotonic() - last > 5:
            last = time.monotonic()
            watch(f"canaries: round {done:,} of {of:,}", 4, 5)

    watch("canaries", 4, 5)
    trained = plant(simulation, coins, seed)
    found = planted.train(trained, coins, subject.run.rounds, delta, level, told)
    watch("done", 5, 5)
    seconds = time.monotonic() - began
    return Audit(subject, rows, membership, found, worst, checks, seconds)


def _clients(federation: Federation, name: str | None) -> np.ndarray:
    """The client of this name, or all."""
    if name is None:
        return np.arange(federation.clients)
    for i in range(federation.clients):
        if federation.name(i) == name:
            return np.array([i])
    raise InputError(f"--client {name}: the run has no client with this name; clients.csv lists them.")


def plant(simulation: Simulation, coins: planted.Canaries, seed: int) -> Simulation:
    """The same training with canaries among clients' rows, and with noise of its own."""
    federation = coins.planted(simulation.federation)
    privacy = simulation.privacy
    if isinstance(privacy, RowPlan):
        # The noise stays that of the run; the number of rows differs by how the coins fell.
        privacy = dataclasses.replace(privacy, rows=federation.n_train)
    return Simulation(
        simulation.algorithm, simulation.model, federation, cohort=simulation.cohort, seed=simulation.seed,
        key=jax.random.fold_in(jax.random.key(seed), AUDIT), quarter_at=simulation.quarter_at,
        privacy=privacy,
    )  # fmt: skip


def check_mechanism(
    simulation: Simulation, delta: float, seed: int
) -> tuple[list[made.Check], made.WorstCase]:
    """The checks of private gradients, and the canaries that they are given."""
    mechanism, level = made.Mechanism.of(simulation), CHECK_LEVEL
    noise = {release.name: mechanism.noise(release) for release in mechanism.releases}
    drawn = made.sampled(mechanism)
    checks = [
        made.noise_is_as_large(noise, level),
        made.noise_is_fresh(noise, level),
        made.rows_are_clipped(mechanism),
        made.rows_are_drawn_once(drawn),
        made.rows_are_drawn_rarely(drawn, mechanism, level),
        made.noise_is_secret(mechanism, fresh_key, level),
    ]
    return checks, made.worst_case(mechanism, delta, BOUND_LEVEL, seed)


def check_out(out: Path) -> None:
    """Raises an error if the results must not be written to this folder."""
    refuse_file(out)
    if (out / "record.json").exists():
        raise InputError(f"{out} holds a run; choose another --out.")
    others = [p.name for p in out.iterdir() if p.name not in FILES] if out.exists() else []
    if others and not (out / "audit.json").exists():
        raise InputError(f"{out} is not empty and holds no audit; choose another --out.")


def write(found: Audit, out: Path) -> dict[str, Any]:
    """Writes audit.json, audit.html and the pictures to a folder, and returns the document."""
    from pfedme.report.audit import pictures
    from pfedme.report.html.audit import audit_page

    document = found.to_json()
    images = pictures(document)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (out / name).unlink(missing_ok=True)
        for name, content in images.items():
            atomic_write(out / name, content)
        atomic_write(out / "audit.html", audit_page(document, images))
        atomic_write(out / "audit.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
    return document
