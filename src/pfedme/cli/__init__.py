"""The command line. Everything heavy is imported by the command that needs it, so that help is quick."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pfedme import __version__
from pfedme.errors import InputError, Interrupted, RunError, unknown

if TYPE_CHECKING:
    from pfedme.algorithms import Algorithm
    from pfedme.data import Source
    from pfedme.data.federation import Federation
    from pfedme.engine.choices import Personalize
    from pfedme.runs.run import Run

PERSONALIZE = "auto, or auto:steps=200,...: each client finds its own λ and whether joining pays"
TRACK = "tensorboard or mlflow, with options after a colon, to follow the run with; several can be given"
ALGORITHM_NAMES = "pfedme, fedavg, per-fedavg, alone, fedavg-ft, pooled"

EXAMPLES = {
    "": """\
examples:
  pfedme run pfedme --data synthetic --rounds 100
  pfedme compare pfedme fedavg alone --data mnist --rounds 100 --seeds 3
  pfedme data describe --data mnist:partition=dirichlet,alpha=0.3,clients=50
  pfedme resume runs/my-run""",
    "run": """\
examples:
  pfedme run pfedme --data synthetic --model mlr --rounds 600 --cohort 10 --lam 20 --eta 0.01 --beta 2
  pfedme run per-fedavg --data mnist --model dnn:hidden=100 --alpha 0.02 --eta 0.001 --out runs/per
  pfedme run pfedme --data synthetic --nu 1e-4 --solver nesterov --json > result.json
  pfedme run pfedme --data patients.csv --client hospital --label outcome
  pfedme run pfedme --data synthetic --track tensorboard --track mlflow:experiment=hospitals""",
    "compare": """\
an option applies to every algorithm that has it; NAME:field=value,... sets one for NAME alone

examples:
  pfedme compare pfedme fedavg alone --data synthetic --rounds 200 --eta 0.01 --seeds 5
  pfedme compare pfedme:lam=20,beta=2 pfedme:lam=5,beta=2 fedavg:eta=0.02 --data mnist""",
    "tune": """\
a hyperparameter that is given is fixed, the others are searched; the same command goes on with a search
that was stopped, or that is to have more trials; test rows are never read

examples:
  pfedme tune pfedme --data synthetic --rounds 200 --cohort 10 --trials 30 --out runs/tuned
  pfedme tune pfedme --data mnist --lam 15 --R 20 --search grid --trials 40 --out runs/grid
  pfedme tune fedavg --data synthetic --model dnn --rounds 100 --json > best.json""",
    "data": """\
examples:
  pfedme data describe                          the paper's synthetic federation
  pfedme data describe --data synthetic:alpha=1,beta=1,clients=30
  pfedme data describe --data mnist:partition=released
  pfedme data describe --data patients.csv --client hospital --label outcome --out described""",
    "reproduce": """\
what: table1, figure1 ... figure7, cost (figures 6 and 7 at equal cost), theory, audit, all

examples:
  pfedme reproduce table1 --quick               a tenth of the rounds, two seeds
  pfedme reproduce all --out docs               everything
what has been run already is kept in OUT/runs and is not run again; delete it to start over""",
    "personalize": """\
examples:
  pfedme personalize runs/my-run                its clients: alone, global, fine-tuned or their own λ
  pfedme personalize runs/my-run --data synthetic:clients=10,seed=1 --out newcomers
  pfedme personalize runs/my-run --personalize auto:steps=200,folds=3""",
    "study": """\
examples:
  pfedme study gain --quick                     a few minutes, one seed
  pfedme study gain --out docs                  docs/gain.md and docs/results/gain.csv
  pfedme study verdict --out docs               docs/results/verdict.md: how often the verdict is wrong""",
    "report": """\
examples:
  pfedme report runs/my-run -o my-run.html
  pfedme report runs/first runs/my-run -o both.html     runs and comparisons on one page""",
    "export": """\
examples:
  pfedme export runs/my-run --client Dayton -o models/dayton
  pfedme export runs/my-run -o models/shared    the shared model
  pfedme export runs/my-run --client Dayton --which personal -o models/dayton""",
    "predict": """\
examples:
  pfedme predict models/dayton --data new.csv -o predictions.csv
  pfedme predict models/dayton --data new.csv --keep id,age -o predictions.csv""",
    "keys": """\
run it again to add clients, or to see fingerprints; what exists is kept

examples:
  pfedme keys --own north -o north              at the client north, which then sends north/key.pub
  pfedme keys --server fed.example.org,10.0.0.7 --add north.pub south.pub -o keys     at the server
  pfedme keys --server localhost --clients east west -o trial""",
    "server": """\
examples:
  pfedme server --algorithm pfedme --lam 15 --rounds 50 --cohort 5 --min-clients 5 --keys keys --out runs/fed
  pfedme server --resume runs/fed               after a stop, from its last round
  pfedme server --insecure --min-clients 2      on this machine only, to try it""",
    "client": """\
examples:
  pfedme client --server fed.example.org:9092 --data my.csv --label outcome --keys north --state state
  pfedme client --server 127.0.0.1:9092 --data my.csv --label outcome --insecure --state state
afterwards: pfedme predict state/model --data new.csv -o predictions.csv""",
    "resume": """\
examples:
  pfedme resume runs/my-run                     a run or a comparison that was interrupted""",
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message[:1].upper()}{message[1:]}; see '{self.prog} --help'.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0 done, 1 failed or diverged, 2 wrong input."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    try:
        for number in (signal.SIGTERM, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGTERM,):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, signal.default_int_handler)
        status = _dispatch([word for word in argv if word != "--debug"])
        sys.stdout.flush()
        return status
    except (InputError, RunError) as error:
        if debug:
            raise
        print(f"pfedme: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except Interrupted as error:
        how = f"; {error.goes_on}" if error.goes_on else ""
        print(f"pfedme: interrupted{how}.", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("pfedme: interrupted; nothing is lost.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone; Python must not try to flush it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug or not _is_resource_error(error):
            raise
        print(f"pfedme: {str(error).splitlines()[0] if str(error) else 'out of memory'}", file=sys.stderr)
        return 1


def _is_resource_error(error: Exception) -> bool:
    """Whether the machine, rather than this program, is to blame: disk, memory, XLA's allocator."""
    return isinstance(error, OSError | MemoryError) or type(error).__name__ == "JaxRuntimeError"


def _dispatch(argv: list[str]) -> int:
    commands = {
        "run": (_run, "train one algorithm on a federation"),
        "compare": (_compare, "train several on the same data and put them into one table"),
        "personalize": (_personalize, "find the right model for each client of a run, or for newcomers"),
        "tune": (_tune, "search for hyperparameters by validation rows"),
        "data": (_data, "describe a federation"),
        "reproduce": (_reproduce, "carry out the paper's experiments and judge its claims"),
        "study": (_study, "measure what joining is worth, and how often the verdict is wrong"),
        "report": (_report, "put runs and comparisons on one HTML page"),
        "export": (_export, "write a client's model, or the shared one, into a folder to use it from"),
        "predict": (_predict, "predict the rows of a table by an exported model"),
        "keys": (_keys, "create the keys of a server and of clients on other machines"),
        "server": (_server, "train with clients on their own machines"),
        "client": (_client, "take part with a table that stays on this machine"),
        "resume": (_resume, "go on with an interrupted run or comparison"),
    }
    if not argv or argv[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:<12}{what}" for name, (_, what) in commands.items())
        print(
            "usage: pfedme COMMAND [options]\n\n"
            "Personalized federated learning with Moreau envelopes.\n\n"
            f"commands:\n{lines}\n\n"
            f"algorithms: {ALGORITHM_NAMES}\n"
            "data:       synthetic, mnist, with options as in mnist:partition=released,\n"
            "            or a table of your own: patients.csv, with --client and --label\n"
            "models:     mlr, dnn, cnn, with options as in dnn:hidden=100-50\n\n"
            f"{EXAMPLES['']}\n\n"
            "'pfedme COMMAND --help' tells a command's options; --version the version."
        )
        return 0
    if argv[0] == "--version":
        print(f"pfedme {__version__}")
        return 0
    if argv[0] not in commands:
        raise unknown("command", argv[0], commands)
    return commands[argv[0]][0](argv[1:])


def _parser(command: str, description: str) -> Parser:
    return Parser(
        prog=f"pfedme {command}", description=description, epilog=EXAMPLES[command.split()[0]],
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip


def _training_parser(
    command: str, description: str, *, records: bool = True, simulated: bool = True
) -> Parser:
    """The options that commands which train share: the run's, and every algorithm's hyperparameters.

    `records` adds those of commands that leave a record of a run, `simulated` those of clients' rows.
    """
    from pfedme.algorithms import ALGORITHMS
    from pfedme.core.spec import field_docs, field_types
    from pfedme.engine.devices import keep_compiled_programs
    from pfedme.runs.run import CHOICES, Run

    keep_compiled_programs()
    parser = _parser(command, description)
    docs = field_docs(Run)
    add = parser.add_argument
    if simulated:
        _add_data(parser)
    add("--model", default="mlr", help="mlr (softmax or ridge regression), dnn, or cnn for images (mlr)")
    if simulated:
        add(
            "--rounds", type=_rounds, metavar="N", default=0,
            help="T: communication rounds, or auto: until the loss on validation rows has stopped falling "
            "(auto)",
        )  # fmt: skip
        add("--budget", type=int, metavar="N", default=Run.budget, help=f"{docs['budget']} ({Run.budget})")
        add("--quarter-at", metavar="N-...", help=docs["quarter_at"])
    else:
        add("--rounds", type=int, metavar="N", default=100, help=_plan_docs()["rounds"] + " (100)")
    add("--cohort", type=int, metavar="N", help=docs["cohort"])
    add("--seed", type=int, metavar="N", default=0, help=docs["seed"] + " (0)")
    if simulated:
        add("--eval-clients", type=int, metavar="N", help=docs["eval_clients"])
        for name in CHOICES:
            _add_field(parser, f"--{name.replace('_', '-')}", Run, name)
    add("--out", type=Path, metavar="DIR", help="folder for the results; a new one below runs/ if not given")
    parser.set_defaults(eval_every=None)
    if records:
        add("--eval-every", type=int, metavar="N", help=(docs if simulated else _plan_docs())["eval_every"])
        add("--force", action="store_true", help="overwrite what the folder holds")
        if simulated:
            add("--track", action="append", default=[], metavar="TRACKER", help=TRACK)
    add("--json", action="store_true", help="print the result as JSON on standard output, and nothing else")
    add("--debug", action="store_true", help="show the traceback of an error")
    group = parser.add_argument_group("hyperparameters")
    for name in _hyperparameters():
        owners = [cls for cls in ALGORITHMS.values() if name in field_types(cls)]
        defaults = {cls.name: getattr(cls, name) for cls in owners}
        shown = (
            str(next(iter(defaults.values())))
            if len(set(map(str, defaults.values()))) == 1
            else ", ".join(f"{n} {v}" for n, v in defaults.items())
        )
        whose = "" if len(owners) == len(ALGORITHMS) else f"[{', '.join(defaults)}] "
        _add_field(group, f"--{name.replace('_', '-')}", owners[0], name, whose, f" ({shown})")
    return parser


def _rounds(text: str) -> int:
    """A number of rounds; 0 for `auto`."""
    if text == "auto":
        return 0
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be auto or a whole number from 1 on, not '{text}'")
    return int(text)


def _add_field(
    parser: Any,
    flag: str,
    owner: type,
    field: str,
    before: str = "",
    after: str = "",
    dest: str | None = None,
) -> None:
    """The option that sets a field of a specification; its help is the field's, with the names it can be."""
    from pfedme.core.spec import choices, field_docs, field_types, metavar

    kind = field_types(owner)[field]
    shown, names = metavar(kind), choices(kind)
    listed = f" One of {', '.join(names)}." if names and "{" not in shown else ""
    text = before + " ".join(field_docs(owner)[field].split()) + listed + after
    parser.add_argument(flag, dest=dest or field, metavar=shown, help=text.replace("%", "%%"))


def _add_data(parser: Parser, default: str | None = "synthetic", help: str = "the federation") -> None:
    """The options that say where rows come from."""
    parser.add_argument(
        "--data", default=default, help=f"{help}: a name, with options after a colon, or the path of a table"
    )
    _add_table(parser, "tables of your own")


def _add_table(parser: Parser, title: str, without: str = "") -> None:
    """The options that say what a table is like."""
    from pfedme.core.spec import field_docs
    from pfedme.data.table import OPTIONS, Table

    group = parser.add_argument_group(title)
    for field in field_docs(Table):
        if field in OPTIONS and field != without:
            default = getattr(Table, field)
            shown = f" ({default})" if default not in (None, (), False) else ""
            if default is False:
                text = " ".join(field_docs(Table)[field].split())
                dest = f"table_{field}"
                group.add_argument(OPTIONS[field], dest=dest, action="store_const", const="true", help=text)
            else:
                _add_field(group, OPTIONS[field], Table, field, after=shown, dest=f"table_{field}")


def _source(args: argparse.Namespace, inherited: Source | None = None) -> Source:
    """Where the rows come from; what is not said about a table is as in the `inherited` one."""
    from pfedme.data import BUILT_IN, parse_data
    from pfedme.data.table import OPTIONS, Table

    given = {field: getattr(args, f"table_{field}") for field in OPTIONS}
    if isinstance(inherited, Table) and args.data.partition(":")[0] not in BUILT_IN:
        own = {field: getattr(inherited, field) for field in OPTIONS if field != "test"}
        given = {field: value if value is not None else own.get(field) for field, value in given.items()}
    return parse_data(args.data, given)


def _hyperparameters() -> list[str]:
    """The names of all algorithms' fields, each once."""
    from pfedme.algorithms import ALGORITHMS
    from pfedme.core.spec import field_types

    return list(dict.fromkeys(name for cls in ALGORITHMS.values() for name in field_types(cls)))


def _parse(parser: Parser, argv: list[str]) -> argparse.Namespace:
    args, rest = parser.parse_known_args(argv)
    if rest:
        known = [s for action in parser._actions for s in action.option_strings if s.startswith("--")]
        raise (
            unknown("option", rest[0].partition("=")[0], known)
            if rest[0].startswith("-")
            else InputError(f"'{rest[0]}' was not expected; see '{parser.prog} --help'.")
        )
    return args


def _algorithms(args: argparse.Namespace, texts: Sequence[str]) -> list[Algorithm]:
    """The algorithms that the command line describes."""
    from pfedme.algorithms import ALGORITHMS
    from pfedme.core.spec import build, field_types, parse, to_json

    given = {n: v for n in _hyperparameters() if (v := getattr(args, n)) is not None}
    chosen = [parse(text, ALGORITHMS, "algorithm") for text in texts]
    for name in given:
        if not any(name in field_types(type(a)) for a in chosen):
            raise InputError(
                f"--{name.replace('_', '-')} is no option of {', '.join(a.name for a in chosen)}, whose "
                f"hyperparameters are {', '.join(to_json(chosen[0]))}."
            )
    algorithms = []
    for text, algorithm in zip(texts, chosen, strict=True):
        own = {pair.partition("=")[0].strip() for pair in text.partition(":")[2].split(",")}
        fields = field_types(type(algorithm))
        extra = {n: v for n, v in given.items() if n in fields and n not in own}
        what = f"algorithm '{algorithm.name}'"
        algorithms.append(build(type(algorithm), {**to_json(algorithm), **extra}, what))
    return algorithms


def _runs(args: argparse.Namespace, algorithms: Sequence[str]) -> list[Run]:
    """The runs that the command line describes, one for each algorithm."""
    from pfedme.core.models import parse_model
    from pfedme.core.spec import check
    from pfedme.runs.run import CHOICES, NUMBERS, Run, parse_held_out

    later = getattr(args, "holdout_clients", None)
    quarters = [] if args.quarter_at is None else args.quarter_at.split("-")
    if not all(part.isdecimal() for part in quarters):
        raise InputError(
            f"--quarter-at must be rounds joined by '-', such as 100-150, not '{args.quarter_at}'."
        )
    chosen, data = _algorithms(args, algorithms), _source(args)
    return [
        check(
            Run(
                algorithm=algorithm, data=data, model=parse_model(args.model),
                **{name: getattr(args, name) for name in (*NUMBERS, *CHOICES)},
                budget=args.budget, quarter_at=tuple(map(int, quarters)),
                holdout_clients=None if later is None else parse_held_out(later),
                personalize=_how(getattr(args, "personalize", None)),
            ),
            "the run",
        )
        for algorithm in chosen
    ]  # fmt: skip


def _new_folder(name: str) -> Path:
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folders = (Path("runs") / (name if k == 1 else f"{name}-{k}") for k in itertools.count(1))
    return next(folder for folder in folders if not folder.exists())


def _run(argv: list[str]) -> int:
    parser = _training_parser("run", "Trains one algorithm on a federation and records the result.")
    parser.add_argument("algorithm", metavar="ALGORITHM", help=ALGORITHM_NAMES)
    parser.add_argument("--personalize", metavar="HOW", help=PERSONALIZE)
    parser.add_argument(
        "--holdout-clients", metavar="WHO",
        help="share of the clients (0.2), or their names joined by commas, that take no part in training "
        "and come later, to see how newcomers fare",
    )  # fmt: skip
    args = _parse(parser, argv)
    (run,) = _runs(args, [args.algorithm])
    out = args.out or _new_folder(run.algorithm.name)

    from pfedme.cli.screen.bars import Bar
    from pfedme.training.execute import execute
    from pfedme.training.track import parse_trackers

    track = parse_trackers(args.track)
    with Bar(total=run.rounds or None) as bar:
        result = execute(
            run, out, force=args.force, watch=lambda p: bar(run.algorithm.name, 0, p), track=track
        )
    return _show_run(result.record, result.federation, out, as_json=args.json)


def _show_run(record: dict[str, Any], federation: Federation | None, out: Path, *, as_json: bool) -> int:
    """Prints a finished run, and what it offers its clients and newcomers if that was asked for."""
    from pfedme.cli.screen.federations import print_notes
    from pfedme.cli.screen.runs import print_run
    from pfedme.personalization.afterwards import left_to_do

    _write_report(out)
    document = {"out": str(out), "final": record["final"], "timing": record["timing"]}
    if not as_json:
        print_run(record, out, federation)
        print_notes(federation.notes if federation else ())
    members, held_out = left_to_do(out, record["config"])
    if members or held_out:
        again = ["resume", str(out)]
        document |= _offer(out, out, None, None, again, members=members, held_out=held_out, as_json=as_json)
    if "track" in record:
        from pfedme.report.html.page import NAME
        from pfedme.training.track import keep

        keep(out, out / NAME)
    if as_json:
        print(json.dumps(document))
    return 0


def _how(text: str | None) -> Personalize | None:
    """The way to find clients' models that `auto:steps=200` describes."""
    from pfedme.core.spec import parse
    from pfedme.engine.choices import Personalize

    return parse(text, {Personalize.name: Personalize}, "personalization") if text else None


def _offer(
    path: Path,
    out: Path,
    how: Personalize | None,
    data: argparse.Namespace | None,
    again: list[str],
    *,
    members: bool = True,
    held_out: bool = True,
    as_json: bool,
) -> dict[str, Any]:
    """The models that a finished run offers its clients, the newcomers that it held out, or other data's;
    `again` is the command that does it if it is interrupted."""
    from pfedme.cli.screen.bars import Steps
    from pfedme.cli.screen.personalization import print_newcomers, print_offer
    from pfedme.personalization.afterwards import offer, write_page
    from pfedme.personalization.finished import FinishedRun

    try:
        finished = FinishedRun.open(path)
        newcomers = _source(data, finished.run.data) if data is not None else None
        with Steps() as steps:
            offered = offer(
                finished, how, newcomers, out=out, members=members, held_out=held_out, watch=steps
            )
        write_page(path, out, newcomers)
    except KeyboardInterrupt:
        command = shlex.join(["pfedme", *again])
        raise Interrupted(None, f"the run is finished, and '{command}' does the rest") from None
    if not as_json:
        if offered.found is not None:
            print_offer(offered.found, out)
        if offered.levels:
            print_newcomers(offered.levels, out)
        if newcomers is not None:
            print(f"Report: {out}/report.html")
    return offered.to_json()


def _personalize(argv: list[str]) -> int:
    parser = _parser(
        "personalize", "Finds the right model for each client of a finished run, or for newcomers."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a finished run")
    _add_data(parser, None, "newcomers, a federation that took no part, or the run's clients if not given")
    parser.add_argument("--personalize", metavar="HOW", help=PERSONALIZE)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the results; the run's own if not given"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = _parse(parser, argv)
    if args.data and not args.out:
        raise InputError("Newcomers' models need a folder of their own: give --out DIR.")

    from pfedme.engine.devices import keep_compiled_programs
    from pfedme.files import refuse_file

    keep_compiled_programs()
    out = args.out or args.run
    refuse_file(out)
    if args.data and (out / "record.json").exists():
        raise InputError(f"{out} holds a run; newcomers' models need a folder of their own.")
    newcomers = args if args.data else None
    again = ["personalize", *argv]
    said = _offer(args.run, out, _how(args.personalize), newcomers, again, as_json=args.json)
    if args.json:
        print(json.dumps({"out": str(out), **said}))
    return 0


def _compare(argv: list[str]) -> int:
    parser = _training_parser("compare", "Trains several algorithms on the same data; one table, one figure.")
    parser.add_argument("algorithms", metavar="ALGORITHM", nargs="+", help=ALGORITHM_NAMES)
    parser.add_argument(
        "--seeds", type=int, metavar="N", default=1, help="repetitions with seeds --seed, --seed + 1, ... (1)"
    )
    args = _parse(parser, argv)
    if args.seeds < 1:
        raise InputError(f"--seeds must be at least 1, not {args.seeds}.")
    runs = _runs(args, args.algorithms)
    out = args.out or _new_folder("compare")

    from pfedme.cli.screen.bars import Bar
    from pfedme.training.compare import compare
    from pfedme.training.track import parse_trackers

    track = parse_trackers(args.track)
    known = all(run.rounds for run in runs)
    with Bar(total=sum(run.rounds for run in runs) * args.seeds if known else None) as bar:
        comparison = compare(runs, args.seeds, out, force=args.force, watch=bar, track=track)
    status = _show_comparison(comparison, out, as_json=args.json)
    if not args.json:
        from pfedme.cli.screen.federations import print_notes
        from pfedme.runs.run import load

        print_notes(load(runs[0].data).notes)
    return status


def _show_comparison(comparison: Any, out: Path, *, as_json: bool) -> int:
    from pfedme.cli.screen.runs import print_comparison

    _write_report(out)
    if as_json:
        verdict = {"verdict": comparison.verdict.to_json()} if comparison.verdict else {}
        print(json.dumps({"out": str(out), "results": comparison.finals, **verdict}))
    else:
        print_comparison(comparison, out)
    for reason in comparison.failures:
        print(f"pfedme: {reason}", file=sys.stderr)
    return 1 if comparison.failures else 0


def _tune(argv: list[str]) -> int:
    from pfedme.arguments import searching

    Search, tune = searching()
    parser = _training_parser("tune", "Searches for an algorithm's hyperparameters.", records=False)
    parser.add_argument("algorithm", metavar="ALGORITHM", help=ALGORITHM_NAMES)
    parser.add_argument(
        "--trials", type=int, metavar="N", help="trials in all (30; with grid, all of its points)"
    )
    parser.add_argument(
        "--search", choices=("tpe", "grid"), default="tpe",
        help="tpe, which follows what did well so far, or a grid in an order drawn by --seed (tpe)",
    )  # fmt: skip
    args = _parse(parser, argv)
    if args.trials is not None and args.trials < 1:
        raise InputError(f"--trials must be at least 1, not {args.trials}.")
    (run,) = _runs(args, [args.algorithm])
    own = {pair.partition("=")[0].strip() for pair in args.algorithm.partition(":")[2].split(",")}
    fixed = own | {name for name in _hyperparameters() if getattr(args, name) is not None}
    out = args.out or _new_folder(f"tune-{run.algorithm.name}")

    from pfedme.cli.screen.bars import SearchBar
    from pfedme.cli.screen.tuning import print_tuning

    try:
        with SearchBar() as bar:
            search = Search.over(run, fixed, args.search, lambda t: bar.pilot(run.algorithm.name, t))
            tuning = tune(search, args.trials, out, watch=bar)
    except KeyboardInterrupt:
        again = shlex.join(["pfedme", "tune", *argv, *([] if args.out else ["--out", str(out)])])
        print(f"pfedme: interrupted; the same command goes on where it stopped: {again}", file=sys.stderr)
        return 130
    if args.json:
        best, key = tuning.best[0], tuning.measure.key
        trials = [dataclasses.asdict(trial) for trial in tuning.trials]
        print(json.dumps({
            "out": str(out), "best": best.settings, "model": best.model, f"validation_{key}": best.accuracy,
            "mattered": tuning.mattered, "command": tuning.run.command(),
            "trials": [{key if k == "accuracy" else k: v for k, v in trial.items()} for trial in trials],
        }))  # fmt: skip
    else:
        print_tuning(tuning, out)
    return 0


def _data(argv: list[str]) -> int:
    if argv[:1] not in (["describe"], ["-h"], ["--help"]):
        raise unknown("data command", argv[0] if argv else "", ["describe"])
    parser = _parser("data describe", "Tells what a federation looks like.")
    _add_data(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for a picture of each client's labels"
    )
    parser.add_argument("--json", action="store_true", help="print the description as JSON")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = _parse(parser, argv[1:] if argv[0] == "describe" else argv)

    from pfedme.cli.screen.bars import waiting
    from pfedme.cli.screen.federations import print_description
    from pfedme.files import atomic_write, refuse_file, writing
    from pfedme.report.describe import describe

    if args.out:
        refuse_file(args.out)
    with waiting(f"reading {args.data}"):
        federation = _source(args).load()
    with waiting("describing it"):
        description = describe(federation)
    if args.out:
        from pfedme.report.spread import labels_figure

        with writing(args.out):
            args.out.mkdir(parents=True, exist_ok=True)
            atomic_write(args.out / "labels.png", labels_figure(federation))
    if args.json:
        print(json.dumps({"data": args.data, **description}))
    else:
        print_description(args.data, description, federation)
    return 0


def _reproduce(argv: list[str]) -> int:
    parser = _parser("reproduce", "Carries out the paper's experiments: tables, figures and verdicts.")
    parser.add_argument(
        "what", metavar="WHAT", nargs="+", help="table1, figure1 ... figure7, ..., audit, all"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds, two seeds")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("reproduction"),
        help="folder for the results (reproduction)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON on standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = _parse(parser, argv)

    from pfedme.cli.screen.bars import Bar
    from pfedme.cli.screen.studies import print_findings
    from pfedme.engine.devices import keep_compiled_programs
    from pfedme.experiments import paper
    from pfedme.experiments.reproduce import expand, reproduce, wishes
    from pfedme.experiments.study import Study
    from pfedme.files import refuse_file

    keep_compiled_programs()
    expand(args.what)
    refuse_file(args.out)
    scale = paper.QUICK if args.quick else paper.FULL
    command = shlex.join(["pfedme", "reproduce", *args.what, *(["--quick"] if args.quick else [])])
    plan = wishes(args.what, scale)
    try:
        with Bar(total=max(1, Study(args.out, command).rounds(plan))) as bar:
            findings = reproduce(args.what, scale, args.out, command, bar)
    except Interrupted:
        again = f"{command} --out {shlex.quote(str(args.out))}"
        print(f"pfedme: interrupted; the same command goes on where it stopped: {again}", file=sys.stderr)
        return 130
    if args.json:
        said = [{"claim": f.claim, "verdict": f.verdict, "numbers": f.numbers} for f in findings]
        print(json.dumps({"out": str(args.out), "findings": said}, ensure_ascii=False))
    else:
        print_findings(findings, args.out)
    return 0


def _study(argv: list[str]) -> int:
    studies = {"gain": _study_gain, "verdict": _study_verdict}
    if argv[:1] in (["-h"], ["--help"]):
        argv = ["gain", *argv]
    if not argv or argv[0] not in studies:
        raise unknown("study", argv[0] if argv else "", list(studies))
    return studies[argv[0]](argv[1:])


def _study_parser(name: str, about: str, quick: str) -> Parser:
    parser = _parser(f"study {name}", about)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("study"), help="folder for the results (study)"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON on standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _study_gain(argv: list[str]) -> int:
    about = "Measures what joining is worth to clients, on a range of federations."
    args = _parse(_study_parser("gain", about, "a fifth of the rounds and steps, one seed"), argv)

    from pfedme.cli.screen.bars import Steps
    from pfedme.cli.screen.studies import print_gain
    from pfedme.engine.devices import keep_compiled_programs
    from pfedme.experiments import gain
    from pfedme.experiments.study import Study
    from pfedme.files import refuse_file

    keep_compiled_programs()
    refuse_file(args.out)
    command = shlex.join(["pfedme", "study", "gain", *(["--quick"] if args.quick else [])])
    try:
        with Steps() as steps:
            rows = gain.study_gain(Study(args.out, command), gain.QUICK if args.quick else gain.FULL, steps)
    except KeyboardInterrupt:
        again = f"{command} --out {shlex.quote(str(args.out))}"
        print(f"pfedme: interrupted; the same command goes on where it stopped: {again}", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps({"out": str(args.out), "federations": {r.setting.name: r.mean for r in rows}}))
    else:
        print_gain(rows, args.out)
    return 0


def _study_verdict(argv: list[str]) -> int:
    about = "Measures how often the verdict is wrong, on federations whose truth is known."
    args = _parse(_study_parser("verdict", about, "10 repetitions instead of 200"), argv)

    from pfedme.cli.screen.bars import Steps
    from pfedme.cli.screen.studies import print_verdicts
    from pfedme.engine.devices import keep_compiled_programs
    from pfedme.experiments.study import Study
    from pfedme.experiments.verdicts import study_verdicts
    from pfedme.files import refuse_file

    keep_compiled_programs()
    refuse_file(args.out)
    command = shlex.join(["pfedme", "study", "verdict", *(["--quick"] if args.quick else [])])
    try:
        with Steps() as steps:
            found = study_verdicts(Study(args.out, command), 10 if args.quick else 200, steps)
    except KeyboardInterrupt:
        print("pfedme: interrupted; nothing was written.", file=sys.stderr)
        return 130
    if args.json:
        federations = {s.setting.name: dataclasses.asdict(s) | {"setting": s.setting.about} for s in found}
        print(json.dumps({"out": str(args.out), "federations": federations}))
    else:
        print_verdicts(found, args.out)
    return 0


def _write_report(out: Path) -> None:
    """The page about the run or the comparison in a folder, put into it."""
    from pfedme.report.html.page import NAME, report

    report([out], out / NAME, force=True)


def _report(argv: list[str]) -> int:
    parser = _parser("report", "Puts runs and comparisons on one HTML page that needs nothing else.")
    parser.add_argument(
        "folders", metavar="DIR", type=Path, nargs="+", help="the folder of a run or of a comparison"
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (report.html)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = _parse(parser, argv)

    from pfedme.report.html.page import report

    report(args.folders, args.out, force=args.force)
    print(f"Report: {args.out}")
    return 0


def _export(argv: list[str]) -> int:
    parser = _parser("export", "Writes one model of a finished run, with all that using it needs.")
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a finished run")
    parser.add_argument("--client", metavar="ID", help="whose model; the shared one if not given")
    parser.add_argument(
        "--which", choices=("recommended", "personal", "global"),
        help="if not given: what the client was recommended, else its personal model, else the shared one",
    )  # fmt: skip
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder for the model")
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = _parse(parser, argv)

    from pfedme.export import model_of

    model = model_of(args.run, args.client, args.which)
    model.save(args.out, force=args.force)
    which = model.origin["which"]
    if args.json:
        print(json.dumps({"out": str(args.out), **model.origin}))
        return 0
    whose = "shared model" if which == "global" else f"{which} model of {model.origin['client']}"
    missing = args.client is not None and which == "global" and args.which is None
    print(f"The {whose} is in {args.out}." + (" The run has no models of single clients." if missing else ""))
    print(f"To use it: pfedme predict {shlex.quote(str(args.out))} --data TABLE -o predictions.csv")
    return 0


def _predict(argv: list[str]) -> int:
    parser = _parser("predict", "Predicts the rows of a table, in their order, by an exported model.")
    parser.add_argument("model", metavar="DIR", type=Path, help="the folder of an exported model")
    parser.add_argument("--data", type=Path, required=True, metavar="TABLE", help="CSV, TSV, Parquet or NPZ")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("predictions.csv"), metavar="FILE",
        help="the predictions as CSV (predictions.csv)",
    )  # fmt: skip
    parser.add_argument(
        "--keep", metavar="COLUMNS", default="",
        help="columns of the table to copy into the predictions, joined by commas",
    )  # fmt: skip
    parser.add_argument(
        "--strict", action="store_true",
        help="refuse missing values, and categories that the training rows do not have",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="overwrite the file, but never the table itself")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = _parse(parser, argv)

    from pfedme.cli.screen.bars import waiting
    from pfedme.core.spec import parse_names
    from pfedme.data.gaps import Gaps
    from pfedme.data.reading import files_of
    from pfedme.export import load
    from pfedme.files import atomic_file, refuse_file, writing

    refuse_file(args.out.parent)
    if args.out.exists() and any(os.path.samefile(args.out, file) for file in files_of(args.data)):
        raise InputError(
            f"-o {args.out} is the table to predict, which is never overwritten; choose another -o."
        )
    if args.out.is_dir() or (args.out.exists() and not args.force):
        what = "is a folder" if args.out.is_dir() else "exists"
        force = "" if args.out.is_dir() else ", or --force to overwrite it"
        raise InputError(f"{args.out} {what}; choose another -o{force}.")
    gaps = None if args.strict else Gaps()
    frames = load(args.model).predict_file(args.data, parse_names(args.keep), gaps)
    rows = 0
    with writing(args.out), waiting("predicting") as told:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(args.out) as file:
            for k, frame in enumerate(frames):
                frame.write_csv(file, include_header=k == 0)
                rows += frame.height
                told(f"{rows:,} rows predicted")
    if not rows:
        print(f"pfedme: {args.data} has no rows; {args.out} has a header only.", file=sys.stderr)
    if gaps and (found := gaps.sentence(str(args.data))):
        print(f"pfedme: {found} --strict makes this an error.", file=sys.stderr)
    print(f"{rows:,} predictions: {args.out}")
    return 0


def _needs_flower(command: str) -> None:
    if importlib.util.find_spec("flwr") is None:
        raise InputError(f"pfedme {command} needs Flower: pip install 'pfedme[flower]'.")


def _keys(argv: list[str]) -> int:
    parser = _parser(
        "keys", "Creates a client's own key, or the server's certificate with the keys of its clients."
    )
    parser.add_argument(
        "--own", metavar="NAME", help="at a client: create the key of the client NAME, which stays there"
    )
    parser.add_argument(
        "--server", metavar="HOST,...",
        help="names and addresses by which clients reach the server, joined by commas; needed the first time",
    )  # fmt: skip
    parser.add_argument(
        "--add", metavar="FILE", nargs="+", default=[], type=Path,
        help="at the server: public keys (key.pub) that clients have sent",
    )  # fmt: skip
    parser.add_argument(
        "--clients", metavar="NAME", nargs="+", default=[],
        help="to try things out: clients whose keys are created here; "
        "whoever creates a client's key can take part as that client",
    )  # fmt: skip
    parser.add_argument("-o", "--out", type=Path, default=Path("keys"), metavar="DIR", help="folder (keys)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = _parse(parser, argv)
    _needs_flower("keys")

    from pfedme.deploy import keys

    out = args.out
    if args.own is not None:
        if args.server or args.add or args.clients:
            raise InputError("--own is for a client's machine; leave out --server, --add and --clients.")
        return _own_key(out, args.own)
    hosts = [host for host in (args.server or "").split(",") if host.strip()]
    given = keys.received(args.add)
    created = [name for name in keys.make(out, hosts, args.clients, given) if name not in given]
    for name in given:
        public = out / "clients" / keys.folder_name(name) / "key.pub"
        print(f"{name}: {public} has the fingerprint (SHA-256)\n  {keys.fingerprint(public)}")
    if given:
        print(f"Send {out}/ca.crt, which is no secret, to these clients. It has the fingerprint")
        print(f"  {keys.fingerprint(out / 'ca.crt')}\nCompare all fingerprints by telephone.")
    for name in created:
        print(f"{name}: hand over {out / 'clients' / keys.folder_name(name)}/ in a safe way.")
    if created:
        print(
            "Whoever has created a client's key can take part as that client. For more than a trial, let "
            "each client create its own with 'pfedme keys --own NAME'."
        )
    if any((out / "clients").glob("*/key.pub")):
        made = keys.server_keys(out)
        print(
            f"{len(made.clients)} clients. The server's certificate covers {', '.join(made.hosts)} until "
            f"{made.ends:%Y-%m-%d}."
        )
    print(
        f"The server needs {out}/ca.crt, server.crt, server.key and clients/*/key.pub. Keep {out}/ca.key "
        "where nobody else can get it: anyone who has it can impersonate the server."
    )
    return 0


def _own_key(out: Path, name: str) -> int:
    """Creates a client's own key and prints what to do next."""
    from pfedme.deploy.keys import fingerprint, make_own

    new = make_own(out, name)
    print(f"{out}/key is the {'new ' if new else ''}private key of {name}; it must not leave this machine.")
    print(f"{out}/key.pub has the fingerprint (SHA-256)\n  {fingerprint(out / 'key.pub')}")
    if (out / "ca.crt").exists():
        print(f"{out}/ca.crt has the fingerprint\n  {fingerprint(out / 'ca.crt')}")
        print("Compare both with whoever runs the server, by telephone.")
    else:
        print(
            f"Send {out}/key.pub, which is no secret, to whoever runs the server, and compare its "
            f"fingerprint by telephone.\nPut the ca.crt that comes back into {out}/. The same command then "
            "shows its fingerprint, which should be compared too."
        )
    return 0


def _plan_docs() -> dict[str, str]:
    from pfedme.core.spec import field_docs
    from pfedme.deploy.plan import Plan

    return {name: " ".join(text.split()) for name, text in field_docs(Plan).items()}


def _add_connection(parser: Parser, keys: str) -> None:
    """The options by which the two sides of a federation trust each other."""
    group = parser.add_argument_group("trust")
    group.add_argument("--keys", type=Path, metavar="DIR", help=f"{keys} (keys)")
    group.add_argument(
        "--insecure", action="store_true", help="plain text and no keys; for trying, on one machine"
    )
    group.add_argument(
        "--insecure-network",
        action="store_true",
        help="with --insecure: even over a network, where others can listen",
    )


def _add_limits(parser: Parser) -> None:
    """The options that say what a server may ask a client for."""
    from pfedme.core.spec import field_docs
    from pfedme.deploy.policy import Policy

    group = parser.add_argument_group(
        "limits", "What the server may ask for, whatever it asks for; or in policy.toml beside the table."
    )
    for name in field_docs(Policy):
        default = getattr(Policy, name)
        shown = ",".join(default) if isinstance(default, tuple) else default
        note = "" if shown in (None, "") else f" ({shown})"
        _add_field(group, f"--{name.replace('_', '-')}", Policy, name, after=note)


def _server(argv: list[str]) -> int:
    _needs_flower("server")
    from pfedme.cli.screen.runs import print_run
    from pfedme.deploy import commands
    from pfedme.deploy.plan import Plan

    parser = _training_parser("server", "Trains with clients on their own machines.", simulated=False)
    add = parser.add_argument
    add("--algorithm", default="pfedme", help=f"{ALGORITHM_NAMES} (pfedme)")
    for name in commands.OWN:
        default = getattr(Plan, name)
        shown = "" if default is None else f" ({default:g})"
        kind = int if isinstance(default, int | None) else float
        add(f"--{name.replace('_', '-')}", type=kind, default=default, help=_plan_docs()[name] + shown)
    add("--listen", metavar="HOST:PORT", help=f"where clients connect to (0.0.0.0:{commands.PORT})")
    add(
        "--resume",
        type=Path,
        metavar="DIR",
        help="go on with the run in this folder; only --listen and trust anew",
    )
    _add_connection(
        parser, "folder of the server's certificate and of clients' public keys, from 'pfedme keys'"
    )
    args = _parse(parser, argv)
    plan = None
    if args.resume is None:
        (algorithm,) = _algorithms(args, [args.algorithm])
        plan = commands.plan_of(args, algorithm)
        args.out = args.out or _new_folder(f"server-{algorithm.name}")
    else:
        commands.refuse_changes(args, parser.parse_args([]))
    record, out = commands.server(args, plan, argv)
    scores = any(kind in record["final"] for kind in ("global", "local", "personal"))
    if args.json:
        told = {key: record[key] for key in ("final", "timing", "deployment")}
        print(json.dumps({"out": str(out), **told}))
    elif scores:
        print_run(record, out, None)
    else:
        print("\n".join(commands.serve.summary(record, out)))
    return 0


def _client(argv: list[str]) -> int:
    parser = _parser("client", "Takes part in a federation with a table that stays on this machine.")
    parser.add_argument("--server", metavar="HOST:PORT", required=True, help="the server")
    parser.add_argument("--data", required=True, metavar="TABLE", help="its rows: CSV, TSV, Parquet or NPZ")
    parser.add_argument(
        "--state", type=Path, required=True, metavar="DIR",
        help="folder for this client's model, which no one else gets, and for its log",
    )  # fmt: skip
    parser.add_argument("--name", help="this client's name (that of its keys, else the file's)")
    parser.add_argument(
        "--share-metrics",
        action="store_true",
        help="let the server know how many rows the models are right about",
    )
    _add_connection(
        parser, "folder with this client's key, from 'pfedme keys --own', and the server's ca.crt"
    )
    parser.add_argument(
        "--wait", type=float, default=86400.0, metavar="SECONDS",
        help="how long to wait for a server that does not answer (86400)",
    )  # fmt: skip
    _add_limits(parser)
    _add_table(parser, "the table", without="client")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = _parse(parser, argv)
    _needs_flower("client")

    from pfedme.deploy import commands

    try:
        return commands.client(args)
    except KeyboardInterrupt:
        print("pfedme: interrupted; the same command takes part again.", file=sys.stderr)
        return 130


def _resume(argv: list[str]) -> int:
    parser = _parser(
        "resume", "Goes on with an interrupted run or comparison, to the same result to the bit."
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder that was given to --out")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = _parse(parser, argv)
    if not args.folder.is_dir():
        raise InputError(f"There is no folder {args.folder}.")

    from pfedme.cli.screen.bars import Bar
    from pfedme.engine.devices import keep_compiled_programs
    from pfedme.personalization.afterwards import left_to_do, page_is_late
    from pfedme.runs.folder import Folder
    from pfedme.runs.plan import PLAN, read_plan
    from pfedme.training.compare import resume_comparison
    from pfedme.training.execute import resume

    keep_compiled_programs()
    if (args.folder / PLAN).exists():
        jobs = read_plan(args.folder)
        rounds = [job["config"]["rounds"] for job in jobs]
        with Bar(total=sum(rounds) if all(rounds) else None) as bar:
            comparison = resume_comparison(args.folder, watch=bar)
        return _show_comparison(comparison, args.folder, as_json=args.json)
    record = Folder(args.folder).read()
    if record.get("status") == "finished" and (
        any(left_to_do(args.folder, record["config"])) or page_is_late(args.folder)
    ):
        Folder(args.folder).checkpoint.unlink(missing_ok=True)
        return _show_run(record, None, args.folder, as_json=args.json)
    rounds = record["config"].get("rounds", 1)
    with Bar(total=rounds or None) as bar:
        result = resume(args.folder, watch=lambda p: bar(args.folder.name, 0, p))
    return _show_run(result.record, result.federation, args.folder, as_json=args.json)
