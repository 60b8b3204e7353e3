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

import contextlib
import dataclasses
import datetime
import hashlib
import ipaddress
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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


def make(
    folder: Path, hosts: Sequence[str], clients: Sequence[str], given: Mapping[str, bytes] | None = None
) -> list[str]:
    """Creates what is missing in a server's folder of keys; returns the names of the clients that are new.

    `clients` are those to create a key for; `given` has the public keys of others, as `received` reads them.
    No key that exists is overwritten. The server's certificate is created again, for the same key, if `hosts`
    has a name that it does not cover or if it expires soon; clients do not notice.
    """
    refuse_file(folder)
    given = given or {}
    hosts = [_host(host) for host in hosts]
    places = {}
    for name in (*clients, *given):
        place = folder_name(name)
        if place in places.values() and (name not in places or name in given):
            raise InputError(f"The client '{name}' is named twice.")
        places[name] = place
    fresh = not (folder / "ca.crt").exists()
    if fresh and not hosts:
        raise InputError("By what name do clients reach the server? Give --server HOST, or HOST,HOST,...")
    _refuse_conflicts(folder / "clients", given)
    with writing(folder):
        for path in (folder, folder / "clients"):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
        _authority(folder)
        _server(folder, hosts)
        known = {path.parent.name for path in (folder / "clients").glob("*/key.pub")}
        new = [name for name, place in places.items() if place not in known]
        for name in new:
            place = folder / "clients" / places[name]
            if name in given:
                place.mkdir(mode=0o700, exist_ok=True)
                atomic_write(place / "key.pub", given[name])
                continue
            with _whole(place, scratch=folder) as scratch:
                _write_pair(scratch, places[name])
                atomic_write(scratch / "ca.crt", (folder / "ca.crt").read_bytes())
    return new


def make_own(folder: Path, name: str) -> bool:
    """Creates a client's own folder with its key; returns whether it is new. A key that exists is kept."""
    refuse_file(folder)
    place = folder_name(name)
    if (folder / "key").exists():
        if (owner := _pair(folder)) != name:
            raise InputError(f"{folder} has the key of the client '{owner}'; choose another -o.")
        return False
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty and has no client's key; choose another -o.")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _whole(folder, scratch=folder.parent) as scratch:
            _write_pair(scratch, place)
    return True


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
                f"{path} is a PRIVATE key: a secret that must not travel. If a client has sent it, delete "
                "it and let the client create a new one with 'pfedme keys --own'; only key.pub is to be sent."
            )
        key = _public(path, "ask the client for its key.pub again")
        name = _named(path) or (path.stem if path.name != "key.pub" else "")
        if not name:
            raise InputError(f"{path} does not tell whose key it is; rename it to NAME.pub.")
        content = _public_line(key, folder_name(name))
        if found.setdefault(name, content) != content:
            raise InputError(f"There are two keys for the client '{name}'; give the one that it uses.")
    return found


def fingerprint(path: Path) -> str:
    """The SHA-256 of a public key or certificate, in a form to read aloud."""
    if path.suffix == ".crt":
        content = _certificate(path).public_bytes(Encoding.DER)
    else:
        content = _public(path).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(content).hexdigest()
    return " ".join(digest[k : k + 4] for k in range(0, len(digest), 4))


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
            f"There is no folder {folder}; 'pfedme keys --server HOST --add NAME.pub ...' creates one."
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
        name, point = unquote(path.parent.name), _point(_public(path))
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
        folder / "ca.crt", folder / "server.crt", folder / "server.key", clients, tuple(_hosts(certificate)),
        certificate.not_valid_after_utc,
    )  # fmt: skip


def client_keys(folder: Path) -> ClientKeys:
    """A client's keys, once they are known to be whole, to belong together and to be valid now."""
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder}; 'pfedme keys --own NAME -o {folder}' creates it.")
    name, ca = _pair(folder), folder / "ca.crt"
    if not ca.exists():
        raise InputError(
            f"{ca} is missing: whoever runs the server sends it after 'pfedme keys --add', which needs this "
            "client's key.pub."
        )
    _valid_now(ca, _certificate(ca))
    return ClientKeys(ca, folder / "key", name)


def _pair(folder: Path) -> str:
    """The name of the client whose private and public key are in a folder."""
    key, public = _private(folder / "key", ssh=True), folder / "key.pub"
    name = None
    if public.exists():
        if _public(public) != key.public_key():
            raise InputError(
                f"{public} does not belong to {folder / 'key'}; put back the folder as it was created."
            )
        name = _named(public)
    return name or unquote(folder.absolute().name)


def _refuse_conflicts(clients: Path, given: Mapping[str, bytes]) -> None:
    """Raises an error if a client's key is not the one that is known, or is another client's."""
    owners = {_point(_public(path)): unquote(path.parent.name) for path in clients.glob("*/key.pub")}
    for name, content in given.items():
        place, point = clients / folder_name(name), _point(load_ssh_public_key(content))
        owner = owners.setdefault(point, name)
        if owner != name:
            raise InputError(
                f"The key of '{name}' is also that of '{owner}'; each client needs its own, which "
                "'pfedme keys --own' creates."
            )
        if (place / "key.pub").exists() and _point(_public(place / "key.pub")) != point:
            raise InputError(
                f"The client '{name}' has another key already, {place}/key.pub. If the new one is really its "
                f"own, delete the folder {place} and try again."
            )


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


@contextlib.contextmanager
def _whole(folder: Path, scratch: Path) -> Iterator[Path]:
    """A folder to fill, in `scratch`, that becomes `folder` once it is complete."""
    place = Path(tempfile.mkdtemp(dir=scratch, prefix=".client-"))  # of mode 0700
    try:
        yield place
        place.rename(folder)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def _write_pair(folder: Path, place: str) -> None:
    """Creates a client's private and public key; `place` is its name as that of a folder."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_secret(folder / "key", key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    atomic_write(folder / "key.pub", _public_line(key.public_key(), place))


def _public_line(key: ec.EllipticCurvePublicKey, place: str) -> bytes:
    """The content of key.pub."""
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {MARK}{place}\n".encode()


def _named(path: Path) -> str | None:
    """The client's name in the comment of a public key."""
    comment = _content(path).decode(errors="replace").split()[2:]
    return unquote(comment[0].removeprefix(MARK)) if comment and comment[0].startswith(MARK) else None


def _point(key: object) -> bytes:
    """What tells one public key from another."""
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


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
        raise InputError(f"{path} is missing; put back the folder as 'pfedme keys' created it.") from None
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


def _public(path: Path, cure: str = "put back what it was") -> ec.EllipticCurvePublicKey:
    content = _content(path)
    try:
        key = load_ssh_public_key(content) if len(content.splitlines()) == 1 else None
    except DAMAGED:
        key = None
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)):
        raise InputError(f"{path} is not a public key as 'pfedme keys' creates them, or is damaged; {cure}.")
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
