"""Part files between the hosts of one job: a small HTTP server per process, and its client.

For the peer tier: a rank's part also lies in another host's memory, and comes back from there when its own host is lost.
Only files whose names are parts' are taken or given, only to who knows the job's token, none larger than the limit, and
every wait has a deadline. A file appears under its name when it has arrived whole.
"""

from __future__ import annotations

import hmac
import http.client
import os
import re
import shutil
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, cast

from resilient.errors import CheckpointError

_CHUNK = 1 << 20
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,200}")


class PartServer:
    """Gives and takes the files of `folder`. It listens from its construction on until `close`.

    token: shared by the job's ranks and nobody else. limit: bytes of the largest file it takes. timeout_s: of one silence
    of the other side. Raises OSError when no port can be had."""

    def __init__(self, folder: Path, token: str, *, limit: int, timeout_s: float, host: str = "") -> None:
        handler = type("Handler", (_Handler,), {"folder": folder, "token": token, "limit": limit, "timeout": timeout_s})
        self._server = ThreadingHTTPServer((host, 0), handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="resilient-parts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. Transfers under way end with the process."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


class _Handler(BaseHTTPRequestHandler):
    folder: Path
    token: str
    limit: int
    server_version, sys_version = "resilient", ""

    def do_PUT(self) -> None:
        path = self._allowed()
        if path is None:
            return
        try:
            size = int(self.headers.get("Content-Length", ""))
        except ValueError:
            return self._answer(411, "no length")
        if not 0 <= size <= self.limit:
            return self._answer(413, f"{size} bytes; the limit is {self.limit}")
        partial = path.with_name(f"{path.name}.{threading.get_ident()}.partial")
        try:
            with open(partial, "wb") as file:
                left = size
                while left and (data := self.rfile.read(min(_CHUNK, left))):
                    file.write(data)
                    left -= len(data)
            if left:
                raise OSError(f"the sender stopped {left} bytes before the end")
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            self.close_connection = True
            return self._answer(507, str(error))
        self._answer(201, "")

    def do_GET(self) -> None:
        path = self._allowed()
        if path is None:
            return
        try:  # a name may be asked for by its beginning: who asks does not know the digest at its end
            found = path if path.exists() else next(iter(sorted(path.parent.glob(f"{path.name}-*.pt"))), path)
            file = open(found, "rb")  # noqa: SIM115 - an answer is due when it cannot be opened
        except OSError as error:
            return self._answer(404, str(error.strerror))
        with file:
            self.send_response(200)
            self.send_header("Content-Location", found.name)
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            shutil.copyfileobj(file, cast(IO[bytes], self.wfile), _CHUNK)

    def _allowed(self) -> Path | None:
        given = self.headers.get("Authorization", "")
        name = self.path.lstrip("/")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            self.close_connection = True
            self._answer(403, "wrong token")
        elif not _NAME.fullmatch(name):
            self.close_connection = True
            self._answer(400, "not a part's name")
        else:
            return self.folder / name
        return None

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: the ranks say what fails."""


Address = tuple[str, int]


def send_part(path: Path, to: Address, token: str, timeout_s: float) -> None:
    """Copy a file to another host under the same name. Raises CheckpointError, naming both, when it does not arrive."""
    connection = http.client.HTTPConnection(*to, timeout=timeout_s)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            headers = {"Authorization": token, "Content-Length": str(size)}
            connection.request("PUT", f"/{path.name}", body=file, headers=headers)
        answer = connection.getresponse()
        said = answer.read(1000).decode(errors="replace")
        if answer.status != 201:
            raise CheckpointError(f"{to[0]}:{to[1]} did not take {path.name}: {answer.status} {said}")
    except (OSError, http.client.HTTPException) as error:
        raise CheckpointError(f"{path.name} could not be sent to {to[0]}:{to[1]}: {error}") from error
    finally:
        connection.close()


def fetch_part(name: str, source: Address, into: Path, token: str, timeout_s: float) -> Path:
    """Copy a file from another host into the folder `into`, and return it. name: whole, or all of it before the last dash.
    Raises CheckpointError when it does not come whole."""
    connection = http.client.HTTPConnection(*source, timeout=timeout_s)
    partial = into / f"{name}.{os.getpid()}.partial"
    try:
        connection.request("GET", f"/{name}", headers={"Authorization": token})
        answer = connection.getresponse()
        if answer.status != 200:
            said = answer.read(1000).decode(errors="replace")
            raise CheckpointError(f"{source[0]}:{source[1]} did not give {name}: {answer.status} {said}")
        whole = answer.headers.get("Content-Location", "")
        if not _NAME.fullmatch(whole) or not whole.startswith(name):
            raise CheckpointError(f"{source[0]}:{source[1]} gave {whole!r} for {name}")
        with open(partial, "wb") as file:
            shutil.copyfileobj(answer, file, _CHUNK)
            if answer.length:  # of what was announced and has not come
                raise CheckpointError(f"{name} from {source[0]}:{source[1]} ends {answer.length} bytes early")
        os.replace(partial, path := into / whole)
    except (OSError, http.client.HTTPException) as error:
        raise CheckpointError(f"{name} could not be fetched from {source[0]}:{source[1]}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
        connection.close()
    return path


def partners(hosts: Sequence[str]) -> list[int | None]:
    """For each rank the rank on another host that keeps a copy of its part; None where all ranks are on one host.

    Ranks in the order of their hosts are shifted by the size of the largest host, so that load is even; where one host has
    more than half of all ranks, those of its ranks that would stay at home go to the others in turn."""
    order = sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))
    sizes = {host: sum(h == host for h in hosts) for host in hosts}
    found: list[int | None] = [None] * len(hosts)
    if len(sizes) < 2:
        return found
    shift = max(sizes.values())
    for i, rank in enumerate(order):
        elsewhere = [r for r in order if hosts[r] != hosts[rank]]
        peer = order[(i + shift) % len(order)]
        found[rank] = peer if hosts[peer] != hosts[rank] else elsewhere[i % len(elsewhere)]
    return found
