"""The audit: every claim of the paper's experiments and theorems with a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from pfedme.data import parse_data
from pfedme.experiments.finding import Finding, failing, judge
from pfedme.experiments.paper import Scale, data_text
from pfedme.experiments.study import markdown
from pfedme.runs.run import load

ABOUT = """\
# Audit

What the paper "Personalized Federated Learning with Moreau Envelopes" claims, in our words, and what the
experiments in this repository find. Each verdict is computed from the numbers next to it: *holds* if every
part of the claim holds, *holds in part* if some do, *not visible* if the measurement cannot show it. "As
released" means the behaviour of the code that was published with the paper, "as written" that of its text;
[fidelity.md](fidelity.md) lists the differences. Accuracies are in percent over all clients' test rows, with
95 % intervals over seeds. Tables, figures and CSV files are in [results](results/README.md).
"""


def data_finding(scale: Scale) -> Finding:
    """Checks whether the federations are as the paper describes them."""
    checks, numbers = {}, []
    for data, sizes, labels in (("mnist", (1165, 3834), 2), ("synthetic", (250, 25810), None)):
        for version in ("released", "written"):
            federation = load(parse_data(data_text(scale, data, version)))
            rows = federation.n_train if data == "mnist" else federation.count
            numbers.append(
                f"{data} as {version}: {federation.clients} clients, {rows.min():,} to {rows.max():,} "
                f"{'training ' if data == 'mnist' else ''}rows, {len(federation.y):,} in total"
            )
            name = f"{data} as {version}"
            checks[f"{name}: sizes"] = bool(
                abs(rows.min() - sizes[0]) <= 2 and abs(rows.max() - sizes[1]) <= 2
            )
            if labels:
                most = int((federation.label_counts() > 0).sum(axis=1).max())
                checks[f"{name}: two labels each"] = most == labels
    return Finding(
        "The federations",
        "MNIST's 70,000 images are distributed to 20 clients with two labels and 1,165 to 3,834 rows each; "
        "Synthetic has 100 clients with 250 to 25,810 rows.",
        "`pfedme data describe`; MNIST's sizes count training rows.",
        "; ".join(numbers) + ".",
        judge(checks),
        failing(checks)
        + " The smallest size that the paper prints exists only as released, where clients share images; a "
        "true partition of all 70,000 images gives larger parts.",
    )


def page(findings: Sequence[Finding], footer: str) -> str:
    """The content of docs/audit.md."""
    overview = markdown(["claim", "verdict"], [[_linked(f.claim), f.verdict] for f in findings])
    parts = [
        f"\n## {f.claim}\n\n**Claim.** {f.statement}\n\n**Experiment.** {f.experiment}\n\n"
        f"**Numbers.** {f.numbers}\n\n**Verdict: {f.verdict}.** {f.explanation}\n"
        for f in findings
    ]
    return f"{ABOUT}\n{overview}{''.join(parts)}{footer}"


def _linked(title: str) -> str:
    """A link to a heading, for a cell of a table."""
    return f"[{title.replace('|', chr(92) + '|')}](#{_anchor(title)})"


def _anchor(title: str) -> str:
    """The link target that Markdown renderers generate for a heading."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")
