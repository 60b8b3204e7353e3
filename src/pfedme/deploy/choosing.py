"""A deployed client's choice of its model, when the run is over.

It is the choice of `--personalize auto` in a simulation, with what a client knows: the models that the server
has sent, its own rows, one part of which it has kept out of training since the first round, and no scores of
others. The shared model cannot be trained again with that part, but everything around it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pfedme import __version__
from pfedme.algorithms import IFCA, LabelPrior
from pfedme.core.spec import to_json
from pfedme.core.tree import Params, from_vectors, tree_of
from pfedme.data.federation import Federation
from pfedme.deploy.client import CHOICE, MODEL, Bound, Client, received, rows_of, simulation_of
from pfedme.deploy.ending import FILE, KEPT, Ending
from pfedme.deploy.messages import Words
from pfedme.engine.choices import Line, Personalize, Start, for_all, personalize
from pfedme.engine.measure import MEASURES, metric_for
from pfedme.engine.personalized import Candidate, Personalized
from pfedme.engine.verdict import signed
from pfedme.errors import InputError, RunError
from pfedme.export import Predictor
from pfedme.files import atomic_write, writing
from pfedme.personalization.lines import ON_THE_MENU, alone_recipe, trained_under
from pfedme.runs.run import Run

Watch = Callable[[str, int, int], None]


def choose(client: Client, watch: Watch = lambda *_: None) -> Words | None:
    """Chooses the client's model if that is still to be done, writes it and choice.json, and returns the
    content of the latter; None if there is nothing to choose."""
    ending = Ending.load(client.state)
    if ending is None:
        return None
    words: Words = {"version": __version__, "round": ending.round, "choice": None, "why": ending.why}
    if ending.how is not None:
        choice = Choice(client, ending, ending.how)
        try:
            found, improving = choice.made(watch)
        except RunError as error:
            words["why"] = f"{str(error).rstrip('.')}; the algorithm's model is kept"
        else:
            words = choice.document(found, improving)
            choice.keep(found)
    with writing(client.state):
        text = json.dumps({**words, "sentences": sentences(words)}, indent=1, ensure_ascii=False)
        atomic_write(client.state / CHOICE, text + "\n")
        (client.state / FILE).unlink()
    return words


class Choice:
    """The models that a client chooses from."""

    def __init__(self, client: Client, ending: Ending, how: Personalize) -> None:
        self.client, self.round, self.how = client, ending.round, how
        pinned = ending.pinned
        self.bound = bound = Bound(client, pinned["agreement"])
        self.pinned = pinned
        try:
            self.federation = rows_of(client, bound, pinned["fingerprint"])
        except InputError:
            raise InputError(
                "The rows have changed since the run, so that the model cannot be chosen: restore them and "
                f"run the same command, or remove {client.state / FILE} to keep the algorithm's model."
            ) from None
        about = {name: a for name, a in ending.arrays.items() if not name.startswith(f"{KEPT}.")}
        shared, sent = received(about, bound)
        self.sent = from_vectors(sent, bound.exchange.sent)
        self.kept = tree_of(KEPT, ending.arrays, bound.exchange.state)
        self.shared: Params | None = None
        if bound.plan.algorithm.has_global:
            self.shared = from_vectors(shared, bound.parameters) if shared else self.sent

    def prior(self) -> np.ndarray | None:
        """π: the label frequencies that the shared model was trained under, if the algorithm sends them."""
        algorithm = self.bound.plan.algorithm
        if not isinstance(algorithm, LabelPrior):
            return None
        return trained_under(algorithm, np.asarray(self.sent[1], np.float64))

    def lines(self) -> list[Line]:
        """The models that the client has been sent or has made, the most shared first."""
        algorithm, shared, lines = self.bound.plan.algorithm, self.shared, list[Line]()
        if shared is not None:
            lines.append(Line("global", lambda part: Start(for_all(shared, part.clients), self.prior())))
        if isinstance(algorithm, IFCA):
            lines.append(Line("cluster", lambda part: Start(self.personal(part))))
        elif algorithm.personal and algorithm.name not in ON_THE_MENU:
            lines.append(Line(algorithm.name, lambda part: Start(self.personal(part)), path=False))
        return lines

    def personal(self, part: Federation) -> Params:
        """The algorithm's personal model in response to what was sent, for training on these rows."""
        simulation = simulation_of(self.client, self.bound, part, self.pinned)
        theta = simulation.reply_models(self.round, self.sent, self.kept)[0].personal
        assert theta is not None
        return theta

    def made(self, watch: Watch = lambda *_: None) -> tuple[Personalized, bool]:
        """The client's choice, and whether the loss of its model alone was still falling."""
        plan, model, federation = self.bound.plan, self.bound.model, self.federation
        watch("alone", 0, 1)
        alone, improving = alone_recipe(model, federation, plan.seed, Run.budget)
        given = getattr(plan.algorithm, "lam", None) if plan.algorithm.name == "pfedme" else None
        tested = bool(np.any(federation.n_test))
        found = personalize(
            self.how, model, federation, self.lines(), alone.models, seed=plan.seed, given=given,
            measure=metric_for(federation)[0] if tested else None, watch=watch,
        )  # fmt: skip
        return found, improving

    def document(self, found: Personalized, improving: bool) -> Words:
        """The content of choice.json."""
        chosen, measure = found.candidates[found.choice[0]], found.measure
        rows = int(found.rows[0])
        there = [name for name in ("alone", "global") if any(c.name == name for c in found.candidates)]
        knows_labels = self.prior() is not None or not self.bound.model.has_class_biases()
        return {
            "version": __version__,
            "round": self.round,
            "choice": chosen.label,
            "name": chosen.name,
            "lam": _lam(chosen),
            "why": "",
            "personalize": to_json(self.how),
            "rows": int(self.federation.n_train[0] // self.how.folds),
            "candidates": [
                {"name": c.name, "label": c.label, "lam": _lam(c), "score": _known(score)}
                for c, score in zip(found.candidates, found.score[0], strict=True)
            ],
            "label_prior": "offered" if self.prior() is not None else "" if knows_labels else "unknown",
            "metric": measure.key,
            "test_rows": rows,
            "test": {name: _known(found.own(name)[0]) if rows else None for name in ("recommended", *there)},
            "gain": {name: _gain(found, name) if rows else None for name in there},
            "improving": improving,
        }

    def keep(self, found: Personalized) -> None:
        """Writes the chosen model in place of the algorithm's."""
        chosen = found.candidates[found.choice[0]]
        origin = {"client": self.client.table.owner, "which": "recommended", "round": self.round}
        origin |= {"choice": chosen.label, "lam": _lam(chosen)}
        theta = found.theta[0]
        Predictor(self.bound.model, theta, self.bound.schema, origin=origin).save(
            self.client.state / MODEL, force=True
        )


def _known(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _lam(candidate: Candidate) -> float | None:
    """λ, if the model is on a path between a shared one and the client's own."""
    return candidate.lam if candidate.steps else None


def _gain(found: Personalized, name: str) -> Words | None:
    """What the chosen model gains over another on the test rows, with a 95 % interval if there is one."""
    gains = found.gains(name)
    if not math.isfinite(gains.each[0]):
        return None
    low, high = (end[0] for end in gains.ends(found.measure))
    return {"gain": float(gains.each[0]), "low": _known(low), "high": _known(high)}


def sentences(words: Words) -> list[str]:
    """What the owner should know about the choice, from choice.json; nothing if there is none."""
    if not words:
        return []
    if words["choice"] is None:
        return [f"No model was chosen: {words['why']}." if words["why"] else "No model was chosen."]
    measure = MEASURES[words["metric"]]
    said = [
        f"Chosen: {words['choice']}, of {len(words['candidates'])} models, on {words['rows']} rows that none "
        "of them has seen; then fitted to all training rows."
    ]
    scores = [
        f"{name} {measure.told(measure.scale * value)}"
        for name, value in {"chosen": words["test"]["recommended"], **words["test"]}.items()
        if name != "recommended" and value is not None
    ]
    if scores:
        said.append(f"On {words['test_rows']} test rows: {', '.join(scores)}.")
    for name, gain in words["gain"].items():
        if gain is not None:
            between = ""
            if gain["low"] is not None:
                low, high = (signed(gain[end], measure) for end in ("low", "high"))
                between = f", 95 % interval {low} to {high}"
            amount = measure.points.format(signed(gain["gain"], measure))
            said.append(f"Gain over {name}: {amount}{between}.")
    if words["label_prior"] == "unknown":
        said.append(
            "The federation's label frequencies are not known here, so no model has been corrected for them; "
            "the algorithm label-prior sends them."
        )
    return said
