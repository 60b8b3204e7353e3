"""The client's own log of what it was asked and what left its machine, as a chain of hashes.

    audit.jsonl    a line of JSON for each message received, each reply, and what a reply cost of the budget
    audit.head     the number of lines, and the hash of the last one

Each line has its number `n`, the hash of the line `before` it, and at its end the `hash` of all that:

    hash_n = SHA-256(line n without its hash),  with before_n = hash_{n-1} in the line.

A line is on the disk, and so is the head, before the reply that it is about leaves. If a process is killed in
the middle of a line, what is left of it stays in the file, and a line `torn` after it has its SHA-256. The
file is only ever appended to.

Whoever can write these two files can make up another chain. The chain proves that nothing has changed since
somebody else noted a head.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pfedme.deploy.log import one_line
from pfedme.deploy.messages import Content, Refusal, Words, digest
from pfedme.errors import InputError
from pfedme.files import atomic_write, writing

LOG, HEAD = "audit.jsonl", "audit.head"
EMPTY = "0" * 64
"""The hash before the first line."""
LONGEST_REASON = 300
"""Characters of the reason of a refusal."""
_END = re.compile(rb'^(.*),"hash":"([0-9a-f]{64})"\}$', re.DOTALL)


class BrokenLog(InputError):
    """A log whose lines do not fit together."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line:,} {why}")
        self.line, self.why = line, why


@dataclasses.dataclass(frozen=True)
class Chain:
    """The lines of a log, after a check that they fit together."""

    lines: tuple[Words, ...] = ()
    """What each says, without its hash."""
    hashes: tuple[str, ...] = ()
    """The hash of each line."""
    torn: bytes = b""
    """What is left of lines at the end that were not written completely."""
    unended: bool = False
    """Whether the last line is complete but for the newline after it."""
    physical: int = 0
    """Number of lines in the file up to there, including torn ones."""
    broken: BrokenLog | None = None
    """What would be wrong with the torn lines if they were whole."""

    @property
    def head(self) -> str:
        """The hash of the last line."""
        return self.hashes[-1] if self.hashes else EMPTY

    def check_head(self, count: int, head: str) -> None:
        """Raises an error unless the log had this hash after so many lines."""
        if count > len(self.lines):
            raise self.broken or BrokenLog(
                self.physical + 1, f"is missing: the log had {count:,} lines, and has {len(self.lines):,}"
            )
        if (self.hashes[count - 1] if count else EMPTY) != head:
            raise BrokenLog(self.physical, "or one before it is not the one that was there")
        if self.unended and count == len(self.lines):
            raise BrokenLog(self.physical, "has lost its end")


def encode(fields: Words) -> tuple[bytes, str]:
    """A line of the log, and its hash.

    >>> line, hash = encode({"n": 1, "before": EMPTY})
    >>> line == b'{"n":1,"before":"' + b"0" * 64 + b'","hash":"' + hash.encode() + b'"}'
    True
    """
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    sha = hashlib.sha256(text).hexdigest()
    return text[:-1] + b',"hash":"' + sha.encode() + b'"}', sha


def _decode(line: bytes, number: int, before: str) -> tuple[Words, str]:
    """The inverse of `encode`, for line `number` of a chain; raises `ValueError` if it does not belong
    there."""
    found = _END.match(line)
    if found is None:
        raise ValueError("is not a line of this log")
    text, sha = found[1] + b"}", found[2].decode()
    if hashlib.sha256(text).hexdigest() != sha:
        raise ValueError("was changed: its hash is not that of what it says")
    fields = json.loads(text)
    if (fields["n"], fields["before"]) != (number, before):
        raise ValueError("does not follow the line before it: a line was removed, added or moved")
    return fields, sha


def read_chain(raw: bytes) -> Chain:
    """The chain in a file's content; raises `BrokenLog` with the first line that does not fit."""
    lines, hashes = list[Words](), list[str]()
    start, end, physical = 0, 0, 0
    broken: BrokenLog | None = None
    while start < len(raw):
        found = raw.find(b"\n", start)
        stop = found if found >= 0 else len(raw)
        try:
            fields, sha = _decode(raw[start:stop], len(lines) + 1, hashes[-1] if hashes else EMPTY)
        except (ValueError, KeyError, TypeError) as error:
            why = str(error) if type(error) is ValueError else "is not a line of this log"
            broken = broken or BrokenLog(physical + 1, why)
        else:
            if broken and not _closes(fields, raw[end:start]):
                raise broken
            broken, end = None, stop + 1
            lines.append(fields)
            hashes.append(sha)
        start, physical = stop + 1, physical + 1
    torn, unended = raw[end:], bool(raw) and end > len(raw)
    if broken and torn.endswith(b'"}\n'):  # no line is torn at its very end
        raise broken
    physical = broken.line - 1 if broken else physical
    return Chain(tuple(lines), tuple(hashes), torn, unended, physical, broken)


def _closes(fields: Words, torn: bytes) -> bool:
    """Whether a line closes off what is left of a line before it."""
    return (fields.get("what"), fields.get("sha256")) == ("torn", hashlib.sha256(torn).hexdigest())


def addition(chain: Chain, what: str, fields: Words) -> tuple[bytes, Words, str]:
    """The bytes to append to a log for a line about `what`, what the line says, and its hash; torn lines
    before it are closed off."""
    start, count, before = b"\n" if chain.unended else b"", len(chain.lines), chain.head
    if chain.torn:
        start = b"" if chain.torn.endswith(b"\n") else b"\n"
        torn = chain.torn + start
        own = {"what": "torn", "bytes": len(torn), "sha256": hashlib.sha256(torn).hexdigest()}
        line, before = encode({"n": (count := count + 1), "time": _now(), **own, "before": before})
        start += line + b"\n"
    words = {"n": count + 1, "time": _now(), "what": what, **fields, "before": before}
    line, sha = encode(words)
    return start + line + b"\n", words, sha


def head_text(count: int, sha: str) -> str:
    """The content of `audit.head` after so many lines."""
    return json.dumps({"lines": count, "hash": sha}) + "\n"


def read_head(path: Path) -> tuple[int, str]:
    """The number of lines and the hash in a file `audit.head`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        count, head = found["lines"], found["hash"]
        if type(count) is not int or count < 0 or not re.fullmatch("[0-9a-f]{64}", head):
            raise ValueError("no head")
    except (ValueError, KeyError, TypeError):
        raise BrokenLog(1, f"cannot be checked: {path.name} was changed") from None
    return count, head


class AuditLog:
    """The log in a client's state folder."""

    def __init__(self, state: Path) -> None:
        self.state, self.path, self.head = state, state / LOG, state / HEAD

    def read(self) -> Chain:
        """The lines so far; raises a refusal if they were changed."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            raw = b""
        try:
            if raw and not self.head.exists():
                raise BrokenLog(1, f"cannot be checked: {HEAD} is missing")
            return checked(raw, read_head(self.head) if self.head.exists() else None)
        except BrokenLog as broken:
            raise Refusal(
                f"its log {LOG} was changed ({broken}); its owner has to look into that, and can put the "
                f"file back, or move {LOG} and {HEAD} elsewhere, which forgets what was spent of its budget"
            ) from None

    def append(self, what: str, **fields: Any) -> Words:
        """Adds a line about `what`, which is on the disk when this returns; raises an error otherwise."""
        with self.turn():
            return self.append_in_turn(self.read(), what, **fields)

    def reply(self, received: Words, content: Content) -> Words:
        """Adds a line about the reply to a message that was `received`, with the ε that it cost; None if
        nothing is counted."""
        (size, sha), why = digest(content), content.words.get("error")
        with self.turn():
            chain = self.read()
            own = [
                line["epsilon"]
                for line in chain.lines[received["n"] :]
                if line["what"] in ("spent", "repeated") and line["round"] == received["round"]
            ]
            about = {"kind": received["kind"], "round": received["round"], "message": received["n"]}
            about |= {"bytes": size, "sha256": sha, "epsilon": sum(own) if own else None}
            if why is not None:
                return self.append_in_turn(chain, "refused", **about, reason=str(why)[:LONGEST_REASON])
            return self.append_in_turn(chain, "sent", **about)

    def end(self) -> Chain:
        """Adds a line about the end of the client, and returns all lines."""
        self.append("ended")
        return self.read()

    def append_in_turn(self, chain: Chain, what: str, **fields: Any) -> Words:
        """`append`, within a `turn` in which `chain` was read."""
        added, last, sha = addition(chain, what, fields)
        with writing(self.state):
            if not self.head.exists():
                atomic_write(self.head, head_text(0, EMPTY))
            _write_through(self.path, added)
            atomic_write(self.head, head_text(last["n"], sha))
        return last

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits until no other process uses the log, and makes others wait."""
        import fcntl  # not available on Windows

        with writing(self.state):
            self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = not self.path.exists()
            file = self.path.open("ab")
        with file:
            if new:
                self.path.chmod(0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _write_through(path: Path, content: bytes) -> None:
    """Appends to a file, and waits until it is on the disk."""
    with path.open("ab", buffering=0) as file:
        if file.write(content) != len(content):
            raise OSError("the disk is full")
        os.fsync(file.fileno())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def check_log(path: Path, noted: str = "") -> Chain:
    """The chain in a state folder or a file, after all checks; raises `BrokenLog` if one fails.

    A hash that was `noted` earlier, or its beginning, must be that of one of the lines.
    """
    if not path.exists():
        raise InputError(f"There is no log in {path}: it does not exist.")
    folder = path.is_dir()
    file = path / LOG if folder else path
    try:
        raw = file.read_bytes() if file.exists() or not folder else b""
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from None
    beside = file.with_name(HEAD)
    if folder and not raw and not beside.exists():
        raise InputError(f"There is no log in {path}; a client's state folder has {LOG}.")
    if folder and not beside.exists():
        raise BrokenLog(1, f"cannot be checked: {HEAD} is missing")
    head = read_head(beside) if beside.exists() and file.name == LOG else None
    chain = checked(raw, head)
    if noted and not any(known.startswith(noted) for known in (EMPTY, *chain.hashes)):
        raise BrokenLog(
            chain.physical, f"is the last one, and none has the hash {noted[:12]}…: the log is not the same"
        )
    return chain


def checked(raw: bytes, head: tuple[int, str] | None) -> Chain:
    """The chain in a file's content, which must have had this number of lines and hash; if they are not
    known, it must end with a complete line."""
    chain = read_chain(raw)
    if head is not None:
        chain.check_head(*head)
    elif chain.torn or chain.unended:
        raise BrokenLog(chain.physical + bool(chain.torn), "is not complete")
    return chain


def summary(chain: Chain) -> list[str]:
    """What a log says, in total."""
    by_kind = {what: Counter[str]() for what in ("received", "sent", "refused")}
    for line in chain.lines:
        if line["what"] in by_kind:
            by_kind[line["what"]][line["kind"]] += 1
    sent = sum(line["bytes"] for line in chain.lines if line["what"] in ("sent", "refused"))
    spent = [line["epsilon"] for line in chain.lines if line["what"] == "spent"]
    torn = sum(line["what"] == "torn" for line in chain.lines)
    lines = [f"{len(chain.lines):,} lines, all of which fit."]
    lines += [
        f"  {what:<10}{sum(counts.values()):,}"
        + (": " + ", ".join(f"{kind} {count:,}" for kind, count in sorted(counts.items())) if counts else "")
        for what, counts in by_kind.items()
    ]
    lines.append(f"  bytes      {sent:,} sent")
    total = chain_epsilon(chain)
    lines.append(
        "  epsilon    none was counted" if not spent else f"  epsilon    {total:.4g} in total (pfedme budget)"
    )
    if torn or chain.torn:
        lines.append(f"  torn       {torn + bool(chain.torn):,} times a process was killed in mid-line")
    return [*lines, f"  head       {chain.head}"]


def chain_epsilon(chain: Chain) -> float:
    """The total ε after the last line that spent some."""
    return next((line["total"] for line in reversed(chain.lines) if line["what"] == "spent"), 0.0)


def shown(chain: Chain) -> list[str]:
    """The lines of a log, in readable form."""
    found = []
    for line in chain.lines:
        t = f"round {line['round']}" if line.get("round") else ""
        size = f"{line['bytes']:,} bytes" if line.get("bytes") is not None else ""
        cost = f"epsilon {line['epsilon']:.4g}" if line.get("epsilon") is not None else ""
        sha = f"{line['sha256'][:12]}…" if line.get("sha256") else ""
        words = (line["what"], line.get("kind", ""), t, size, sha, cost, one_line(line.get("reason", "")))
        found.append(f"{line['n']:>6}  {line['time']}  " + "  ".join(word for word in words if word))
    return found
