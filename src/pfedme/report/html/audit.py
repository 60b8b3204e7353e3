"""The page of an audit: what a run gives away about rows, with pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pfedme.report.audit import best_upload
from pfedme.report.html.static import escaped, picture, section, static_page, table

NEAR = "a guess within a tenth of its distance to that mean"


def audit_page(document: dict[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The page as HTML, without scripts."""
    claim = document["claim"]
    tone = "bad" if document["exceeded"] else "good" if claim else "open"
    badge = "Exceeds its claim" if document["exceeded"] else "Holds" if claim else "Claims nothing"

    def image(name: str) -> str:
        return picture(name.partition(".")[0], pictures[name]) if name in pictures else ""

    parts = [
        f'<section id="answer" class="{tone}"><h2>Does the run give away more than it claims?</h2>'
        f'<p class="lead"><span class="badge">{badge}</span>{escaped(document["sentence"])}</p>'
        f"<p>{_level(document)}</p></section>",
        section("ε, measured and claimed", image("epsilon.png"), _about_epsilon(document)),
        section("Rows in one upload", *_upload(document, image("rows.png"))),
        section("Who was in the training data", image("membership.png"), _membership(document)),
        section("Canaries", image("canaries.png"), _canaries(document)),
        section("The mechanism itself", *_checks(document)),
        section("How to repeat this", f"<p>The run:</p><pre>{escaped(document['run'])}</pre>"),
    ]
    return static_page(
        "Privacy audit",
        f"Privacy audit of {document['algorithm']} with {document['clients']:,} clients",
        f"{document['rows_trained_on']:,} training rows. This page shows some of them: keep it where the "
        f"rows may be. The audit took {document['seconds'] / 60:.1f} minutes.",
        parts,
    )


def _level(document: dict[str, Any]) -> str:
    if not document["claim"]:
        return (
            "The lower bound has a confidence of 95 %. Attacks show the least that is possible: without "
            "differential privacy there is no upper limit."
        )
    return (
        "The statements of this audit together are wrong about a correct run with a probability of at most "
        f"{100 * document['level']:g} %. An audit can refute a claim, but cannot prove it."
    )


def _about_epsilon(document: dict[str, Any]) -> str:
    claim = document["claim"]
    if not claim:
        return "<p>The run has no differential privacy, so there is nothing to compare with.</p>"
    return (
        f"<p>The run claims ε = {claim['epsilon']:g} at δ = {claim['delta']:g} for every one of the "
        f"{escaped(claim['unit'])}. Lower bounds from a single training are far below the truth even for the "
        "strongest attack, so a small bar is no proof that the claim is true. The checks of the mechanism "
        "below are much sharper.</p>"
    )


def _upload(document: dict[str, Any], image: str) -> list[str]:
    if not document["upload"]:
        return [
            "<p>The attack divides the change of a linear first layer's weights by that of its biases. This "
            "run sends no such layer.</p>"
        ]
    rows = [
        [
            escaped(part["server"]),
            f"{part['near']:,} of {part['rows']:,}",
            f"{part['chance_near']:,}",
            "–" if part["error"] is None else f"{part['error']:.3g}",
            "–" if part["chance"] is None else f"{part['chance']:.3g}",
            f"{part['guesses']:,}",
        ]
        for part in document["upload"]
    ]
    header = ["server", "rows recovered", "by chance", "smallest error", "by chance", "guesses"]
    best = best_upload(document)
    shown = f"<p>The closest guesses of the server that is {escaped(best['server'])}:</p>" if best else ""
    note = (
        "<p class='note'>One upload of each of up to 20 clients. An error of 0 is the row itself, and the "
        f"mean of the client's rows has an error of 1. A row counts as recovered if there is {NEAR}. By "
        "chance: as many guesses drawn from the means and spreads of the client's columns. A curious server "
        "only looks; a malicious one sends a model of its own choice first.</p>"
    )
    return [table(header, rows), note, shown, image]


def _membership(document: dict[str, Any]) -> str:
    found = document["membership"]
    if not found:
        return "<p>No client has test rows to compare its training rows with.</p>"
    rows = [
        [
            f"{kind} model{'' if kind == 'global' else 's'}",
            f"{one['auc']:.3f} <small>{one['auc_interval'][0]:.3f} to {one['auc_interval'][1]:.3f}</small>",
            f"{100 * one['true_positives']:.1f} % <small>{100 * one['true_positives_interval'][0]:.1f} to "
            f"{100 * one['true_positives_interval'][1]:.1f}</small>",
            f"{one['rows']:,}",
        ]
        for kind, one in found.items()
    ]
    note = (
        "<p class='note'>The attack calls a row a training row if the model's loss on it is small. Training "
        "rows are compared with as many test rows of the same clients. An AUC of 0.5 and 1 % true positives "
        "are what guessing achieves. Intervals are of 95 %.</p>"
    )
    header = ["model", "AUC", "true positives at 1 % false ones", "rows of each kind"]
    return table(header, rows) + note


def _canaries(document: dict[str, Any]) -> str:
    one, worst = document["canaries"], document["worst_case"]
    parts = [("in this run", one)] + ([("given to the mechanism directly", worst)] if worst else [])
    rows = [
        [
            name,
            f"{part['canaries']:,}",
            f"{part['correct']:,} of {part['guesses']:,}",
            f"{part['epsilon']:.2f}",
            f"{100 * (1 - part['level']):.3g} %",
        ]
        for name, part in parts
    ]
    names = one["clients"]
    where = f"client {escaped(names[0])}" if len(names) == 1 else f"{len(names):,} clients"
    said = (
        f"<p>{one['included']:,} of {one['canaries']:,} random rows, chosen by coins, were added to the rows "
        f"of {where}, and the run was trained again. Their scores are by the {escaped(one['score'])}. The "
        "auditor guesses the coins of the highest and lowest scores, and the more guesses are right, the "
        "larger ε must be (Steinke, Nasr and Jagielski, 2023).</p>"
    )
    if worst:
        said += (
            f"<p>The same for {worst['clients']:,} clients' private gradients alone, {worst['steps']:,} of "
            "them each, with canaries whose gradients are as long as clipping allows and orthogonal, and an "
            "auditor who sees every one: the worst that the claim allows for.</p>"
        )
    header = ["canaries", "number", "guesses right", "ε is at least", "confidence"]
    return said + table(header, rows)


def _checks(document: dict[str, Any]) -> list[str]:
    if not document["checks"]:
        return []
    rows = [
        [
            f"{escaped(check['name'])}<br><small>{escaped(check['statistic'])}</small>",
            f'<span class="{"up" if check["passed"] else "down"}">'
            f"{'holds' if check['passed'] else 'fails'}</span>",
            f"{check['value']:.4g}",
            f"{'at most' if check['above'] else 'at least'} {check['threshold']:.4g}",
            escaped(check["client"]),
        ]
        for check in document["checks"]
    ]
    header = ["", "", "measured", "allowed", "client"]
    note = (
        "<p class='note'>Measured on private gradients of the run's own clients; the client shown is the "
        "most extreme one. Each check is wrong about a correct run with a probability of at most 0.25 %. The "
        "noise that is claimed is calculated anew from ε. In this simulation noise comes from the run's "
        "seed, so that results can be repeated; a deployed client draws its own.</p>"
    )
    return [table(header, rows), note]
