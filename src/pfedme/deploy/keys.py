"""The keys of a federation: a certificate authority, the server's certificate, and a key for each client.

At the server:

    keys/ca.key, ca.crt             anyone who has ca.key can impersonate the server
    keys/server.key, server.crt     with these the server proves who it is
    keys/clients/NAME/key.pub       the public key of each client

At a client:

    north/key, key.pub              with these the client proves who it is; it creates them itself
    north/ca.crt                    a copy of the server's, by which the client recognizes the server

To try things out, the server can also create a client's whole folder, as keys/clients/NAME.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from pfedme.errors import InputError

SOON = datetime.timedelta(days=30)
"""A certificate that expires this soon is renewed, or causes a warning."""
LONGEST_NAME = 200
"""Limit on the bytes of a client's name as a file name."""
MARK = "pfedme:"
"""The prefix of the client's name in the comment of key.pub."""

DAMAGED = (ValueError, TypeError, UnsupportedAlgorithm)
"""The errors of `cryptography` for a file that is not what it should be."""


@dataclasses.dataclass(frozen=True)
class ServerKeys:
    """What a server needs: paths, and each client's public key."""

    ca: Path
    certificate: Path
    key: Path
    clients: dict[str, Path]
    """The file of each client's public key."""
    hosts: tuple[str, ...]
    """Names and addresses that the certificate covers."""
    ends: datetime.datetime
    """When the certificate expires."""

    def warning(self) -> str | None:
        """A warning about a certificate that expires soon."""
        if self.ends - utc_now() > SOON:
            return None
        folder = self.certificate.parent
        ends = f"{self.ends:%Y-%m-%d}"
        return f"The certificate {self.certificate} expires on {ends}; 'pfedme keys -o {folder}' renews it."


@dataclasses.dataclass(frozen=True)
class ClientKeys:
    """What a client needs."""

    ca: Path
    key: Path
    name: str


def server_keys(folder: Path) -> ServerKeys:
    """A server's keys, after a check that they are intact, belong together and are currently valid."""
    if not folder.is_dir():
        raise InputError(
            f"There is no folder {folder}; 'pfedme keys --server HOST --add NAME.pub ...' creates one."
        )
    authority, certificate = (read_certificate(folder / name) for name in ("ca.crt", "server.crt"))
    key = read_private(folder / "server.key", ssh=False)
    if key.public_key() != certificate.public_key():
        raise InputError(f"{folder}/server.crt is not the certificate of {folder}/server.key.")
    try:
        certificate.verify_directly_issued_by(authority)
    except (*DAMAGED, InvalidSignature):
        raise InputError(f"{folder}/server.crt was not issued by the authority of {folder}/ca.crt.") from None
    for path, one in ((folder / "ca.crt", authority), (folder / "server.crt", certificate)):
        check_dates(path, one)
    clients, owners = dict[str, Path](), dict[bytes, str]()
    for path in sorted((folder / "clients").glob("*/key.pub")):
        name, point = unquote(path.parent.name), point_of(read_public(path))
        if point in owners:
            raise InputError(
                f"The clients '{owners[point]}' and '{name}' have the same key; one of them needs a new one."
            )
        clients[name], owners[point] = path, name
    if not clients:
        raise InputError(
            f"There is no client's key in {folder}/clients; 'pfedme keys --add NAME.pub ...' adds one."
        )
    return ServerKeys(
        ca=folder / "ca.crt",
        certificate=folder / "server.crt",
        key=folder / "server.key",
        clients=clients,
        hosts=tuple(hosts_of(certificate)),
        ends=certificate.not_valid_after_utc,
    )


def client_keys(folder: Path) -> ClientKeys:
    """A client's keys, after a check that they are intact, belong together and are currently valid."""
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder}; 'pfedme keys --own NAME -o {folder}' creates it.")
    name, ca = owner_of(folder), folder / "ca.crt"
    if not ca.exists():
        raise InputError(
            f"{ca} is missing: the operator of the server sends it after 'pfedme keys --add', which needs "
            "this client's key.pub."
        )
    check_dates(ca, read_certificate(ca))
    return ClientKeys(ca, folder / "key", name)


def received(paths: Sequence[Path]) -> dict[str, bytes]:
    """The public keys that clients have sent, by name, as they are stored."""
    found = dict[str, bytes]()
    for path in paths:
        if path.is_dir():
            raise InputError(
                f"{path} is a folder; --add needs a client's public key, such as {path}/key.pub."
            )
        if not path.is_file():
            raise InputError(f"There is no file {path}; --add needs a client's public key.")
        if b"PRIVATE KEY" in _content(path):
            raise InputError(
                f"{path} is a PRIVATE key: a secret that must not be sent. If a client has sent it, delete "
                "it and let the client create a new one with 'pfedme keys --own'; only key.pub is to be sent."
            )
        key = read_public(path, "ask the client for its key.pub again")
        name = _named(path) or (path.stem if path.name != "key.pub" else "")
        if not name:
            raise InputError(f"{path} does not say whose key it is; rename it to NAME.pub.")
        content = public_line(key, folder_name(name))
        if found.setdefault(name, content) != content:
            raise InputError(f"There are two keys for the client '{name}'; give the one that it uses.")
    return found


def fingerprint(path: Path) -> str:
    """The SHA-256 of a public key or certificate, in a form to read aloud."""
    if path.suffix == ".crt":
        content = read_certificate(path).public_bytes(Encoding.DER)
    else:
        content = read_public(path).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(content).hexdigest()
    return " ".join(digest[k : k + 4] for k in range(0, len(digest), 4))


def folder_name(name: str) -> str:
    """A client's name as a folder name; `unquote` restores it.

    >>> folder_name("../St. Mary's"), folder_name("..")
    ('%2E.%2FSt.%20Mary%27s', '%2E.')
    """
    if not name.strip() or not name.isprintable():
        raise InputError(
            f"{name!r} is not a valid client name; it needs visible characters and no line breaks."
        )
    try:
        place = quote(name, safe="")
    except UnicodeEncodeError:
        raise InputError(f"{name!r} is not a valid client name; it is not valid Unicode.") from None
    if place.startswith("."):
        place = "%2E" + place[1:]
    if len(place) > LONGEST_NAME:
        raise InputError(f"The client's name '{name[:40]}…' is too long; give it a shorter one.")
    return place


def owner_of(folder: Path) -> str:
    """The name of the client whose private and public key are in a folder."""
    key, public = read_private(folder / "key", ssh=True), folder / "key.pub"
    name = None
    if public.exists():
        if read_public(public) != key.public_key():
            raise InputError(
                f"{public} does not belong to {folder / 'key'}; restore the folder as it was created."
            )
        name = _named(public)
    return name or unquote(folder.absolute().name)


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """Names and addresses that a certificate covers."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def point_of(key: object) -> bytes:
    """The bytes that distinguish one public key from another."""
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def public_line(key: ec.EllipticCurvePublicKey, place: str) -> bytes:
    """The content of key.pub."""
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {MARK}{place}\n".encode()


def _named(path: Path) -> str | None:
    """The client's name in the comment of a public key."""
    comment = _content(path).decode(errors="replace").split()[2:]
    return unquote(comment[0].removeprefix(MARK)) if comment and comment[0].startswith(MARK) else None


def read_certificate(path: Path) -> x509.Certificate:
    """The certificate in a file."""
    try:
        certificate = x509.load_pem_x509_certificate(_content(path))
        certificate.public_key()
    except DAMAGED:
        raise InputError(
            f"{path} is not a certificate, or is damaged; restore the one that was created."
        ) from None
    return certificate


def read_private(path: Path, *, ssh: bool) -> ec.EllipticCurvePrivateKey:
    """The private key in a file that only its owner can read."""
    content = _content(path)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise InputError(f"{path} is a secret that others on this machine can read; run 'chmod 600 {path}'.")
    try:
        key = (load_ssh_private_key if ssh else load_pem_private_key)(content, None)
    except DAMAGED:
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(
            f"{path} is not a private key as created by 'pfedme keys', or is damaged; restore it."
        )
    return key


def read_public(path: Path, cure: str = "restore it") -> ec.EllipticCurvePublicKey:
    """The public key in a file; an error names the remedy."""
    content = _content(path)
    try:
        key = load_ssh_public_key(content) if len(content.splitlines()) == 1 else None
    except DAMAGED:
        key = None
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)):
        raise InputError(f"{path} is not a public key as created by 'pfedme keys', or is damaged; {cure}.")
    return key


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path} is missing; restore the folder as 'pfedme keys' created it.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None


def check_dates(path: Path, certificate: x509.Certificate) -> None:
    """Raises an error if a certificate is not currently valid."""
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if utc_now() > ends:
        renew = (
            f"'pfedme keys -o {path.parent}' renews it" if path.name == "server.crt" else "create new keys"
        )
        raise InputError(f"The certificate {path} expired on {ends:%Y-%m-%d}; {renew}.")
    if utc_now() < begins:
        raise InputError(
            f"The certificate {path} is not valid before {begins:%Y-%m-%d %H:%M} UTC; is this machine's "
            "clock right?"
        )


def utc_now() -> datetime.datetime:
    """The current time in UTC, as in certificates."""
    return datetime.datetime.now(datetime.UTC)
