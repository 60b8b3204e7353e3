"""Several runs in one compiled program: each is the run by itself, and none disturbs another."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from laws import assert_close, assert_same_bits, federation, fitting, optimised, tiny
from outside import OUTSIDE
from stops import Results, stop_at
from stops import tiny as tiny_run

from pfedme.algorithms import ALGORITHMS, Algorithm, FedAvg, PFedMe
from pfedme.engine.simulate import Simulation, State, advance
from pfedme.errors import Interrupted
from pfedme.runs.folder import Folder
from pfedme.runs.run import Run
from pfedme.training.compare import carry_out_plan
from pfedme.training.execution import Progress


def simulation(algorithm: Algorithm, seed: int, l2: float = 0.01) -> Simulation:
    return Simulation(algorithm, fitting(type(algorithm), l2), federation(), cohort=3, seed=seed)


def starts(simulations: list[Simulation]) -> list[State]:
    return [sim.start() for sim in simulations]


@pytest.mark.parametrize(
    "cls",
    [
        *(
            pytest.param(cls, marks=[pytest.mark.slow] * (cls not in (PFedMe,)))
            for cls in ALGORITHMS.values()
        ),
        *(pytest.param(cls, marks=pytest.mark.slow) for cls in OUTSIDE.values()),
    ],
    ids=[*ALGORITHMS, *OUTSIDE],
)
def test_runs_together_are_the_runs_by_themselves(cls: type[Algorithm]):
    sims = [
        simulation(tiny(cls, eta=eta), seed, l2)
        for eta, seed, l2 in ((0.05, 0, 0.01), (0.02, 3, 0), (0.1, 0, 0.3))
    ]
    with optimised():
        together = advance(sims, starts(sims), 4)
        alone = [sim.advance(state, 4)[0] for sim, state in zip(sims, starts(sims), strict=True)]
    for (after, finite), own in zip(together, alone, strict=True):
        assert finite
        assert after.t == own.t
        assert_close(after[1:], own[1:])


def test_runs_together_may_be_in_different_rounds():
    sims = [simulation(tiny(PFedMe), seed) for seed in (0, 1)]
    ahead, _ = sims[0].advance(sims[0].start(), 5)
    (first, _), (second, _) = advance(sims, [ahead, sims[1].start()], 2)
    assert (first.t, second.t) == (7, 2)
    assert_close(first.server, sims[0].advance(ahead, 2)[0].server)


def test_to_the_bit_it_does_not_matter_who_the_others_are():
    sims = [
        simulation(tiny(PFedMe, lam=lam), seed) for lam, seed in ((15.0, 0), (3.0, 1), (20.0, 2), (1.0, 3))
    ]
    a = advance([sims[0], sims[1], sims[2]], starts([sims[0], sims[1], sims[2]]), 4)[0]
    b = advance([sims[3], sims[2], sims[0]], starts([sims[3], sims[2], sims[0]]), 4)[2]
    assert_same_bits(a[0], b[0])


def test_a_run_that_goes_wrong_is_named_and_the_others_stand_before_that_round():
    sims = [simulation(tiny(FedAvg, eta=eta), 0) for eta in (0.05, 1e38)]
    (good, fine), (bad, broken) = advance(sims, starts(sims), 4)
    assert (fine, broken) == (True, False)
    assert good.t == bad.t == sims[1].advance(sims[1].start(), 4)[0].t < 4
    assert_same_bits(bad.server, sims[1].advance(sims[1].start(), 4)[0].server)


def seeds(n: int, **options: float) -> list[Run]:
    """The same run with several seeds."""
    run = tiny_run("pfedme")
    run = dataclasses.replace(run, algorithm=dataclasses.replace(run.algorithm, **options))
    return [dataclasses.replace(run, seed=seed) for seed in range(n)]


def plan(folder: Path, runs: list[Run]) -> list[tuple[str, Run, Path]]:
    return [("pfedme", run, folder / str(k)) for k, run in enumerate(runs)]


def test_runs_differ_in_program_by_anything_but_seeds_and_floats():
    run = tiny_run("pfedme")
    same = dataclasses.replace(run, seed=5, algorithm=dataclasses.replace(run.algorithm, lam=3.0))
    assert same.program() == run.program()
    others = [
        tiny_run("fedavg"),
        dataclasses.replace(run, rounds=7),
        dataclasses.replace(run, cohort=3),
        dataclasses.replace(run, algorithm=dataclasses.replace(run.algorithm, R=3)),
        dataclasses.replace(run, algorithm=dataclasses.replace(run.algorithm, nu=0.1)),
    ]
    assert len({run.program(), *(other.program() for other in others)}) == 6


@pytest.mark.parametrize("round", [3, *(pytest.param(r, marks=pytest.mark.slow) for r in (0, 6))])
def test_an_interrupted_plan_ends_as_the_uninterrupted_one_to_the_bit(tmp_path: Path, round: int):
    runs = seeds(3)
    carry_out_plan(plan(tmp_path / "whole", runs))

    def stop(label: str, place: int, progress: Progress) -> None:
        if place == 1:
            stop_at(round)(progress)

    with pytest.raises(Interrupted):
        carry_out_plan(plan(tmp_path / "parts", runs), stop)
    assert not all(Folder(tmp_path / "parts" / str(k)).status() == "finished" for k in range(3))
    carry_out_plan(plan(tmp_path / "parts", runs))
    for k in range(3):
        assert Results(tmp_path / "parts" / str(k)) == Results(tmp_path / "whole" / str(k))


def test_runs_at_different_rounds_end_as_if_they_had_kept_step(tmp_path: Path):
    runs = seeds(2)
    carry_out_plan(plan(tmp_path / "whole", runs))
    with pytest.raises(Interrupted):
        carry_out_plan(plan(tmp_path / "parts", runs), lambda _, place, p: stop_at(4)(p))
    Folder(tmp_path / "parts" / "0").checkpoint.unlink()  # as if it had been killed before the first
    carry_out_plan(plan(tmp_path / "parts", runs))
    for k in range(2):
        assert Results(tmp_path / "parts" / str(k)) == Results(tmp_path / "whole" / str(k))


def test_one_that_diverges_says_so_and_the_others_finish(tmp_path: Path):
    good, bad, other = *seeds(1), *seeds(1, eta=1e30), *seeds(1, lam=3.0)
    carry_out_plan(plan(tmp_path, [good, bad, other]))
    assert [Folder(tmp_path / str(k)).status() for k in range(3)] == ["finished", "diverged", "finished"]
    carry_out_plan(plan(tmp_path / "again", [good, good, other]))
    for k in (0, 2):
        assert Results(tmp_path / str(k)) == Results(tmp_path / "again" / str(k))


def test_a_plan_reports_what_was_done_before(tmp_path: Path):
    runs = seeds(2)
    carry_out_plan(plan(tmp_path, runs))
    told: list[tuple[int, int]] = []
    carry_out_plan(plan(tmp_path, runs), lambda _, place, p: told.append((place, p.round)))
    assert told == [(0, runs[0].rounds), (1, runs[1].rounds)]
