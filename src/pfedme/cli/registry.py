"""The commands, in the order of the help page. A command's module is imported only when it is used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command; its module has `parser()` and `carry_out(argv)`, which returns the exit status."""

    name: str
    help: str
    """What it does, in one line."""
    module: str
    """Its dotted name."""


COMMANDS = {
    command.name: command
    for command in (
        Command("run", "train one algorithm on a federation", "pfedme.cli.run"),
        Command(
            "compare",
            "train several algorithms on the same data and compare them in one table",
            "pfedme.cli.compare",
        ),
        Command(
            "personalize",
            "find the right model for each client of a run, or for newcomers",
            "pfedme.cli.personalize",
        ),
        Command(
            "advise",
            "find the best model for every client, and say whether joining pays",
            "pfedme.cli.advise",
        ),
        Command("audit", "measure what a run gives away about rows", "pfedme.cli.audit"),
        Command("tune", "search for hyperparameters on validation rows", "pfedme.cli.tune"),
        Command("algorithms", "list the algorithms, or describe one", "pfedme.cli.algorithms"),
        Command(
            "data", "describe or convert a federation, or list those that have a name", "pfedme.cli.data"
        ),
        Command("reproduce", "run the paper's experiments and judge its claims", "pfedme.cli.reproduce"),
        Command(
            "study",
            "measure what joining is worth, how often the verdict is wrong, and what algorithms are good for",
            "pfedme.cli.study",
        ),
        Command("report", "put runs and comparisons on one HTML page", "pfedme.cli.report"),
        Command(
            "export",
            "export a client's model, or the shared one, for prediction",
            "pfedme.cli.export",
        ),
        Command(
            "predict",
            "predict labels for the rows of a table with an exported model",
            "pfedme.cli.predict",
        ),
        Command("keys", "create keys for a server and for clients on other machines", "pfedme.cli.keys"),
        Command("server", "train with clients on their own machines", "pfedme.cli.server"),
        Command("client", "join a federation with a table that stays on this machine", "pfedme.cli.client"),
        Command("budget", "show what a client has spent of its privacy budget", "pfedme.cli.budget"),
        Command("log", "verify or show what a client has received and sent", "pfedme.cli.log"),
        Command("resume", "resume an interrupted run or comparison", "pfedme.cli.resume"),
    )
}
