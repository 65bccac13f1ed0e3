"""Part files between hosts: whole or not at all, to who knows the token, and off-node."""

from __future__ import annotations

import http.client
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.checkpoint.part_server import PartServer, fetch_part, partners, send_part
from resilient.errors import CheckpointError

NAME = "step-00000005-a00000007-rank-00001.pt"


@pytest.fixture
def there(tmp_path: Path) -> Iterator[tuple[PartServer, Path]]:
    folder = tmp_path / "there"
    folder.mkdir()
    server = PartServer(folder, "secret", limit=4 << 20, timeout_s=5.0, host="127.0.0.1")
    yield server, folder
    server.close()


def test_a_part_goes_and_comes_back_bit_for_bit(there: tuple[PartServer, Path], tmp_path: Path):
    server, folder = there
    address, data = ("127.0.0.1", server.port), os.urandom(3_000_001)
    (tmp_path / NAME).write_bytes(data)
    send_part(tmp_path / NAME, address, "secret", 5.0)
    assert (folder / NAME).read_bytes() == data
    (tmp_path / "back").mkdir()
    assert fetch_part(NAME, address, tmp_path / "back", "secret", 5.0).read_bytes() == data
    assert sorted(p.name for p in folder.iterdir()) == [NAME]


def test_many_at_once(there: tuple[PartServer, Path], tmp_path: Path):
    server, folder = there
    names = [f"rank-{i:05d}.pt" for i in range(8)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 50_000)
    threads = [
        threading.Thread(target=send_part, args=(tmp_path / name, ("127.0.0.1", server.port), "secret", 10.0))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert {name: (folder / name).read_bytes() for name in names} == {n: n.encode() * 50_000 for n in names}


def test_what_is_refused(there: tuple[PartServer, Path], tmp_path: Path):
    server, folder = there
    address = ("127.0.0.1", server.port)
    (tmp_path / NAME).write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match="403"):
        send_part(tmp_path / NAME, address, "guess", 5.0)
    (tmp_path / "large.pt").write_bytes(b"")
    os.truncate(tmp_path / "large.pt", (4 << 20) + 1)
    with pytest.raises(CheckpointError, match=r"413|could not be sent"):
        send_part(tmp_path / "large.pt", address, "secret", 5.0)
    with pytest.raises(CheckpointError, match="404"):
        fetch_part("rank-00009.pt", address, tmp_path, "secret", 5.0)
    (tmp_path / "outside.pt").write_bytes(b"not yours")
    connection = http.client.HTTPConnection(*address, timeout=5.0)
    for path in ("/../outside.pt", "/..%2Foutside.pt", "//etc/passwd", "/"):
        connection.request("GET", path, headers={"Authorization": "secret"})
        answer = connection.getresponse()
        assert answer.status in (400, 404) and b"not yours" not in answer.read()
        connection.close()
    assert not list(folder.iterdir())


def test_half_a_part_never_appears(there: tuple[PartServer, Path]):
    server, folder = there
    with socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as raw:
        raw.sendall(
            f"PUT /{NAME} HTTP/1.1\r\nAuthorization: secret\r\nContent-Length: 1000\r\n\r\n".encode() + b"x" * 400
        )
        raw.shutdown(socket.SHUT_WR)
        assert b" 507 " in raw.recv(1000)
    assert not list(folder.iterdir())


def test_a_host_that_is_gone_is_an_error_within_the_deadline(tmp_path: Path):
    (tmp_path / NAME).write_bytes(b"x")
    with socket.socket() as nobody:  # bound, never listening
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(CheckpointError, match="could not be sent"):
            send_part(tmp_path / NAME, ("127.0.0.1", nobody.getsockname()[1]), "secret", 2.0)
    with socket.socket() as silent:  # takes the connection and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(CheckpointError, match="could not be fetched"):
            fetch_part(NAME, ("127.0.0.1", silent.getsockname()[1]), tmp_path / "x", "secret", 0.3)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=24))
def test_a_partner_is_on_another_host_and_the_load_is_even(hosts: list[str]):
    found = partners(hosts)
    if len(set(hosts)) == 1:
        assert found == [None] * len(hosts)
        return
    assert all(peer is not None and hosts[peer] != host for peer, host in zip(found, hosts, strict=True))
    if max(Counter(hosts).values()) * 2 <= len(hosts):
        assert sorted(p for p in found if p is not None) == list(range(len(hosts))), "each keeps one"
