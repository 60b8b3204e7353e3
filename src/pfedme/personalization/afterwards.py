"""The steps after a finished run: models for its clients and for newcomers, their files and the report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pfedme.data import Source
from pfedme.data.federation import Federation
from pfedme.engine.choices import Personalize
from pfedme.engine.devices import agreed, is_first
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
from pfedme.personalization.lines import recipe_of
from pfedme.report.columns import columns_of, write_columns
from pfedme.report.html.newcomers import newcomers_report
from pfedme.report.html.page import NAME, report
from pfedme.training.compare import Comparison, records_of, summed_up


@dataclasses.dataclass(frozen=True)
class Offer:
    """Models that were found for clients."""

    how: Personalize
    federation: Federation
    """The clients that `found` is about."""
    found: Personalized | None
    """Each client's choice and model; None if they were not requested."""
    levels: list[Level]
    """How the clients that the run held out fare as newcomers, by the number of their rows."""

    def to_json(self) -> dict[str, Any]:
        """The keys `personalized` and `newcomers`, each only if there are results."""
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
    """Finds models for `newcomers` if they are given; otherwise for the run's `members`, and shows how the
    clients that it held out fare by the number of their rows. Results are written to the folder `out` as
    soon as they are found; of several hosts, by the first."""
    how = how or finished.run.personalize or Personalize()
    federation = finished.encoded(newcomers) if newcomers else finished.simulation.federation
    found, levels = None, list[Level]()
    if newcomers is not None:
        found = finished.to_newcomers(federation, how, watch)
    elif members:
        found = finished.to_members(how, watch)
    if out and found is not None:
        # First, because a folder with personalized.json is complete.
        columns = columns_of(finished.simulation.model, federation, finished.w, found.theta)
        if columns and is_first():
            write_columns(out, columns)
        write(out, found, finished.simulation.model, federation, how)
    later = finished.run.parties()[1] if held_out and newcomers is None else None
    if later is not None:
        levels = newcomer_curve(finished, later, how, watch)
    if out and levels and is_first():
        write_newcomers(out, levels)
    return Offer(how, federation, found, levels)


def let_clients_choose(out: Path, watch: Watch = lambda *_: None) -> Comparison | None:
    """Lets the clients of a finished comparison choose their own models, where that is still to be done, and
    sums it up again; None if there is nothing to do.

    If the comparison has a run of `alone` with the same seed, clients train alone as they did there.
    """
    done = {folder: record for folder, record in records_of(out).items() if record.get("final")}
    alone = {r["config"]["seed"]: r for r in done.values() if r["config"]["algorithm"]["name"] == "alone"}
    left = [folder for folder, record in done.items() if left_to_do(folder, record["config"])[0]]
    for folder in left:
        finished = FinishedRun.open(folder)
        if record := alone.get(finished.run.seed):
            s = finished.simulation
            known = recipe_of(record, s.model, s.federation.clients)
            finished = dataclasses.replace(finished, trained_alone=known)
        offer(finished, out=folder, held_out=False, watch=watch)
        if is_first():
            report([folder], folder / NAME, force=True)
    return summed_up(out) if left else None


def write_page(run: Path, out: Path, newcomers: Source | None) -> None:
    """Writes the report of a run and what it offered to the run's folder, or that of newcomers to theirs."""
    if newcomers is not None:
        newcomers_report(run, out, newcomers)
    elif out.resolve() == run.resolve():
        report([out], out / NAME, force=True)


def left_to_do(path: Path, config: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a finished run still has to find its members' models, and to show how its newcomers fare. All
    hosts ask, and only the first needs the folder."""
    made = ("personalize", "personalized.json"), ("holdout_clients", "newcomers.png")
    members, newcomers = (
        bool(config.get(option)) and not agreed((path / name).exists()) for option, name in made
    )
    return members, newcomers


def page_is_late(path: Path) -> bool:
    """Whether the report of a finished run is missing, or older than what the run offered."""
    page = path / NAME
    made = [path / name for name in ("personalized.json", "newcomers.png") if (path / name).exists()]
    return not page.exists() or any(file.stat().st_mtime_ns > page.stat().st_mtime_ns for file in made)
