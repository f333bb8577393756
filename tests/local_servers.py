"""Servers on this machine alone, for registries that are away, slow, forbidding or half-written."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What a server sends; a `promised` length beyond that of the body breaks the answer off."""

    body: bytes = b"{}"
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    promised: int | None = None


@contextlib.contextmanager
def serving(answer: Callable[[str, str, bytes], Answer]) -> Iterator[str]:
    """The address of a server that answers `answer(method, path, body)`."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = answer(self.command, self.path, sent)
            self.send_response(found.status)
            for name, value in found.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(found.promised or len(found.body)))
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(found.body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _answer  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def failing(kind: str) -> Iterator[str]:
    """The address of a server that is `refusing`, `silent`, `forbidding` or `half` written."""
    if kind in ("forbidding", "half"):
        body = b"user:hunter2 may not" if kind == "forbidding" else b'{"registered_model": {"na'
        with serving(lambda *_: Answer(body, 403 if kind == "forbidding" else 200)) as address:
            yield address
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "silent":  # the kernel takes the connection, and nobody ever reads from it
            listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
