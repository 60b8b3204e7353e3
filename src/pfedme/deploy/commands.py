"""The commands `server` and `client`: what their options mean."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfedme import __version__
from pfedme.algorithms import Algorithm, FedAvg
from pfedme.core.models import MLR, parse_model
from pfedme.core.spec import build, field_types, parse_names, to_json
from pfedme.data.table import OPTIONS, Table
from pfedme.deploy import choosing, ending, keys, supervise_client
from pfedme.deploy.audit_log import AuditLog
from pfedme.deploy.client import MODEL, Client
from pfedme.deploy.config import config_of
from pfedme.deploy.console import told_lines
from pfedme.deploy.ending import parse_choice
from pfedme.deploy.messages import Refusal, Words, sha256
from pfedme.deploy.plan import OWN, PORT, REGION, Plan
from pfedme.deploy.policy import Policy, read_policy
from pfedme.deploy.processes import joined, parse_address
from pfedme.engine.devices import keep_compiled_programs
from pfedme.errors import InputError, RunError
from pfedme.privacy.units import Clients, Privacy

if TYPE_CHECKING:
    from pfedme.deploy.serve import Setup

KEYS = Path("keys")
ANEW = ("resume", "listen", "keys", "insecure", "insecure_network", "json", "debug")
"""Options that may change when a run is resumed,"""
REGIONAL = (*ANEW, *REGION, "upper", "upper_keys", "out", "force")
"""and options of a region."""


def plan_of(args: argparse.Namespace, algorithm: Algorithm, privacy: Privacy | None) -> Plan:
    """The plan that the command line describes."""
    numbers = {name: getattr(args, name) for name in ("rounds", "cohort", "seed", *OWN)}
    if isinstance(privacy, Clients) and importlib.util.find_spec("dp_accounting") is None:
        raise InputError("--dp clients needs the package dp-accounting: pip install 'pfedme[privacy]'.")
    return Plan(
        algorithm=algorithm, model=parse_model(args.model), eval_every=args.eval_every or 0,
        privacy=privacy, regions=parse_names(args.regions), **numbers,
    ).checked()  # fmt: skip


def refuse_changes(args: argparse.Namespace, defaults: argparse.Namespace) -> None:
    """Raises an error if an option is given that a resumed run, or a region, does not decide."""
    allowed, why = ANEW, "cannot change in a resumed run; leave it out, or start a new run."
    if args.resume is None:
        allowed, why = REGIONAL, "is decided by the upper server (--upper); leave it out."
    for name, value in vars(args).items():
        if name not in allowed and value != getattr(defaults, name):
            raise InputError(f"--{name.replace('_', '-')} {why}")


def region_config(args: argparse.Namespace) -> Words:
    """The configuration of a region's run, from the command line."""
    host, port = parse_address(args.upper, "--upper")
    upper: Words = {"server": joined(host, port), "name": args.out.name, "ca": None, "key": None}
    if args.insecure:
        _refuse_open(host, args, "--upper")
        if args.upper_keys:
            raise InputError("--insecure means without keys; leave out one of --insecure and --upper-keys.")
    elif args.upper_keys is None:
        raise InputError("--upper needs this region's own key; give its folder with --upper-keys.")
    else:
        own = keys.client_keys(args.upper_keys.absolute())
        upper |= {"name": own.name, "ca": str(own.ca), "key": str(own.key)}
    given: Words = {name: getattr(args, name) for name in REGION} | {"regions": parse_names(args.regions)}
    checked = config_of(Plan(algorithm=FedAvg(), model=MLR(), **given).checked())  # the rest comes from above
    keys_of_own = [name.replace("_", "-") for name in REGION]
    return {key: checked[key] for key in keys_of_own if key in checked} | {"upper": json.dumps(upper)}


def setup_of(args: argparse.Namespace, config: dict[str, Any], before: Setup | None) -> Setup:
    """The settings that the server is started with; those that are not given stay as they were."""
    from pfedme.deploy.serve import Setup

    insecure = args.insecure or (before is not None and before.keys is None and args.keys is None)
    if args.insecure and args.keys:
        raise InputError("--insecure means without keys; leave out one of --insecure and --keys.")
    folder = (
        None
        if insecure
        else str((args.keys or (before and before.keys and Path(before.keys)) or KEYS).absolute())
    )
    if args.listen is None and before is not None:
        host, port = before.host, before.port
    else:
        host, port = parse_address(
            args.listen or f"{'127.0.0.1' if insecure else '0.0.0.0'}:{PORT}", "--listen"
        )
    if insecure:
        _refuse_open(host, args, "--listen")
    return Setup(config, host, port, folder)


def server(args: argparse.Namespace, plan: Plan | None, words: Sequence[str]) -> tuple[dict[str, Any], Path]:
    """`pfedme server`: the record of the finished run, and its folder; `plan` is None to resume a run, and in
    a region, which gets it from the upper server."""
    from pfedme.deploy import serve  # a client does without, and without most of Flower

    if args.resume is not None:
        out = args.resume
        before = serve.Setup.read(out)
        if serve.status_of(out) == "finished":
            raise InputError(f"The run in {out} is finished; there is nothing to resume.")
        setup = setup_of(args, before.config, before)
        warning = serve.check(setup)
    else:
        out = args.out
        command = shlex.join(["pfedme", "server", *words])
        config = region_config(args) if plan is None else config_of(plan)
        setup = setup_of(args, {**config, "command": command}, None)
        serve.refuse_out(out, force=args.force)
        warning = serve.check(setup)
        serve.claim(out)
        if plan is not None:
            sha = sha256(plan.offer())
            print(f"The plan's SHA-256 is {sha}; clients can approve it with --approve.", file=sys.stderr)
    setup.write(out)
    if warning:
        print(f"pfedme: {warning}", file=sys.stderr)
    return serve.serve(setup, out, resume=args.resume is not None), out


def client(args: argparse.Namespace) -> int:
    """`pfedme client`."""
    host, port = parse_address(args.server, "--server")
    if args.insecure and args.keys:
        raise InputError("--insecure means without keys; leave out one of --insecure and --keys.")
    own_keys = None
    if args.insecure:
        _refuse_open(host, args, "--server")
    else:
        own_keys = keys.client_keys((args.keys or KEYS).absolute())
    given = {
        field: value for field in OPTIONS if (value := getattr(args, f"table_{field}", None)) is not None
    }
    name = args.name or (own_keys.name if own_keys else Path(args.data).stem)
    keys.folder_name(name)
    table = build(Table, {**given, "path": args.data, "owner": name}, "the table")
    limits = {field: value for field in field_types(Policy) if (value := getattr(args, field)) is not None}
    policy = read_policy(Path(args.data), limits)
    how = parse_choice(args.personalize)
    own = Client(table, args.state, args.share_metrics, policy, personalize=how)
    if policy.dp == "rows" and importlib.util.find_spec("dp_accounting") is None:
        raise InputError("--dp rows needs the package dp-accounting: pip install 'pfedme[privacy]'.")
    if policy.dp == "rows" and (args.share_metrics or how):
        option = "--personalize, which uses rows as they are" if how else "exact scores (--share-metrics)"
        raise InputError(
            f"Differential privacy of rows (--dp rows) does not cover {option}; leave one of them out."
        )
    rows = table.load()
    try:
        told = own.told
    except Refusal as refusal:
        raise InputError(f"This client cannot take part: {refusal}.") from None
    most = int(1e6 * policy.max_megabytes)
    link = supervise_client.Link(joined(host, port), name, args.state, own_keys, args.wait, most)
    say = supervise_client.console
    train, test = int(rows.n_train.sum()), int(rows.n_test.sum())
    log = AuditLog(args.state)
    with supervise_client.at_work(args.state), noted(log, name, policy):
        if (args.state / ending.FILE).exists():
            say("The last run is over, but its model has not been chosen yet; no server is needed for that.")
        else:
            say(f"{args.data}: {train:,} rows to train on, {test:,} to test on; they stay here.")
            print("\n".join(told_lines(told, policy, own.declared)), file=sys.stderr, flush=True)
            approval = supervise_client.Approval(args.state)
            supervise_client.supervise(link, supervise_client.node_config(own), say, approval)
            say("The run is over.")
        for line in choosing.sentences(_chosen(own, say) or {}):
            say(line)
        own.encoded.forget()
    print(f"The model is in {args.state / MODEL}. To use it:")
    print(f"  pfedme predict {shlex.quote(str(args.state / MODEL))} --data TABLE -o predictions.csv")
    return 0


def _chosen(own: Client, say: Callable[[str], None]) -> Words | None:
    """The client's choice, if it is still to be made, with a line for each step of it."""
    keep_compiled_programs()
    steps = {
        "alone": "Training alone, to compare.",
        "choice": "Choosing by the rows that were kept out of training.",
        "models": "Fitting the models to all training rows.",
    }

    def watch(step: str, done: int, of: int) -> None:
        if done < of:
            say(steps[step])

    return choosing.choose(own, watch)


@contextmanager
def noted(log: AuditLog, name: str, policy: Policy) -> Iterator[None]:
    """Notes in a client's log that the client was started with these limits, and that it has ended; prints
    the hash of the last line, which its owner can compare later."""
    try:
        log.append("started", version=__version__, name=name, policy=to_json(policy))
    except Refusal as refusal:
        raise InputError(f"This client cannot take part: {refusal}.") from None
    try:
        yield
    finally:
        _print_end(log)


def _print_end(log: AuditLog) -> None:
    try:
        chain = log.end()
    except (InputError, RunError) as error:
        print(f"pfedme: {error}", file=sys.stderr, flush=True)
    else:
        print(
            f"The log {log.path} has {len(chain.lines):,} lines; its head is {chain.head}. Note it elsewhere "
            f"to check later that nothing was changed: pfedme log verify {log.state} --head HASH",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _refuse_open(host: str, args: argparse.Namespace, option: str) -> None:
    """Raises an error if plain text would leave this machine without a second option that allows it."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local and not args.insecure_network:
        raise InputError(
            f"--insecure sends models in plain text and accepts any client, and {option} {host} is on a "
            "network; create keys with 'pfedme keys', or add --insecure-network."
        )
