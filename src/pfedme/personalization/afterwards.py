"""What follows a finished run: models for its clients and for newcomers, with the files and the page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pfedme.data import Source
from pfedme.data.federation import Federation
from pfedme.engine.choices import Personalize
from pfedme.engine.personalized import Personalized
from pfedme.personalization.finished import (
    FinishedRun,
    Level,
    Watch,
    document,
    newcomer_curve,
    write,
    write_newcomers,
)
from pfedme.report.html.newcomers import newcomers_report
from pfedme.report.html.page import NAME, report


@dataclasses.dataclass(frozen=True)
class Offer:
    """Models that were found for clients."""

    how: Personalize
    federation: Federation
    """The clients that `found` is about."""
    found: Personalized | None
    """Each client's choice and model; None if they were not asked for."""
    levels: list[Level]
    """How the run's own newcomers fare by their rows, if it held any clients out."""

    def to_json(self) -> dict[str, Any]:
        """`personalized` and `newcomers`, as far as there are any."""
        found = {} if self.found is None else {"personalized": document(self.found, self.how)}
        levels = [dataclasses.asdict(level) for level in self.levels]
        return found | ({"newcomers": levels} if levels else {})


def offer(
    finished: FinishedRun,
    how: Personalize | None = None,
    newcomers: Source | None = None,
    *,
    out: Path | None = None,
    members: bool = True,
    held_out: bool = True,
    watch: Watch = lambda *_: None,
) -> Offer:
    """Models for `newcomers`, if they are given; else for the run's `members`, and how those fare that it
    held out, by the number of their rows. What is found is written into the folder `out` at once."""
    how = how or finished.run.personalize or Personalize()
    federation = finished.encoded(newcomers) if newcomers else finished.simulation.federation
    found, levels = None, list[Level]()
    if newcomers is not None:
        found = finished.to_newcomers(federation, how, watch)
    elif members:
        found = finished.to_members(how, watch)
    if out and found is not None:
        write(out, found, finished.simulation.model, federation, how)
    later = finished.run.parties()[1] if held_out and newcomers is None else None
    if later is not None:
        levels = newcomer_curve(finished, later, how, watch)
    if out and levels:
        write_newcomers(out, levels)
    return Offer(how, federation, found, levels)


def write_page(run: Path, out: Path, newcomers: Source | None) -> None:
    """The page about a run and what it offered, in its own folder; or about newcomers, in theirs."""
    if newcomers is not None:
        newcomers_report(run, out, newcomers)
    elif out.resolve() == run.resolve():
        report([out], out / NAME, force=True)


def left_to_do(path: Path, config: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the models of a finished run's members are still to be found, and how its newcomers fare."""
    members = bool(config.get("personalize")) and not (path / "personalized.json").exists()
    newcomers = bool(config.get("holdout_clients")) and not (path / "newcomers.png").exists()
    return members, newcomers


def page_is_late(path: Path) -> bool:
    """Whether the page of a finished run is missing, or older than what the run offered."""
    page = path / NAME
    made = [path / name for name in ("personalized.json", "newcomers.png") if (path / name).exists()]
    return not page.exists() or any(file.stat().st_mtime_ns > page.stat().st_mtime_ns for file in made)
