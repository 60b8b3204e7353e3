"""The command line. A command's module is imported only when the command is used, so that help is fast."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from pfedme import __version__
from pfedme.cli.interrupts import INTERRUPTED
from pfedme.cli.registry import COMMANDS
from pfedme.core.plugins import registered
from pfedme.errors import InputError, Interrupted, RunError, unknown

ALGORITHM_NAMES = """\
pfedme, fedavg, per-fedavg, alone, fedavg-ft, pooled,
            fedprox, scaffold, feddyn, fedavgm, fedadam, fedyogi, fedadagrad, one-shot,
            reptile, aruba, fedmeta, ditto, mr-mtl, l2gd, apfl, mapper, label-prior,
            fedper, fedrep, fedbabu, lg-fedavg, fedbn, ifca, hypcluster, mocha, fedamp,
            gossip, cooperative-sgd, afl, q-ffl; 'pfedme algorithms' describes them"""
DATA_NAMES = """\
synthetic, mnist, fashion-mnist, covid, crashes, flights, lung, medpar, contraception, ercp,
            penguins, rodents, diamonds, ames, schools, gapminder, loans, vietnam, star, insteval,
            movielens, shakespeare"""
EXAMPLES = """\
examples:
  pfedme run pfedme --data synthetic --rounds 100
  pfedme compare pfedme fedavg alone --data mnist --rounds 100 --seeds 3
  pfedme compare pfedme fedavg alone --data medpar
  pfedme data describe --data mnist:partition=dirichlet,alpha=0.3,clients=50
  pfedme resume runs/my-run"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0 done, 1 failed or diverged, 2 wrong input."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        _interrupt_when_told_to_stop()
        status = _dispatch([word for word in words if word != "--debug"])
        sys.stdout.flush()
        return status
    except (InputError, RunError) as error:
        if debug:
            raise
        _say(str(error))
        return 2 if isinstance(error, InputError) else 1
    except Interrupted as error:
        _say(f"interrupted; {error.goes_on}." if error.goes_on else "interrupted.")
        return INTERRUPTED
    except KeyboardInterrupt:
        _say("interrupted; nothing is lost.")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output is gone; Python must not try to flush it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug or not _is_resource_error(error):
            raise
        _say(str(error).splitlines()[0] if str(error) else "out of memory")
        return 1


def help_page() -> str:
    """The text that `pfedme --help` prints."""
    lines = "\n".join(f"  {command.name:<12}{command.help}" for command in COMMANDS.values())
    groups = {"algorithms": "algorithms", "data": "data sources", "models": "models"}
    others = {what: ", ".join(entry.name for entry in registered(group)) for group, what in groups.items()}
    more = "".join(f"{what} from other packages: {names}\n" for what, names in others.items() if names)
    return (
        "usage: pfedme COMMAND [options]\n\n"
        "Personalized federated learning with Moreau envelopes.\n\n"
        f"commands:\n{lines}\n\n"
        f"algorithms: {ALGORITHM_NAMES}\n"
        f"data:       {DATA_NAMES}, with options as in mnist:partition=released,\n"
        "            or your own table: patients.csv, with --client and --label\n"
        "models:     mlr, dnn, dnn-bn, cnn, with options as in dnn:hidden=100-50,\n"
        "            or your own function: my_package:build\n"
        f"{more}\n"
        f"{EXAMPLES}\n\n"
        "'pfedme COMMAND --help' lists the options of a command; 'pfedme --version' prints the version."
    )


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(help_page())
        return 0
    if words[0] == "--version":
        print(f"pfedme {__version__}")
        return 0
    if words[0] not in COMMANDS:
        raise unknown("command", words[0], COMMANDS)
    if not {"-h", "--help"} & set(words):
        from pfedme.cli.hosts import check_hosts

        check_hosts(words[0])
    return import_module(COMMANDS[words[0]].module).carry_out(words[1:])


def _interrupt_when_told_to_stop() -> None:
    """Treats SIGTERM, and SIGHUP of a closed terminal, like Ctrl-C, unless ignored, as under nohup."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def _say(sentence: str) -> None:
    print(f"pfedme: {sentence}", file=sys.stderr)


def _is_resource_error(error: Exception) -> bool:
    """Whether the machine, rather than this program, is to blame: disk, memory, XLA's allocator."""
    return isinstance(error, OSError | MemoryError) or type(error).__name__ == "JaxRuntimeError"
