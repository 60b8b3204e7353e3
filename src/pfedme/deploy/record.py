"""What a deployed run leaves behind: the folder of a run, as a simulation writes it, and the ledger."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from pfedme import __version__
from pfedme.core.tree import leaves, tree_of
from pfedme.data.deployed import Deployed
from pfedme.data.federation import Federation
from pfedme.deploy.agreement import Agreement
from pfedme.deploy.central import Central
from pfedme.deploy.events import Event, emit
from pfedme.deploy.log import one_line
from pfedme.deploy.messages import FROM_ROWS, NOISY, SCHEMA_FILE, Content
from pfedme.deploy.plan import Plan
from pfedme.deploy.progress import Progress, Stopped
from pfedme.deploy.server import Server
from pfedme.engine.evaluation import Evaluation
from pfedme.engine.metrics import Scores, Spread
from pfedme.errors import InputError, RunError
from pfedme.files import atomic_write, writing
from pfedme.privacy.rows import NOT_COVERED
from pfedme.privacy.units import Clients, Rows
from pfedme.runs.clients_file import clients_csv
from pfedme.runs.environment import environment
from pfedme.runs.folder import Folder, write_models
from pfedme.runs.ledger import Part, ledger_csv
from pfedme.runs.run import Run

LEDGER = "ledger.csv"
LOG = "server.log"


def note(out: Path, line: str, done: int | None = None) -> None:
    """Writes a line with the time to a run's log; `done` is the number of finished rounds that it reports."""
    now = datetime.now().isoformat(" ", "milliseconds")
    text = f"{now} {one_line(line)}"
    if done is not None:
        emit(Event("round done", done, text))
    with writing(out), (out / LOG).open("a", encoding="utf-8") as log:
        log.write(f"{text}\n")


class DeploymentRecord:
    """The folder of a deployed run."""

    def __init__(self, plan: Plan, path: Path, command: str) -> None:
        self.plan, self.folder, self.command = plan, Folder(path), command
        self.began = time.monotonic()
        self.before = 0.0
        """Seconds that earlier sessions of the run took."""

    def tell(self, line: str, done: int | None = None) -> None:
        """Writes a line to the log; see `note`."""
        note(self.folder.path, line, done)

    def run(self, progress: Progress | None) -> Run:
        """The run as it appears in a record."""
        plan, agreed = self.plan, progress.agreement if progress else None
        names = agreed.clients if agreed else ()
        return Run(
            algorithm=plan.algorithm,
            data=Deployed(clients=len(names), label=agreed.schema.label if agreed else ""),
            model=plan.model.with_defaults(agreed.schema.features) if agreed else plan.model,
            rounds=plan.rounds,
            cohort=min(plan.cohort or 10, len(agreed.members)) if agreed else plan.cohort,
            seed=plan.seed,
            eval_every=plan.eval_every or plan.rounds,
            eval_clients=len(agreed.members) if agreed else None,
        )

    def write_record(self, status: str, progress: Progress | None, reason: str | None = None) -> None:
        """Writes record.json, which shows how far the run has come."""
        history = list(progress.history) if progress else []
        spent = self.before + time.monotonic() - self.began
        content = {
            "status": status,
            "reason": reason,
            "version": __version__,
            "command": self.command,
            "config": self.run(progress).to_json(),
            "deployment": {
                **{f.name: getattr(self.plan, f.name) for f in PLAN_NUMBERS},
                "clients": progress.agreement.clients if progress else [],
                "members": list(progress.agreement.members) if progress else [],
                "refused": progress.agreement.refused if progress else {},
                "agreed_from": agreed_from(progress.agreement) if progress else {},
                "privacy": privacy_words(self.plan, progress),
                "round": progress.t if progress else 0,
            },
            "environment": environment(),
            "timing": {"compile_s": 0.0, "train_s": spent, "eval_s": 0.0, "rounds": self.plan.rounds},
            "history": history,
            "final": (history[-1] if history else {"round": self.plan.rounds})
            if status == "finished"
            else None,
        }
        with writing(self.folder.path):
            atomic_write(self.folder.record, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def save(self, progress: Progress) -> Progress:
        """Writes the state after a round, from which the run can be resumed, and its lines of the ledger;
        returns the state without them."""
        with writing(self.folder.path):
            with (self.folder.path / LEDGER).open("ab") as ledger:
                ledger.write(ledger_csv(progress.ledger, header=ledger.tell() == 0).encode())
                ledger.flush()
                os.fsync(ledger.fileno())
                length = ledger.tell()
            about = {
                "round": progress.t,
                "agreement": progress.agreement.to_json(),
                "attempt": progress.attempt,
                "norms": list(progress.norms),
                "waiting": [dataclasses.asdict(part) for part in progress.waiting],
                "lates": dict(progress.lates),
                "counted": dict(progress.counted),
                "history": list(progress.history),
                "ledger": length,
                "spent": self.before + time.monotonic() - self.began,
            }
            self.folder.write_checkpoint(leaves("server", progress.server), about)
        return dataclasses.replace(progress, ledger=())

    def restore(self, server: Server) -> Progress | None:
        """The state in the checkpoint; None if the run had not reached its first round."""
        if not self.folder.checkpoint.exists():
            return None
        tensors, about = self.folder.read_checkpoint()
        self.before = float(about["spent"])
        with writing(self.folder.path), (self.folder.path / LEDGER).open("ab") as ledger:
            if ledger.tell() < about["ledger"]:
                raise InputError(
                    f"{ledger.name} is shorter than at the last round that was saved; restore it, or start "
                    "a new run."
                )
            # Remove lines of a round that was not saved, because the server was killed between the two.
            ledger.truncate(int(about["ledger"]))
        agreement = Agreement.from_json(about["agreement"])
        return Progress(
            t=int(about["round"]),
            server=tree_of("server", tensors, server.first_server(agreement)),
            agreement=agreement,
            attempt=int(about["attempt"]),
            norms=tuple(about["norms"]),
            waiting=tuple(Part(**part) for part in about.get("waiting", ())),
            lates=dict(about["lates"]),
            counted=dict(about["counted"]),
            history=tuple(about["history"]),
        )

    def finish(self, server: Server, progress: Progress, told: Mapping[str, Content]) -> None:
        """Writes all files of a finished run; its folder is complete once record.json says so."""
        from pfedme.report.figures import curves

        schema, names = progress.agreement.schema, progress.agreement.members
        nobody = Federation(
            x=np.zeros((0, schema.features), np.float32), y=np.zeros(0, np.int32), classes=len(schema.labels),
            n_train=np.zeros(0, int), n_test=np.zeros(0, int), ids=np.zeros(0, np.uint32), schema=schema,
        )  # fmt: skip
        model = server.model_for(schema)
        with writing(self.folder.path):
            shared = server.shared(progress)
            tensors = {} if shared is None else {"w": np.asarray(shared.ravel())}
            write_models(self.folder.model, tensors, model, nobody, ())
            shared = {
                name: content.words["scores"] for name, content in told.items() if "scores" in content.words
            }
            if shared:
                own = [name for name in names if name in shared]
                evaluation = gathered(progress.t, [shared[name] for name in own], schema.label_scale)
                few = dataclasses.replace(
                    nobody, names=tuple(own),
                    n_train=np.array([shared[name]["n_train"] for name in own]),
                    n_test=np.array([shared[name]["n_test"] for name in own]),
                )  # fmt: skip
                atomic_write(self.folder.clients, clients_csv(evaluation, few))
                history = list(progress.history)
                atomic_write(self.folder.curves, curves({self.plan.algorithm.name: [history]}))
        self.write_record("finished", progress)
        self.folder.checkpoint.unlink(missing_ok=True)
        try:
            self.report()
        except (RunError, InputError) as error:
            self.tell(f"The page could not be written ({error}); 'pfedme report' writes it.")

    def report(self) -> None:
        """Writes the report page of the run."""
        from pfedme.report.html.page import NAME, report

        report([self.folder.path], self.folder.path / NAME, force=True)


PLAN_NUMBERS = [f for f in dataclasses.fields(Plan) if f.name not in ("algorithm", "model", "privacy")]


def agreed_from(agreement: Agreement) -> dict[str, str]:
    """Where what each client told for the agreement came from."""
    sources = dict.fromkeys(agreement.declared, SCHEMA_FILE) | dict.fromkeys(agreement.noisy, NOISY)
    return {name: sources.get(name, FROM_ROWS) for name in agreement.clients}


def privacy_words(plan: Plan, progress: Progress | None) -> dict[str, Any] | None:
    """What a record says about the differential privacy of a plan: of rows, which each client enforces
    itself, or of clients, once it is known how many there are."""
    if isinstance(plan.privacy, Clients) and progress:
        central = Central.of(plan, progress.agreement)
        return central.to_json() if central else None
    if not isinstance(plan.privacy, Rows):
        return None
    return {
        "unit": "rows",
        "relation": "add or remove one row",
        "sampling": f"Poisson, {plan.algorithm.B or 'all'} of a client's rows expected in a mini-batch",
        "accountant": "privacy loss distributions, dp-accounting, at each client",
        "simulated": False,
        "epsilon": plan.privacy.epsilon,
        "delta": plan.privacy.delta,
        "clip": plan.privacy.clip,
        "covered": "uploads and personal models; a client may add more noise, for a smaller epsilon",
        "not_covered": list(NOT_COVERED),
    }


def gathered(t: int, told: list[dict[str, Any]], unit: float) -> Evaluation:
    """The evaluation computed from clients' sums."""

    def scores(part: str) -> dict[str, Scores]:
        kinds = [kind for kind in ("global", "local", "personal") if kind in told[0][part]]
        return {kind: _scores([one[part][kind] for one in told], unit) for kind in kinds}

    info = {name: np.array([one["info"][name] for one in told]) for name in told[0]["info"]}
    return Evaluation(t, np.arange(len(told)), scores("test"), scores("train"), info)


def _scores(sums: list[dict[str, Any]], unit: float) -> Scores:
    count = np.array([one["rows"] for one in sums])
    loss = np.array([one["loss"] for one in sums])
    if "spread" not in sums[0]:
        return Scores(np.array([one["right"] for one in sums], float), loss, count)
    own, mean = (np.array([one[key] for one in sums]) for key in ("spread", "mean"))
    whole = float(own.sum() + (count * (mean - (count * mean).sum() / max(1, count.sum())) ** 2).sum())
    return Scores(np.full(len(sums), np.nan), loss, count, Spread(own, whole, unit))


def carry_out(
    server: Server,
    record: DeploymentRecord,
    *,
    resume: bool,
    agreed: Callable[[Progress], None] = lambda _: None,
) -> None:
    """Carries out a deployed run from the beginning, or from its last round, to the end; `agreed` is called
    before its first round."""
    plan, progress = server.plan, record.restore(server) if resume else None
    try:
        if progress is None:
            (record.folder.path / LEDGER).unlink(missing_ok=True)
            record.write_record("running", None)
            progress = record.save(server.begin())
            record.write_record("running", progress)
        else:
            record.tell(f"Resumed before round {progress.t + 1}.")
        agreed(progress)
        while progress.t < plan.rounds:
            if plan.eval_every and progress.t % plan.eval_every == 0:
                progress = evaluated(server, progress, last=False)[0]
            progress = server.round(progress)
            counted = [part for part in progress.ledger if part.outcome == "counted"]
            shortened = sum(part.clipped is not None for part in counted)
            told = f", {shortened} of them shortened" if shortened else ""
            progress = record.save(progress)
            line = f"Round {progress.t} of {plan.rounds} is done, with {len(counted)} clients{told}."
            record.tell(line, progress.t)
        progress, told = evaluated(server, progress, last=True)
        record.finish(server, progress, told)
        record.tell("Finished.")
    except (RunError, InputError) as error:
        status = "stopped" if isinstance(error, Stopped) else "failed"
        if isinstance(error, Stopped) and error.progress is not None:
            progress = record.save(error.progress)
        record.tell(f"Stopped: {error}")
        if status == "failed":
            server.fail(str(error))
        record.write_record(status, progress, str(error))
        record.report()
        raise


def evaluated(server: Server, progress: Progress, *, last: bool) -> tuple[Progress, dict[str, Content]]:
    """The state with a new entry in its history, if clients share their scores, and what they shared."""
    told = server.finish(progress, last=last)
    shared = [content.words["scores"] for content in told.values() if "scores" in content.words]
    if shared and not any(entry["round"] == progress.t for entry in progress.history):
        entry = gathered(progress.t, shared, progress.agreement.schema.label_scale).entry()
        progress = dataclasses.replace(progress, history=(*progress.history, entry))
    return progress, told
