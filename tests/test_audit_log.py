"""The client's own log: whatever is changed in it is found, and nothing leaves without a line."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_deploy import QUICK, Room, deployed, owners

from pfedme.algorithms import FedAvg
from pfedme.cli import main
from pfedme.core.models import MLR
from pfedme.deploy import audit_log
from pfedme.deploy.answer import UNLOGGED, answer
from pfedme.deploy.audit_log import (
    EMPTY,
    HEAD,
    LOG,
    AuditLog,
    BrokenLog,
    addition,
    check_log,
    checked,
    encode,
    read_chain,
    read_head,
)
from pfedme.deploy.client import Client
from pfedme.deploy.messages import Content, Kind, Refusal, Reply, digest
from pfedme.deploy.plan import Plan
from pfedme.errors import InputError


def small(folder: Path, lines: int = 5) -> AuditLog:
    """A log with a few lines, one of them a refusal with quotes and letters that are not ASCII."""
    log = AuditLog(folder)
    log.append("started", name="süd-west", policy={"min_rows": 50})
    for t in range(1, lines - 1):
        log.append("sent", kind="train", round=t, bytes=70 + t, sha256="ab" * 32, epsilon=0.25)
    log.append("refused", kind="train", round=9, bytes=9, sha256="c" * 64, epsilon=None, reason='"w", ü\n')
    return log


def fits(folder: Path) -> bool:
    """Whether the log in a state folder is accepted."""
    try:
        check_log(folder)
        return True
    except BrokenLog:
        return False


def oracle(raw: bytes) -> list[str]:
    """The hashes of a log, by the formula in its docstring."""
    hashes = [EMPTY]
    for line in raw.splitlines():
        fields = json.loads(line)
        sha = fields.pop("hash")
        assert fields["before"] == hashes[-1]
        assert hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).hexdigest() == sha
        hashes.append(sha)
    return hashes[1:]


def test_the_hashes_are_those_of_the_formula(tmp_path: Path):
    log = small(tmp_path)
    chain = check_log(tmp_path)
    assert list(chain.hashes) == oracle(log.path.read_bytes())
    assert [line["n"] for line in chain.lines] == [1, 2, 3, 4, 5]
    assert json.loads((tmp_path / HEAD).read_text()) == {"lines": 5, "hash": chain.head}
    assert (log.path.stat().st_mode & 0o777, chain.torn) == (0o600, b"")


def content(log: AuditLog) -> tuple[bytes, tuple[int, str]]:
    """The bytes of a log, and its head."""
    return log.path.read_bytes(), read_head(log.head)


def accepted(raw: bytes, head: tuple[int, str] | None) -> bool:
    """Whether a log with this content fits."""
    try:
        checked(raw, head)
        return True
    except BrokenLog:
        return False


def test_a_changed_byte_anywhere_is_found(tmp_path: Path):
    """With the head, and in a file alone: all positions, with one bit, the case and the newline changed."""
    raw, head = content(small(tmp_path))
    for place, byte in enumerate(raw):
        number = raw.count(b"\n", 0, place) + 1
        for other in {byte ^ 1, byte ^ 0x20, 0x0A, 0x20, 0} - {byte}:
            for known in (head, None):
                with pytest.raises(BrokenLog) as found:
                    checked(raw[:place] + bytes([other]) + raw[place + 1 :], known)
                assert found.value.line == number, (place, other)
    assert accepted(raw, head)
    assert accepted(raw, None)


def test_a_removed_or_added_byte_is_found(tmp_path: Path):
    raw, head = content(small(tmp_path))
    for place in range(len(raw)):
        assert not accepted(raw[:place] + raw[place + 1 :], head), place
        assert not accepted(raw[:place] + b" " + raw[place:], head), place
    assert checked(raw + b" ", head).torn == b" "  # as if the next line had been torn: nothing is missing


def test_a_changed_head_is_found(tmp_path: Path):
    log = small(tmp_path)
    text = log.head.read_bytes()
    for place, byte in enumerate(text.rstrip()):
        log.head.write_bytes(text[:place] + bytes([byte ^ 1]) + text[place + 1 :])
        assert not fits(tmp_path), place
    log.head.unlink()
    assert not fits(tmp_path)


def test_removed_swapped_repeated_and_foreign_lines_are_found(tmp_path: Path):
    log, other = small(tmp_path), small(tmp_path / "other")
    head = read_head(log.head)
    lines, foreign = log.path.read_bytes().splitlines(True), other.path.read_bytes().splitlines(True)

    def written(new: list[bytes]) -> bool:
        return accepted(b"".join(new), head)

    assert written(lines)
    for k in range(len(lines)):
        assert not written(lines[:k] + lines[k + 1 :]), k
        assert not written(lines[: k + 1] + lines[k:]), k
        assert not written([*lines[:k], foreign[k], *lines[k + 1 :]]), k
        assert not written([*lines[:k], b"{}\n", *lines[k:]]), k
        for j in range(k):
            swapped = list(lines)
            swapped[j], swapped[k] = lines[k], lines[j]
            assert not written(swapped), (j, k)


def test_a_cut_end_is_found_by_the_head_and_the_middle_of_a_line_without_it(tmp_path: Path):
    log = small(tmp_path)
    raw, head = content(log)
    for size in range(len(raw)):
        assert not accepted(raw[:size], head), size
        if size and raw[size - 1 : size] != b"\n":
            assert not accepted(raw[:size], None), size
    log.path.unlink()
    with pytest.raises(Refusal, match="line 1 is missing: the log had 5 lines, and has 0"):
        log.append("sent")


def test_a_head_that_was_noted_elsewhere_finds_a_chain_that_was_built_again(tmp_path: Path):
    log = small(tmp_path)
    noted, lines = check_log(tmp_path).hashes, check_log(tmp_path).lines
    raw, before = b"", EMPTY
    for line in lines:  # whoever can write both files makes a new chain
        rewritten = {**line, "before": before} | ({"bytes": 1} if line["n"] == 3 else {})
        text, before = encode(rewritten)
        raw += text + b"\n"
    assert check_log(tmp_path, noted[2]).head == noted[-1]
    log.path.write_bytes(raw)
    log.head.write_text(json.dumps({"lines": len(lines), "hash": before}))
    assert fits(tmp_path)
    assert check_log(tmp_path, noted[1]).head == before  # lines up to the change are the same
    for head in noted[2:]:
        with pytest.raises(BrokenLog, match="the log is not the same"):
            check_log(tmp_path, head)


def test_after_a_kill_in_mid_line_nothing_is_lost_and_the_rest_is_closed_off(tmp_path: Path):
    """At every byte of the next line, and at every byte of what closes off its rest."""
    before, head = content(small(tmp_path, 4))
    line, _, _ = addition(checked(before, head), "sent", {"kind": "train", "round": 7, "epsilon": 0.5})
    for size in range(1, len(line)):
        rest = line[:size]
        chain = checked(before + rest, head)
        whole = size == len(line) - 1  # but for the newline
        assert (len(chain.lines), chain.torn, chain.unended) == (
            (5, b"", True) if whole else (4, rest, False)
        )
        closed = before + rest + addition(chain, "ended", {})[0]
        what = [line["what"] for line in checked(closed, head).lines[4:]]
        assert what == (["sent", "ended"] if whole else ["torn", "ended"])
        assert checked(closed, None).torn == b""
        if size % 60 == 1:  # killed again while that was written
            for cut in range(len(before + rest), len(closed)):
                again = checked(closed[:cut], head)
                last = checked(closed[:cut] + addition(again, "started", {})[0], None)
                assert (last.lines[-1]["what"], last.torn) == ("started", b"")


def test_a_client_closes_off_a_torn_line_in_its_file(tmp_path: Path):
    log = small(tmp_path, 3)
    with log.path.open("ab") as file:
        file.write(b'{"n":4,"time')
    assert check_log(tmp_path).torn == b'{"n":4,"time'
    log.append("ended")
    assert [line["what"] for line in check_log(tmp_path).lines[3:]] == ["torn", "ended"]
    assert b'{"n":4,"time\n' in log.path.read_bytes()


def test_what_is_left_of_a_torn_line_cannot_be_changed_either(tmp_path: Path):
    log = small(tmp_path, 3)
    with log.path.open("ab") as file:
        file.write(b'{"n":4,"time')
    log.append("ended")
    raw, head = content(log)
    for place in range(len(raw)):
        assert not accepted(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :], head), place


def test_messages_that_are_answered_at_once_take_turns(tmp_path: Path):
    def append(who: int) -> None:
        for t in range(8):
            AuditLog(tmp_path).append("sent", kind="train", round=t, bytes=who, sha256="")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(append, range(3)))
    lines = check_log(tmp_path).lines
    assert [line["n"] for line in lines] == list(range(1, 25))
    for who in range(3):
        assert [line["round"] for line in lines if line["bytes"] == who] == list(range(8))


# --- with a client


class LoggedRoom(Room):
    """A room whose clients answer as over a network: with a line in their logs."""

    def answers(self, kind: Kind, contents: Mapping[str, Content]) -> dict[str, Reply]:
        replies = {}
        for name, content in contents.items():
            asked = Content(json.loads(json.dumps(content.words)), content.arrays)
            reply = answer(
                self.clients[name], kind, lambda asked=asked: asked, lambda own, c: self.work(own, kind)(c)
            )
            told = Content(json.loads(json.dumps(reply.words)), reply.arrays)
            self.sent.append((kind, name, told))
            error = told.words.get("error")
            replies[name] = Reply(None, error) if error else Reply(told)
        return replies


PLAN = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=2, min_clients=2)


def test_every_message_and_every_reply_has_a_line_with_its_hash(tmp_path: Path):
    room = LoggedRoom(owners(tmp_path, clients=2), tmp_path / "state")
    deployed(tmp_path, PLAN, room)
    for name, client in room.clients.items():
        chain = check_log(client.state)
        kinds = ["agree", "join", "train", "train", "finish"]
        both = [(what, kind) for kind in kinds for what in ("received", "sent")]
        lines = [line for line in chain.lines if line["what"] != "agreement"]
        assert [(line["what"], line["kind"]) for line in lines] == both
        assert [line["n"] for line in chain.lines if line not in lines] == [2]
        sent = [content for _, who, content in room.sent if who == name]
        found = [(line["bytes"], line["sha256"]) for line in chain.lines if line["what"] == "sent"]
        assert found == [digest(content) for content in sent]
        assert [line["round"] for line in chain.lines if line.get("kind") == "train"] == [1, 1, 2, 2]
        assert {line.get("epsilon") for line in chain.lines} == {None}


def test_a_digest_is_that_of_the_bytes_it_describes():
    w, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, 2], np.int32)
    head = '{"arrays":[["b","int32",[2]],["w","float32",[2,3]]],"words":{"a":1,"name":"x"}}\n'
    raw = head.encode() + b.tobytes() + w.tobytes()
    want = len(raw), hashlib.sha256(raw).hexdigest()
    assert digest(Content({"name": "x", "a": 1}, {"w": w, "b": b})) == want
    assert digest(Content({"name": "x", "a": 1}, {"w": w.reshape(6), "b": b})) != want


def asked_for(client: Client, work: Any, words: dict[str, Any]) -> Content:
    """A client's reply to a message with these words."""
    return answer(client, "train", lambda: Content(words, {}), work)


def client_in(tmp_path: Path) -> Client:
    return LoggedRoom(owners(tmp_path, clients=1), tmp_path / "state").clients["east"]


def test_a_refusal_has_a_line_with_its_reason_and_an_error_without(tmp_path: Path):
    client = client_in(tmp_path)
    reply = asked_for(client, Client.train, {"agreement": "x", "round": 3})

    def failing(*_: object) -> Content:
        raise ValueError("row 7 is 'Mrs X'")

    asked_for(client, failing, {})
    answer(client, "train", lambda: json.loads("not a message"), Client.train)
    lines = check_log(client.state).lines
    assert [line["what"] for line in lines] == ["received", "refused"] * 3
    assert (lines[1]["reason"], lines[1]["round"]) == (reply.words["error"], 4)
    assert "Mrs X" not in (client.state / LOG).read_text()
    assert lines[4]["sha256"] is None


def test_a_client_with_a_changed_log_sends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    client = client_in(tmp_path)
    asked_for(client, lambda *_: Content({"a": 1}, {}), {})
    raw = (client.state / LOG).read_bytes()
    (client.state / LOG).write_bytes(raw.replace(b'"received"', b'"receIved"'))
    reply = asked_for(client, lambda *_: pytest.fail("it worked"), {})
    assert set(reply.words) == {"name", "error"}
    assert re.match(r"its log audit.jsonl was changed \(line 1 was changed", reply.words["error"])
    assert "line 1 was changed" in capsys.readouterr().out
    assert (client.state / LOG).read_bytes().count(b"\n") == 2


def test_nothing_is_sent_if_its_line_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    client = client_in(tmp_path)
    write, allowed = audit_log._write_through, [True, False]

    def full(path: Path, content: bytes) -> None:
        if not allowed.pop(0):
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(audit_log, "_write_through", full)
    reply = asked_for(client, lambda *_: Content({"secret": 1}, {"w": np.zeros(3)}), {})
    assert reply == Content({"name": "east", "error": UNLOGGED}, {})


# --- the command


def test_verify_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    room = LoggedRoom(owners(tmp_path, clients=2), tmp_path / "state")
    deployed(tmp_path, PLAN, room)
    state = room.clients["east"].state
    chain = check_log(state)
    assert main(["log", "verify", str(state)]) == 0
    said = capsys.readouterr().out
    size = sum(line["bytes"] for line in chain.lines if line["what"] == "sent")
    for words in ("11 lines", "5: agree 1, finish 1, join 1, train 2", f"{size:,} sent", chain.head):
        assert words in said
    assert main(["log", "verify", str(state / LOG), "--json", "--head", chain.hashes[3][:10]]) == 0
    assert json.loads(capsys.readouterr().out) == {"fits": True, "lines": 11, "head": chain.head}
    assert main(["log", "show", str(state)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 11
    assert re.search(r"  sent  train  round 1  [\d,]+ bytes  [0-9a-f]{12}…$", shown[6])
    raw = (state / LOG).read_bytes()
    place = raw.index(b'"bytes"') + 9
    (state / LOG).write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
    assert main(["log", "verify", str(state)]) == 1
    assert "line 1 was changed: its hash is not that of what it says." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["log"], "There is no log command ''"),
        (["log", "verfy", "x"], "verify"),
        (["log", "verify", "nowhere"], "There is no log in nowhere: it does not exist."),
        (["log", "verify", ".", "--head", "xyz"], "--head must be a hash"),
    ],
)
def test_bad_input(words: list[str], error: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    assert error in capsys.readouterr().err


def test_an_empty_log_fits():
    assert read_chain(b"").head == EMPTY
    assert issubclass(BrokenLog, InputError)
