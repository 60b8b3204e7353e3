"""The same as the command line, from Python."""

from __future__ import annotations

from pathlib import Path

from pfedme.algorithms import ALGORITHMS, Algorithm
from pfedme.data import Source, parse_data
from pfedme.execute import Result, Watch, execute
from pfedme.models import MODELS, Description
from pfedme.run import Run
from pfedme.spec import parse


def train(
    algorithm: Algorithm | str,
    data: Source | str,
    *,
    model: Description | str = "mlr",
    rounds: int = 100,
    cohort: int | None = None,
    seed: int = 0,
    out: Path | str | None = None,
    force: bool = False,
    watch: Watch = lambda _: None,
) -> Result:
    """Trains one algorithm on a federation, as `pfedme run` does.

    Algorithm, data and model are what the command line takes (`"pfedme:lam=15"`) or objects. With `out` the
    run's folder is written, `report.html` included; `watch` is called with the progress of each few rounds.

    >>> from pfedme import PFedMe, train
    >>> result = train(PFedMe(lam=15.0, R=5), "synthetic:clients=5,rows=60", rounds=3)
    >>> sorted(result.record["final"])
    ['global', 'inner', 'local', 'personal', 'round']
    """
    run = Run(
        algorithm=parse(algorithm, ALGORITHMS, "algorithm") if isinstance(algorithm, str) else algorithm,
        data=parse_data(data) if isinstance(data, str) else data,
        model=parse(model, MODELS, "model") if isinstance(model, str) else model,
        rounds=rounds,
        cohort=cohort,
        seed=seed,
    )
    result = execute(run, Path(out) if out else None, force=force, watch=watch)
    if out:
        from pfedme.report.html.page import NAME, report

        report([Path(out)], Path(out) / NAME, force=True)
    return result
