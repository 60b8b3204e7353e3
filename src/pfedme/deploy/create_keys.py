"""Creating the keys of a federation; `keys` describes where they are, reads them and checks them."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pfedme.deploy.keys import (
    SOON,
    check_dates,
    folder_name,
    hosts_of,
    owner_of,
    point_of,
    public_line,
    read_certificate,
    read_private,
    read_public,
    utc_now,
)
from pfedme.errors import InputError
from pfedme.files import atomic_write, refuse_file, writing

CA_DAYS, SERVER_DAYS = 3650, 730
ALWAYS = ("localhost", "127.0.0.1", "::1")
"""Names of the server that its certificate always covers; its own programs use them."""


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
        raise InputError("Under what name do clients reach the server? Give --server HOST, or HOST,HOST,...")
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
        if (owner := owner_of(folder)) != name:
            raise InputError(f"{folder} has the key of the client '{owner}'; choose another -o.")
        return False
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty and has no client's key; choose another -o.")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _whole(folder, scratch=folder.parent) as scratch:
            _write_pair(scratch, place)
    return True


def _refuse_conflicts(clients: Path, given: Mapping[str, bytes]) -> None:
    """Raises an error if a client's key is not the one that is known, or is another client's."""
    owners = {point_of(read_public(path)): unquote(path.parent.name) for path in clients.glob("*/key.pub")}
    for name, content in given.items():
        place, point = clients / folder_name(name), point_of(load_ssh_public_key(content))
        owner = owners.setdefault(point, name)
        if owner != name:
            raise InputError(
                f"The key of '{name}' is also that of '{owner}'; each client needs its own, which "
                "'pfedme keys --own' creates."
            )
        if (place / "key.pub").exists() and point_of(read_public(place / "key.pub")) != point:
            raise InputError(
                f"The client '{name}' has another key already, {place}/key.pub. If the new one is really its "
                f"own, delete the folder {place} and try again."
            )


def _authority(folder: Path) -> None:
    """Creates the certificate authority if there is none."""
    path = folder / "ca.crt"
    if path.exists():
        read_certificate(path)
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
    """Creates the server's certificate if there is no suitable one."""
    path = folder / "server.crt"
    wanted = list(dict.fromkeys((*ALWAYS, *hosts)))
    if path.exists():
        now = read_certificate(path)
        if set(wanted) <= set(hosts_of(now)) and now.not_valid_after_utc - utc_now() > SOON:
            return
        wanted = list(dict.fromkeys((*hosts_of(now), *wanted)))
    authority = read_certificate(folder / "ca.crt")
    check_dates(folder / "ca.crt", authority)
    if not (folder / "ca.key").exists():
        raise InputError(f"A certificate for the server needs {folder}/ca.key, which is missing; restore it.")
    signer = read_private(folder / "ca.key", ssh=False)
    if signer.public_key() != authority.public_key():
        raise InputError(
            f"{folder}/ca.key is not the key of {folder}/ca.crt; restore the one that was created with it."
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
    place = Path(tempfile.mkdtemp(dir=scratch, prefix=".client-"))  # with mode 0700
    try:
        yield place
        place.rename(folder)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def _write_pair(folder: Path, place: str) -> None:
    """Creates a client's private and public key; `place` is its name as a folder name."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_secret(folder / "key", key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    atomic_write(folder / "key.pub", public_line(key.public_key(), place))


def _made_or_kept(path: Path) -> ec.EllipticCurvePrivateKey:
    if path.exists():
        return read_private(path, ssh=False)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_secret(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return key


def _write_secret(path: Path, content: bytes) -> None:
    """Writes a new file that only its owner can ever read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _usage(*, signs: bool) -> x509.KeyUsage:
    """What a key is for: to sign certificates, or to prove the server's identity."""
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
    begins, ends = utc_now() - datetime.timedelta(hours=1), utc_now() + datetime.timedelta(days=days)
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
        raise InputError(f"--server '{text}' is not a host name or address; leave out port and scheme.")
    return name


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
