"""The benchmark: `make bench`. Side by side in one run; prints a table and writes bench/results.*.

python bench/run.py            everything, about ten minutes on two cores
python bench/run.py --quick    one repetition, no scaling: a check that it runs
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hosts
import jax.numpy as jnp
import torch
from cells import ALGORITHMS, CELLS, Cell, interleaved, median, ours
from matplotlib.figure import Figure
from torch_loop import Loop

from pfedme.algorithms import PFedMe
from pfedme.engine.devices import cores
from pfedme.files import atomic_write

HERE = Path(__file__).parent
KS = (1, 2, 5, 10, 20, 50)
CLIENTS = (100, 1_000, 10_000, 100_000, 1_000_000)


def timed(work: Callable[[], Any]) -> float:
    """Seconds that it takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def sgemm_gflops(size: int = 3072, repetitions: int = 5) -> float:
    """The machine's best single-precision matrix-product rate, of JAX's and PyTorch's products."""
    a = jnp.ones((size, size), jnp.float32)
    b = torch.ones((size, size))
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())
    products = [lambda: (a @ a).block_until_ready(), lambda: b @ b]
    best = min(min(timed(p) for _ in range(repetitions)) for p in products)
    torch.set_num_threads(threads)
    return 2 * size**3 / best / 1e9


def best_threads(loop: Loop) -> int:
    """The number of threads with which PyTorch's loop is fastest, tried on two clients."""
    seconds = {}
    for threads in (1, cores()):
        torch.set_num_threads(threads)
        loop.pfedme(range(1))
        seconds[threads] = timed(lambda: loop.pfedme(range(2)))
    best = min(seconds, key=lambda n: seconds[n])
    torch.set_num_threads(best)
    return best


def measure(cell: Cell, repetitions: int) -> dict[str, Any]:
    """All times of one cell."""
    federation = cell.federation()
    everyone, hidden = federation.clients, cell.network().hidden
    loop = Loop(federation, hidden)
    threads = best_threads(loop)
    measures: dict[str, Callable[[], float]] = {}
    for name, algorithm in ALGORITHMS.items():
        work = getattr(loop, name)
        work(range(1))
        measures[f"{name}/torch"] = lambda work=work: timed(lambda: work(range(everyone)))
        measures[f"{name}/all"] = ours(cell, algorithm, everyone, rounds=5)
        measures[f"{name}/cohort"] = ours(cell, algorithm, cell.cohort, rounds=20)
    for K in KS:
        algorithm = PFedMe(eta=0.01, alpha=0.01, K=K)
        measures[f"K/{K}"] = ours(cell, algorithm, everyone, rounds=5)
    measures["sgemm"] = lambda: 1 / sgemm_gflops()
    times = interleaved(measures, repetitions)
    middle = {name: median(values) for name, values in times.items()}
    flop = cell.plain_flop()
    result: dict[str, Any] = {
        "torch_threads": threads,
        "torch_s": middle["pfedme/torch"],
        "all_s": middle["pfedme/all"],
        "cohort_s": middle["pfedme/cohort"],
        "ratio_all": middle["pfedme/torch"] / middle["pfedme/all"],
        "ratio_cohort": middle["pfedme/torch"] / middle["pfedme/cohort"],
        "gflops": flop / middle["pfedme/all"] / 1e9,
        "sgemm_gflops": 1 / middle["sgemm"],
        "k50_over_k5": middle["K/50"] / middle["K/5"],
        "by_K_s": {str(K): middle[f"K/{K}"] for K in KS},
        "spread": {name: [min(values), max(values)] for name, values in times.items() if name != "sgemm"},
    }
    for name in ("fedavg", "per_fedavg"):
        result[name] = {kind: middle[f"{name}/{kind}"] for kind in ("torch", "all", "cohort")}
    return result


def child(script: str, *arguments: str) -> dict[str, Any]:
    """What a script of this folder prints, run in a process of its own."""
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def cores_speedup(repetitions: int) -> dict[str, float]:
    """How many times faster all cores are than one, by cell."""
    one, every = [], []
    for _ in range(repetitions):
        one.append(child("one_process.py", "1"))
        every.append(child("one_process.py"))
    return {name: median([t[name] for t in one]) / median([t[name] for t in every]) for name in CELLS}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| cell | PyTorch loop | ours, everyone | times faster | ours, cohort | times faster "
        "| GFLOP/s (plain) | K = 50 / K = 5 | all cores / one |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, c in results["cells"].items():
        speedup = results["cores_speedup"].get(name)
        lines.append(
            f"| {name} | {1e3 * c['torch_s']:.0f} ms | {1e3 * c['all_s']:.1f} ms | {c['ratio_all']:.0f} "
            f"| {1e3 * c['cohort_s']:.1f} ms | {c['ratio_cohort']:.0f} | {c['gflops']:.0f} "
            f"| {c['k50_over_k5']:.2f} | {f'{speedup:.2f}' if speedup else '–'} |"
        )
    lines += [
        "",
        "| FedAvg, Per-FedAvg | PyTorch loop | ours, everyone | ours, cohort |",
        "|---|---|---|---|",
    ]
    for name, c in results["cells"].items():
        for algorithm in ("fedavg", "per_fedavg"):
            t = c[algorithm]
            cells = " | ".join(f"{1e3 * t[kind]:.1f} ms" for kind in ("torch", "all", "cohort"))
            lines.append(f"| {algorithm.replace('_', '-')}, {name} | {cells} |")
    if results["clients"]:
        lines += ["", "| clients | time per round | peak memory | generated in |", "|---|---|---|---|"]
        lines += [
            f"| {c['n']:,} | {1e3 * c['round_s']:.2f} ms | {c['peak_rss_gib']:.2f} GiB "
            f"| {c['generate_s']:.1f} s |"
            for c in results["clients"]
        ]
    machine = results["machine"]
    lines += [
        "",
        f"{machine['cores']} cores, {machine['sgemm_gflops']:.0f} GFLOP/s in a large matrix product.",
    ]
    return "\n".join(lines) + "\n"


def plots(results: dict[str, Any], path: Path) -> None:
    """Time per round against K, against the number of clients, and against cores."""
    figure = Figure(figsize=(9.6, 3.0), layout="constrained", dpi=160)
    by_K, by_N, by_cores = figure.subplots(1, 3)
    for marker, (name, c) in zip("osD^", results["cells"].items(), strict=True):
        base = c["by_K_s"]["5"]
        by_K.plot(KS, [c["by_K_s"][str(K)] / base for K in KS], marker=marker, label=name, markersize=4)
    by_K.set(xscale="log", xlabel="inner steps K", ylabel="time per round, K = 5 is 1")
    by_K.set_ylim(bottom=0)
    by_K.legend(fontsize=7, frameon=False)
    if results["clients"]:
        n, t = zip(*((c["n"], 1e3 * c["round_s"]) for c in results["clients"]), strict=True)
        by_N.plot(n, t, marker="o", markersize=4)
    by_N.set(xscale="log", xlabel="clients N (cohort 100)", ylabel="ms per round")
    by_N.set_ylim(bottom=0)
    by_cores.bar(list(results["cores_speedup"]), list(results["cores_speedup"].values()), width=0.6)
    by_cores.set(ylabel=f"speed of {results['machine']['cores']} cores over one")
    by_cores.tick_params(axis="x", rotation=25, labelsize=7)
    for at in (by_K, by_N, by_cores):
        at.grid(alpha=0.3, linewidth=0.5)
        at.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    """Measures, prints and stores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repetition and no scaling")
    parser.add_argument(
        "--out", type=Path, default=HERE, help="folder for results.json, results.md, results.png"
    )
    quick = (args := parser.parse_args()).quick
    results: dict[str, Any] = {
        "machine": {"cores": cores(), "sgemm_gflops": sgemm_gflops()},
        "cells": {},
    }
    for name, cell in CELLS.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        results["cells"][name] = measure(cell, 1 if quick else 5)
    print("cores ...", file=sys.stderr, flush=True)
    results["cores_speedup"] = {} if quick else cores_speedup(2)
    print("hosts ...", file=sys.stderr, flush=True)
    results["hosts"] = [] if quick else hosts.measured()
    results["clients"] = []
    for n in () if quick else CLIENTS:
        print(f"{n:,} clients ...", file=sys.stderr, flush=True)
        results["clients"].append(child("scale.py", str(n)))
    args.out.mkdir(parents=True, exist_ok=True)
    if (before := args.out / "results.json").exists():  # bench/deployed.py writes this part
        results["deployed"] = json.loads(before.read_text()).get("deployed", [])
    atomic_write(args.out / "results.json", json.dumps(results, indent=1))
    atomic_write(args.out / "results.md", table(results))
    plots(results, args.out / "results.png")
    print(table(results))


if __name__ == "__main__":
    main()
