"""Passwords: right ones are found out once, wrong ones always cost the same, and checks do not pile up."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import bcrypt
import pytest

from kvcache_exporter.basic_auth import Passwords, TooManyChecksError, credentials
from lab import wait_until


def hashed(password: bytes, cost: int = 4) -> str:
    return bcrypt.hashpw(password, bcrypt.gensalt(cost)).decode()


class Checks:
    """Stands in the way of bcrypt.checkpw: counts, and holds each check up while `gate` is not set."""

    def __init__(self, checkpw: Callable[[bytes, bytes], bool]) -> None:
        self.hashes: list[bytes] = []
        self.gate = threading.Event()
        self.gate.set()
        self._checkpw = checkpw

    def __call__(self, password: bytes, hashed_password: bytes) -> bool:
        self.hashes.append(hashed_password)
        assert self.gate.wait(10)
        return self._checkpw(password, hashed_password)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    checks = Checks(bcrypt.checkpw)
    monkeypatch.setattr(bcrypt, "checkpw", checks)
    return checks


def test_right_password_is_checked_once(checks: Checks) -> None:
    passwords = Passwords({"alice": hashed(b"a"), "bob": hashed(b"b")})
    assert all(passwords.accepts(b"alice", b"a") and passwords.accepts(b"bob", b"b") for _ in range(100))
    assert len(checks.hashes) == 2


def test_password_of_another_is_wrong(checks: Checks) -> None:
    passwords = Passwords({"alice": hashed(b"a"), "bob": hashed(b"b")})
    assert passwords.accepts(b"alice", b"a")
    assert not passwords.accepts(b"bob", b"a")
    assert not passwords.accepts(b"carol", b"a")
    assert not passwords.accepts(b"", b"")


def test_unknown_user_costs_what_a_known_one_does(checks: Checks) -> None:
    """One check with a hash of the same cost, each time."""
    users = {"alice": hashed(b"a", 5), "bob": hashed(b"b", 5)}
    passwords = Passwords(users)
    for name in (b"alice", b"nobody", b"alice", b"nobody"):
        assert not passwords.accepts(name, b"wrong")
    assert len(checks.hashes) == 4
    assert all(used.startswith(b"$2b$05$") for used in checks.hashes)
    assert checks.hashes[1] == checks.hashes[3]


def test_right_password_for_the_hash_that_stands_in_is_wrong_for_an_unknown_user() -> None:
    passwords = Passwords({"alice": hashed(b"a")})
    assert not passwords.accepts(b"nobody", b"a")
    assert not passwords.accepts(b"nobody", b"a")


@pytest.mark.parametrize("version", ["2a", "2b", "2y"])
def test_versions_of_the_hash(version: str) -> None:
    passwords = Passwords({"alice": hashed(b"a").replace("2b", version, 1)})
    assert passwords.accepts(b"alice", b"a")
    assert not passwords.accepts(b"alice", b"b")


def test_long_password_is_cut_as_htpasswd_and_go_do() -> None:
    passwords = Passwords({"alice": hashed(b"x" * 72)})
    assert passwords.accepts(b"alice", b"x" * 100)
    assert not passwords.accepts(b"alice", b"x" * 71)


def test_same_password_at_once_is_checked_once(checks: Checks) -> None:
    passwords = Passwords({"alice": hashed(b"a")})
    checks.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(passwords.accepts, b"alice", b"a") for _ in range(8)]
        wait_until(lambda: checks.hashes)
        checks.gate.set()
    assert all(answer.result() for answer in answers)
    assert len(checks.hashes) == 1


def test_checks_do_not_pile_up(checks: Checks) -> None:
    """One runs and a few wait; the next is told so at once, and who is known passes meanwhile."""
    passwords = Passwords({"alice": hashed(b"a")})
    assert passwords.accepts(b"alice", b"a")
    checks.gate.clear()
    with ThreadPoolExecutor(40) as pool:
        answers = [pool.submit(passwords.accepts, b"alice", b"wrong %d" % number) for number in range(40)]
        wait_until(lambda: sum(answer.done() for answer in answers) == 24)
        assert len(checks.hashes) == 2
        assert passwords.accepts(b"alice", b"a")
        with pytest.raises(TooManyChecksError):
            passwords.accepts(b"alice", b"wrong")
        checks.gate.set()
    assert sum(isinstance(answer.exception(), TooManyChecksError) for answer in answers) == 24
    assert not passwords.accepts(b"alice", b"wrong")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"Basic {base64.b64encode('zoë:p:w'.encode()).decode()}", ("zoë".encode(), b"p:w")),
        (f"basic  {base64.b64encode(b':').decode()}", (b"", b"")),
        (f"Basic {base64.b64encode(b'no colon').decode()}", None),
        ("Basic !!!", None),
        ("Basic é", None),
        ("Basic", None),
        ("Bearer YTpi", None),
        ("", None),
    ],
)
def test_authorization_header(header: str, expected: tuple[bytes, bytes] | None) -> None:
    assert credentials(header) == expected
