"""What the two sides trust each other by: a certificate authority, the server's certificate, clients' keys.

keys/ca.key, ca.crt                 who holds ca.key can pass for the server
keys/server.key, server.crt         what the server proves itself by
keys/clients/NAME/key, key.pub      what a client proves itself by; the folder, with a copy of ca.crt, is
                                    handed out to it, and the server needs of it only key.pub
"""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pfedme.errors import InputError
from pfedme.files import atomic_write, refuse_file, writing

CA_DAYS, SERVER_DAYS = 3650, 730
SOON = datetime.timedelta(days=30)
"""A certificate that ends so soon is renewed, or warned about."""
ALWAYS = ("localhost", "127.0.0.1", "::1")
"""Names of the server that its certificate is always good for; its own programs call it so."""
LONGEST_NAME = 200
"""Bytes of a client's name as a file's name."""
MARK = "pfedme:"
"""What precedes the client's name in the comment of key.pub."""

DAMAGED = (ValueError, TypeError, UnsupportedAlgorithm)
"""What `cryptography` raises about a file that is not what it should be."""


@dataclasses.dataclass(frozen=True)
class ServerKeys:
    """What a server needs: paths, and each client's public key."""

    ca: Path
    certificate: Path
    key: Path
    clients: dict[str, Path]
    """The file of each client's public key."""
    hosts: tuple[str, ...]
    """Names and addresses that the certificate is good for."""
    ends: datetime.datetime
    """When the certificate ends."""

    def warning(self) -> str | None:
        """What is to be said about a certificate that ends soon."""
        if self.ends - _now() > SOON:
            return None
        folder = self.certificate.parent
        ends = f"{self.ends:%Y-%m-%d}"
        return f"The certificate {self.certificate} ends on {ends}; 'pfedme keys -o {folder}' renews it."


@dataclasses.dataclass(frozen=True)
class ClientKeys:
    """What a client needs."""

    ca: Path
    key: Path
    name: str


def make(folder: Path, hosts: Sequence[str], clients: Sequence[str]) -> list[str]:
    """Makes what is missing in a folder of keys; returns the names of the clients that are new.

    No key that exists is written over. The server's certificate is made again, for the same key, if `hosts`
    has a name that it is not good for or if it ends soon; clients need not know.
    """
    refuse_file(folder)
    hosts = [_host(host) for host in hosts]
    places = {}
    for name in clients:
        place = folder_name(name)
        if place in places.values() and name not in places:
            raise InputError(f"The client '{name}' is named twice.")
        places[name] = place
    fresh = not (folder / "ca.crt").exists()
    if fresh and not hosts:
        raise InputError("By what name do clients reach the server? Give --server HOST, or HOST,HOST,...")
    with writing(folder):
        for path in (folder, folder / "clients"):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
        _authority(folder)
        _server(folder, hosts)
        known = {path.name for path in (folder / "clients").iterdir()}
        new = [name for name, place in places.items() if place not in known]
        for name in new:
            _client(folder, name, places[name])
    return new


def folder_name(name: str) -> str:
    """A client's name as that of a folder; `unquote` gives it back.

    >>> folder_name("../St. Mary's"), folder_name("..")
    ('%2E.%2FSt.%20Mary%27s', '%2E.')
    """
    if not name.strip() or not name.isprintable():
        raise InputError(f"{name!r} is no name for a client; it must have letters, and no line breaks.")
    try:
        place = quote(name, safe="")
    except UnicodeEncodeError:
        raise InputError(f"{name!r} is no name for a client; it is not valid Unicode.") from None
    if place.startswith("."):
        place = "%2E" + place[1:]
    if len(place) > LONGEST_NAME:
        raise InputError(f"The client's name '{name[:40]}…' is too long; give it a shorter one.")
    return place


def server_keys(folder: Path) -> ServerKeys:
    """A server's keys, once they are known to be whole, to belong together and to be valid now."""
    if not folder.is_dir():
        raise InputError(
            f"There is no folder {folder}; 'pfedme keys --server HOST --clients NAME ...' makes one."
        )
    authority, certificate = (_certificate(folder / name) for name in ("ca.crt", "server.crt"))
    key = _private(folder / "server.key", ssh=False)
    if key.public_key() != certificate.public_key():
        raise InputError(f"{folder}/server.crt is not the certificate of {folder}/server.key.")
    try:
        certificate.verify_directly_issued_by(authority)
    except (*DAMAGED, InvalidSignature):
        raise InputError(f"{folder}/server.crt was not made by the authority of {folder}/ca.crt.") from None
    for path, one in ((folder / "ca.crt", authority), (folder / "server.crt", certificate)):
        _valid_now(path, one)
    clients, owners = dict[str, Path](), dict[bytes, str]()
    for path in sorted((folder / "clients").glob("*/key.pub")):
        name, public = unquote(path.parent.name), _public(path)
        point = public.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
        if point in owners:
            raise InputError(
                f"The clients '{owners[point]}' and '{name}' have the same key; make one of them anew."
            )
        clients[name], owners[point] = path, name
    if not clients:
        raise InputError(
            f"There is no client's key in {folder}/clients; 'pfedme keys --clients NAME ...' makes one."
        )
    return ServerKeys(
        folder / "ca.crt", folder / "server.crt", folder / "server.key", clients, tuple(_hosts(certificate)),
        certificate.not_valid_after_utc,
    )  # fmt: skip


def client_keys(folder: Path) -> ClientKeys:
    """A client's keys, once they are known to be whole, to belong together and to be valid now."""
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder}; whoever runs the server makes it by 'pfedme keys'.")
    _valid_now(folder / "ca.crt", _certificate(folder / "ca.crt"))
    key = _private(folder / "key", ssh=True)
    name, public = unquote(folder.absolute().name), folder / "key.pub"
    if public.exists():
        if _public(public) != key.public_key():
            raise InputError(
                f"{public} does not belong to {folder / 'key'}; put back the folder as it was made."
            )
        comment = public.read_text().split()[2:]
        if comment and comment[0].startswith(MARK):
            name = unquote(comment[0].removeprefix(MARK))
    return ClientKeys(folder / "ca.crt", folder / "key", name)


def _authority(folder: Path) -> None:
    """Makes the certificate authority if there is none."""
    path = folder / "ca.crt"
    if path.exists():
        _certificate(path)
        return
    key = _made_or_kept(folder / "ca.key")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pfedme federation")])
    builder = (
        _dated(name, name, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
    )
    atomic_write(path, builder.sign(key, hashes.SHA384()).public_bytes(Encoding.PEM))


def _server(folder: Path, hosts: Sequence[str]) -> None:
    """Makes the server's certificate if there is none that does."""
    path = folder / "server.crt"
    wanted = list(dict.fromkeys((*ALWAYS, *hosts)))
    if path.exists():
        now = _certificate(path)
        if set(wanted) <= set(_hosts(now)) and now.not_valid_after_utc - _now() > SOON:
            return
        wanted = list(dict.fromkeys((*_hosts(now), *wanted)))
    authority = _certificate(folder / "ca.crt")
    _valid_now(folder / "ca.crt", authority)
    if not (folder / "ca.key").exists():
        raise InputError(
            f"A certificate for the server needs {folder}/ca.key, which is not there; put it back."
        )
    signer = _private(folder / "ca.key", ssh=False)
    if signer.public_key() != authority.public_key():
        raise InputError(
            f"{folder}/ca.key is not the key of {folder}/ca.crt; put back the one that was made with it."
        )
    key = _made_or_kept(folder / "server.key")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pfedme server")])
    builder = (
        _dated(name, authority.subject, key.public_key(), SERVER_DAYS, authority.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName([_general(host) for host in wanted]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    atomic_write(path, builder.sign(signer, hashes.SHA384()).public_bytes(Encoding.PEM))


def _client(folder: Path, name: str, place: str) -> None:
    """Makes a client's folder, which is there as a whole or not at all."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".client-"))  # of mode 0700
    try:
        _write_secret(scratch / "key", key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        atomic_write(scratch / "key.pub", public + f" {MARK}{place}\n".encode())
        atomic_write(scratch / "ca.crt", (folder / "ca.crt").read_bytes())
        scratch.rename(folder / "clients" / place)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _made_or_kept(path: Path) -> ec.EllipticCurvePrivateKey:
    if path.exists():
        return _private(path, ssh=False)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_secret(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return key


def _write_secret(path: Path, content: bytes) -> None:
    """A file that is its owner's alone from the first moment, and that did not exist before."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _usage(*, signs: bool) -> x509.KeyUsage:
    """What a key is for: to sign certificates, or to prove that one is the server."""
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip


def _dated(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: int,
    latest: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    # The other side's clock may be a little behind.
    begins, ends = _now() - datetime.timedelta(hours=1), _now() + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(min(ends, latest or ends))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _host(text: str) -> str:
    """A name or an address of the server, in its usual form."""
    text = text.strip().removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        pass
    try:
        name = text.rstrip(".").encode("idna").decode().lower()
    except UnicodeError:
        name = ""
    if not re.fullmatch(
        r"(\*\.)?([a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", name
    ):
        raise InputError(f"--server '{text}' is no name or address of a machine; leave out port and scheme.")
    return name


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _hosts(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path} is missing; put back the folder as 'pfedme keys' made it.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None


def _certificate(path: Path) -> x509.Certificate:
    try:
        certificate = x509.load_pem_x509_certificate(_content(path))
        certificate.public_key()
    except DAMAGED:
        raise InputError(
            f"{path} is not a certificate, or is damaged; put back the one that was made."
        ) from None
    return certificate


def _private(path: Path, *, ssh: bool) -> ec.EllipticCurvePrivateKey:
    content = _content(path)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise InputError(
            f"{path} is a secret that others on this machine can read; 'chmod 600 {path}' closes it."
        )
    try:
        key = (load_ssh_private_key if ssh else load_pem_private_key)(content, None)
    except DAMAGED:
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(
            f"{path} is not a private key as 'pfedme keys' makes them, or is damaged; put back what it was."
        )
    return key


def _public(path: Path) -> ec.EllipticCurvePublicKey:
    try:
        key = load_ssh_public_key(_content(path))
    except DAMAGED:
        key = None
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)):
        raise InputError(
            f"{path} is not a public key as 'pfedme keys' makes them, or is damaged; put back what it was."
        )
    return key


def _valid_now(path: Path, certificate: x509.Certificate) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if _now() > ends:
        renew = f"'pfedme keys -o {path.parent}' renews it" if path.name == "server.crt" else "make new keys"
        raise InputError(f"The certificate {path} ended on {ends:%Y-%m-%d}; {renew}.")
    if _now() < begins:
        raise InputError(
            f"The certificate {path} is not valid before {begins:%Y-%m-%d %H:%M} UTC; is this machine's "
            "clock right?"
        )
