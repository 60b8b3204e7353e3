"""Keys: who can read them, what they are good for, and what is done about odd names and damaged files."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import ssl
import stat
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from pfedme.cli import main
from pfedme.deploy import create_keys, keys
from pfedme.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys of a server and two clients."""
    create_keys.make(tmp_path / "keys", ["fed.example.org", "10.0.0.7"], ["north", "south"])
    return tmp_path / "keys"


def set_clock(monkeypatch: pytest.MonkeyPatch, now: datetime.datetime) -> None:
    """Makes it a certain time for the keys' dates."""
    for module in (keys, create_keys):
        monkeypatch.setattr(module, "utc_now", lambda: now)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_secrets_and_folders_are_their_owners_alone(folder: Path):
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert all(mode == 0o700 for path, mode in modes.items() if path.is_dir())
    secrets = {path for path in modes if path.name in ("ca.key", "server.key", "key")}
    assert len(secrets) == 4
    assert all(modes[path] == 0o600 for path in secrets)


def test_a_folder_has_what_each_side_needs_and_no_more(folder: Path):
    client = {"key", "key.pub", "ca.crt"}
    assert set(contents(folder)) == {
        "ca.key", "ca.crt", "server.key", "server.crt",
        *(f"clients/{name}/{file}" for name in ("north", "south") for file in client),
    }  # fmt: skip


def test_a_clients_key_is_what_flower_reads(folder: Path):
    private = load_ssh_private_key((folder / "clients/north/key").read_bytes(), None)
    public = load_ssh_public_key((folder / "clients/north/key.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public


def test_what_was_made_is_read_back(folder: Path):
    server = keys.server_keys(folder)
    assert set(server.clients) == {"north", "south"}
    assert set(server.hosts) == {"localhost", "127.0.0.1", "::1", "fed.example.org", "10.0.0.7"}
    assert server.warning() is None
    assert keys.client_keys(folder / "clients/north").name == "north"


def test_a_clients_folder_keeps_its_name_when_it_is_moved(folder: Path):
    moved = (folder / "clients/north").rename(folder.parent / "elsewhere")
    assert keys.client_keys(moved).name == "north"


def test_clients_are_added_and_what_exists_is_kept(folder: Path):
    before = contents(folder)
    assert create_keys.make(folder, [], ["north", "west"]) == ["west"]
    after = contents(folder)
    assert before.items() <= after.items()
    assert set(keys.server_keys(folder).clients) == {"north", "south", "west"}


def test_a_new_name_of_the_server_changes_its_certificate_only(folder: Path):
    before = contents(folder)
    create_keys.make(folder, ["other.example.org"], [])
    after = contents(folder)
    assert {name for name in after if after[name] != before.get(name)} == {"server.crt"}
    assert {"fed.example.org", "other.example.org"} <= set(keys.server_keys(folder).hosts)


def test_clients_can_be_added_where_the_authoritys_key_is_not(folder: Path):
    (folder / "ca.key").unlink()
    assert create_keys.make(folder, [], ["west"]) == ["west"]
    with pytest.raises(InputError, match=r"needs .*ca\.key"):
        create_keys.make(folder, ["other.example.org"], [])


ODD = ["a b", "St. Mary's", "a/b", "../x", "..", ".", ".hidden", "Zürich 🏥", "100%", "C:\\x", "x" * 200]


@pytest.mark.parametrize("name", ODD)
def test_odd_names_survive_and_stay_in_the_folder(tmp_path: Path, name: str):
    create_keys.make(tmp_path / "keys", ["localhost"], [name])
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]
    (place,) = (tmp_path / "keys/clients").iterdir()
    assert set(keys.server_keys(tmp_path / "keys").clients) == {name}
    assert keys.client_keys(place).name == name


@given(st.text(min_size=1, max_size=30))
def test_a_folders_name_is_safe_and_gives_the_clients_name_back(name: str):
    try:
        place = keys.folder_name(name)
    except InputError:
        assert not name.strip() or not name.isprintable() or len(name.encode(errors="replace")) > 60
        return
    assert unquote(place) == name
    assert "/" not in place
    assert not place.startswith(".")


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\0b", "x" * 201])
def test_what_cannot_be_a_name_is_refused(tmp_path: Path, name: str):
    with pytest.raises(InputError, match="name"):
        create_keys.make(tmp_path / "keys", ["localhost"], [name])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("host", ["https://x", "x:9092", "a b", "-x", "x/y"])
def test_what_cannot_be_a_server_is_refused(tmp_path: Path, host: str):
    with pytest.raises(InputError, match="leave out port and scheme"):
        create_keys.make(tmp_path / "keys", [host], ["north"])
    assert not (tmp_path / "keys").exists()


def handshake(server: keys.ServerKeys, ca: Path, host: str) -> None:
    """A TLS handshake in memory, as a client that trusts `ca` and looks for `host`."""
    at_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    at_server.load_cert_chain(server.certificate, server.key)
    at_client = ssl.create_default_context(cafile=str(ca))
    at_client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        at_client.wrap_bio(to_client, to_server, server_hostname=host),
        at_server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while sides:
        for side in list(sides):
            try:
                side.do_handshake()
                sides.remove(side)
            except ssl.SSLWantReadError:
                pass


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "fed.example.org", "10.0.0.7"])
def test_a_client_trusts_the_server_by_all_its_names(folder: Path, host: str):
    handshake(keys.server_keys(folder), folder / "clients/north/ca.crt", host)


def test_a_client_does_not_trust_another_name_or_another_authority(folder: Path, tmp_path: Path):
    server = keys.server_keys(folder)
    create_keys.make(tmp_path / "others", ["fed.example.org"], ["north"])
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(server, folder / "ca.crt", "evil.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, tmp_path / "others/ca.crt", "fed.example.org")


@pytest.mark.parametrize("file", ["ca.crt", "server.crt", "server.key", "clients/north/key.pub"])
@pytest.mark.parametrize("damage", ["empty", "cut", "gone", "other"])
def test_a_damaged_file_of_the_server_is_named(folder: Path, file: str, damage: str):
    path = folder / file
    content = path.read_bytes()
    if damage == "gone" and file.endswith(".pub"):
        pytest.skip("that is a client that the server does not know")
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "other": b"not a key\n"}[damage])
    with pytest.raises(InputError, match=path.name.replace(".", r"\.")):
        keys.server_keys(folder)


@pytest.mark.parametrize("file", ["ca.crt", "key", "key.pub"])
def test_a_damaged_file_of_a_client_is_named(folder: Path, file: str):
    path = folder / "clients/north" / file
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=path.name):
        keys.client_keys(path.parent)


def test_files_that_do_not_belong_together_are_refused(folder: Path, tmp_path: Path):
    create_keys.make(tmp_path / "others", ["localhost"], ["north"])
    own = (folder / "ca.crt").read_bytes()
    (folder / "ca.crt").write_bytes((tmp_path / "others/ca.crt").read_bytes())
    with pytest.raises(InputError, match="was not issued by the authority"):
        keys.server_keys(folder)
    (folder / "ca.crt").write_bytes(own)
    (folder / "server.key").write_bytes((tmp_path / "others/server.key").read_bytes())
    with pytest.raises(InputError, match="is not the certificate of"):
        keys.server_keys(folder)
    (folder / "clients/north/key.pub").write_bytes((folder / "clients/south/key.pub").read_bytes())
    with pytest.raises(InputError, match="does not belong to"):
        keys.client_keys(folder / "clients/north")


def test_two_clients_with_one_key_are_refused(folder: Path):
    (folder / "clients/north/key.pub").write_bytes((folder / "clients/south/key.pub").read_bytes())
    with pytest.raises(InputError, match="'north' and 'south' have the same key"):
        keys.server_keys(folder)


def test_keys_of_another_kind_are_refused(folder: Path):
    other = ed25519.Ed25519PrivateKey.generate()
    place = folder / "clients/north"
    (place / "key.pub").write_bytes(other.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    with pytest.raises(InputError, match=r"key\.pub is not a public key"):
        keys.server_keys(folder)
    (place / "key").write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    with pytest.raises(InputError, match="is not a private key"):
        keys.client_keys(place)


def test_a_secret_that_others_can_read_is_refused(folder: Path):
    key = folder / "clients/north/key"
    key.chmod(0o644)
    with pytest.raises(InputError, match=f"chmod 600 {key}"):
        keys.client_keys(key.parent)


def test_a_certificate_is_warned_about_refused_and_renewed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    ends = keys.server_keys(folder).ends
    now = datetime.datetime.now(datetime.UTC)
    assert abs(ends - now - datetime.timedelta(days=730)) < datetime.timedelta(minutes=5)
    set_clock(monkeypatch, ends - datetime.timedelta(days=3))
    assert "renews it" in (keys.server_keys(folder).warning() or "")
    set_clock(monkeypatch, ends + datetime.timedelta(days=3))
    with pytest.raises(InputError, match=r"expired on .* renews it"):
        keys.server_keys(folder)
    secret = (folder / "server.key").read_bytes()
    create_keys.make(folder, [], [])
    renewed = keys.server_keys(folder)
    assert renewed.ends > ends
    assert set(renewed.hosts) >= {"fed.example.org", "10.0.0.7"}
    assert (folder / "server.key").read_bytes() == secret
    set_clock(monkeypatch, now - datetime.timedelta(days=3))
    with pytest.raises(InputError, match="clock"):
        keys.client_keys(folder / "clients/north")


def test_the_authority_lasts_ten_years_and_signs_servers_only(folder: Path):
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    lasts = authority.not_valid_after_utc - authority.not_valid_before_utc
    assert abs(lasts - datetime.timedelta(days=3650)) < datetime.timedelta(days=1)
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)


def test_the_command_makes_keys_and_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = str(tmp_path / "keys")
    assert main(["keys", "--clients", "north", "-o", out]) == 2
    assert "--server HOST" in capsys.readouterr().err
    assert main(["keys", "--server", "a.example.org,10.0.0.7", "--clients", "north", "south", "-o", out]) == 0
    told = capsys.readouterr().out
    assert f"hand over {out}/clients/north/" in told
    assert "Whoever created a client's key can impersonate that client" in told
    assert "ca.key" in told
    assert "PRIVATE" not in told


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """The public key that the client north has sent; its own folder is north/."""
    create_keys.make_own(tmp_path / "north", "north")
    return Path(shutil.copy(tmp_path / "north/key.pub", tmp_path / "north.pub"))


def test_a_client_creates_its_own_key_and_the_server_never_has_it(tmp_path: Path, sent: Path):
    own = tmp_path / "north"
    assert set(contents(own)) == {"key", "key.pub"}
    assert stat.S_IMODE((own / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    with pytest.raises(InputError, match=r"ca\.crt is missing: the operator of the server sends it after"):
        keys.client_keys(own)
    assert create_keys.make(tmp_path / "keys", ["localhost"], [], keys.received([sent])) == ["north"]
    assert set(contents(tmp_path / "keys/clients")) == {"north/key.pub"}
    assert set(keys.server_keys(tmp_path / "keys").clients) == {"north"}
    shutil.copy(tmp_path / "keys/ca.crt", own)
    assert keys.client_keys(own).name == "north"
    handshake(keys.server_keys(tmp_path / "keys"), own / "ca.crt", "localhost")


def test_a_clients_own_key_is_never_replaced(tmp_path: Path, sent: Path):
    before = contents(tmp_path)
    assert create_keys.make_own(tmp_path / "north", "north") is False
    with pytest.raises(InputError, match="has the key of the client 'north'"):
        create_keys.make_own(tmp_path / "north", "south")
    (tmp_path / "north/key").rename(tmp_path / "key")
    with pytest.raises(InputError, match="not empty and has no client's key"):
        create_keys.make_own(tmp_path / "north", "north")
    (tmp_path / "key").rename(tmp_path / "north/key")
    assert contents(tmp_path) == before


def test_a_key_that_is_added_again_is_kept_and_another_one_is_refused(tmp_path: Path, sent: Path):
    folder = tmp_path / "keys"
    create_keys.make(folder, ["localhost"], [], keys.received([sent]))
    before = contents(folder)
    assert create_keys.make(folder, [], [], keys.received([sent, tmp_path / "north/key.pub"])) == []
    create_keys.make_own(tmp_path / "other", "north")
    other = tmp_path / "other/key.pub"
    with pytest.raises(InputError, match=r"'north' has another key already, .*delete the folder .*north"):
        create_keys.make(folder, ["new.example.org"], ["west"], keys.received([other]))
    with pytest.raises(InputError, match="two keys for the client 'north'"):
        keys.received([sent, other])
    with pytest.raises(InputError, match="'north' is named twice"):
        create_keys.make(folder, [], ["north"], keys.received([sent]))
    assert contents(folder) == before


def test_one_key_cannot_be_added_under_two_names(tmp_path: Path, sent: Path):
    folder, south = tmp_path / "keys", tmp_path / "south.pub"
    south.write_text(sent.read_text().replace("north", "south"))
    with pytest.raises(InputError, match="key of 'south' is also that of 'north'"):
        create_keys.make(folder, ["localhost"], [], keys.received([sent, south]))
    assert not folder.exists()
    create_keys.make(folder, ["localhost"], [], keys.received([sent]))
    with pytest.raises(InputError, match="key of 'south' is also that of 'north'"):
        create_keys.make(folder, [], [], keys.received([south]))


@pytest.mark.parametrize("name", ODD)
def test_odd_names_arrive_with_the_key(tmp_path: Path, name: str):
    create_keys.make_own(tmp_path / "own", name)
    create_keys.make(tmp_path / "keys", ["localhost"], [], keys.received([tmp_path / "own/key.pub"]))
    assert set(keys.server_keys(tmp_path / "keys").clients) == {name}
    assert sorted(os.listdir(tmp_path)) == ["keys", "own"]


def test_a_key_without_a_name_is_called_as_its_file(tmp_path: Path, sent: Path):
    bare = b" ".join(sent.read_bytes().split()[:2])
    for comment in (b"", b" somebody@laptop", b" caf\xe9"):
        (tmp_path / "St. Mary.pub").write_bytes(bare + comment + b"\r\n")
        assert set(keys.received([tmp_path / "St. Mary.pub"])) == {"St. Mary"}
    (tmp_path / "key.pub").write_bytes(bare)
    with pytest.raises(InputError, match=r"rename it to NAME\.pub"):
        keys.received([tmp_path / "key.pub"])


def test_what_is_no_clients_public_key_is_refused(tmp_path: Path, sent: Path):
    content = sent.read_bytes()
    other = ed25519.Ed25519PrivateKey.generate().public_key()
    wrong = {
        "empty": b"", "cut": content[:60], "two": content + content, "binary": bytes(range(256)),
        "kind": other.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH),
        "name": content.replace(b"north", b"a%0Ab"),
    }  # fmt: skip
    for what, damaged in wrong.items():
        path = tmp_path / f"{what}.pub"
        path.write_bytes(damaged)
        with pytest.raises(
            InputError, match="not a valid client name" if what == "name" else rf"{what}\.pub is not a public"
        ):
            keys.received([path])
    for path, said in ((tmp_path / "north", "is a folder"), (tmp_path / "nowhere", "There is no file")):
        with pytest.raises(InputError, match=said):
            keys.received([path])


def test_a_private_key_is_refused_loudly(tmp_path: Path, sent: Path, folder: Path):
    for path in (tmp_path / "north/key", folder / "server.key"):
        with pytest.raises(InputError, match=r"is a PRIVATE key: a secret .* create a new one"):
            keys.received([path])


def test_both_sides_show_the_same_fingerprints(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    own, folder = str(tmp_path / "north"), str(tmp_path / "keys")

    def said(*argv: str) -> str:
        assert main(["keys", *argv]) == 0
        return capsys.readouterr().out

    def fingerprints(text: str) -> list[str]:
        return re.findall(r"^  ([0-9a-f]{4}(?: [0-9a-f]{4}){15})$", text, re.MULTILINE)

    at_client = said("--own", "north", "-o", own)
    assert f"Send {own}/key.pub" in at_client
    assert "ca.crt that you get back" in at_client
    at_server = said("--server", "localhost", "--add", f"{own}/key.pub", "-o", folder)
    assert f"Send {folder}/ca.crt" in at_server
    assert fingerprints(at_client) == fingerprints(at_server)[:1]
    shutil.copy(f"{folder}/ca.crt", own)
    assert fingerprints(said("--own", "north", "-o", own)) == fingerprints(at_server)
    authority = x509.load_pem_x509_certificate((tmp_path / "keys/ca.crt").read_bytes())
    digest = authority.fingerprint(hashes.SHA256()).hex()
    assert fingerprints(at_server)[1].replace(" ", "") == digest
    assert main(["keys", "--own", "north", "--add", f"{own}/key.pub"]) == 2
    assert "leave out --server" in capsys.readouterr().err
