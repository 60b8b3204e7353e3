"""`pfedme keys`: creates keys for a server and for clients on other machines."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from pfedme.cli.deployment import need_flower
from pfedme.cli.options import add_debug, new_parser, parsed
from pfedme.errors import InputError

EXAMPLES = """\
run it again to add clients, or to see fingerprints; existing keys are kept

examples:
  pfedme keys --own north -o north              at the client; it sends north/key.pub, say as north.pub
  pfedme keys --server fed.example.org,10.0.0.7 --add north.pub south.pub -o keys     at the server
  pfedme keys --server localhost --clients east west -o trial"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme keys`."""
    about = "Creates a client's own key, or the server's certificate with the keys of its clients."
    made = new_parser("keys", about, EXAMPLES)
    made.add_argument(
        "--own",
        metavar="NAME",
        help="at a client: create the key of the client NAME, which stays on that machine",
    )
    made.add_argument(
        "--server", metavar="HOST,...",
        help="names and addresses where clients reach the server, separated by commas; needed the first time",
    )  # fmt: skip
    made.add_argument(
        "--add", metavar="FILE", nargs="+", default=[], type=Path,
        help="at the server: public keys (key.pub) that clients have sent",
    )  # fmt: skip
    made.add_argument(
        "--clients", metavar="NAME", nargs="+", default=[],
        help="for trials: clients whose keys are created here; "
        "whoever creates a client's key can impersonate that client",
    )  # fmt: skip
    made.add_argument(
        "-o", "--out", type=Path, default=Path("keys"), metavar="DIR", help="folder for the keys (keys)"
    )
    add_debug(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Creates keys and prints what to do with them."""
    args = parsed(parser(), argv)
    need_flower("keys")
    if args.own is None:
        hosts = [host for host in (args.server or "").split(",") if host.strip()]
        return _server_keys(args.out, hosts, args.clients, args.add)
    if args.server or args.add or args.clients:
        raise InputError("--own is for a client's machine; leave out --server, --add and --clients.")
    return _own_key(args.out, args.own)


def _server_keys(out: Path, hosts: list[str], clients: list[str], added: list[Path]) -> int:
    """Creates the server's certificate, adds or creates clients' keys, and prints what to do next."""
    from pfedme.deploy.create_keys import make
    from pfedme.deploy.keys import received, server_keys

    given = received(added)
    created = [name for name in make(out, hosts, clients, given) if name not in given]
    if given:
        _print_received(out, given)
    if created:
        _print_created(out, created)
    if any((out / "clients").glob("*/key.pub")):
        made = server_keys(out)
        print(
            f"{len(made.clients)} clients. The server's certificate covers {', '.join(made.hosts)} until "
            f"{made.ends:%Y-%m-%d}."
        )
    print(
        f"The server needs {out}/ca.crt, server.crt, server.key and clients/*/key.pub. Keep {out}/ca.key "
        "where nobody else can get it: anyone who has it can impersonate the server."
    )
    return 0


def _print_received(out: Path, names: Iterable[str]) -> None:
    """Prints the fingerprints to compare with clients that have sent their public keys."""
    from pfedme.deploy.keys import fingerprint, folder_name

    for name in names:
        public = out / "clients" / folder_name(name) / "key.pub"
        print(f"{name}: {public} has the fingerprint (SHA-256)\n  {fingerprint(public)}")
    print(f"Send {out}/ca.crt, which is not secret, to these clients. It has the fingerprint")
    print(f"  {fingerprint(out / 'ca.crt')}\nCompare all fingerprints by telephone.")


def _print_created(out: Path, names: Iterable[str]) -> None:
    """Prints what to do with clients' keys that were created here."""
    from pfedme.deploy.keys import folder_name

    for name in names:
        print(f"{name}: hand over {out / 'clients' / folder_name(name)}/ through a secure channel.")
    print(
        "Whoever created a client's key can impersonate that client. For more than a trial, let each "
        "client create its own with 'pfedme keys --own NAME'."
    )


def _own_key(out: Path, name: str) -> int:
    """Creates a client's own key and prints what to do next."""
    from pfedme.deploy.create_keys import make_own
    from pfedme.deploy.keys import fingerprint

    new = make_own(out, name)
    print(f"{out}/key is the {'new ' if new else ''}private key of {name}; it must not leave this machine.")
    print(f"{out}/key.pub has the fingerprint (SHA-256)\n  {fingerprint(out / 'key.pub')}")
    if (out / "ca.crt").exists():
        print(f"{out}/ca.crt has the fingerprint\n  {fingerprint(out / 'ca.crt')}")
        print("Compare both with whoever runs the server, by telephone.")
    else:
        print(
            f"Send {out}/key.pub, which is not secret, to whoever runs the server, and compare its "
            f"fingerprint by telephone.\nPut the ca.crt that you get back into {out}/, run this command "
            "again to see its fingerprint, and compare that too."
        )
    return 0
