"""An HTTP proxy in front of the store that does to chosen requests what networks and stores do now and then."""

import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, NamedTuple
from urllib.parse import unquote

from dflash_core.storage.s3 import Access

Fault = Literal["drop", "lose answer", "truncate", "no length", "stall", "flip"]


class Status(NamedTuple):
    """An error answer instead of the store's."""

    status: int
    code: str


class Request(NamedTuple):
    """What a script sees of a request."""

    method: str
    path: str
    headers: dict[str, str]
    number: int
    """How many requests with this method and path came before."""


Script = Callable[[Request], Fault | Status | None]
STALL_S = 8.0


class Proxy:
    """Forwards to the store at `url`; `script` (replaceable at any time) says which requests fare otherwise."""

    def __init__(self, url: str) -> None:
        self.script: Script = lambda request: None
        self.seen: Counter[tuple[str, str]] = Counter()
        self._target = url.removeprefix("http://")
        self._lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def number(self, method: str, path: str) -> int:
        """Count one more request."""
        with self._lock:
            self.seen[method, path] += 1
            return self.seen[method, path] - 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = unquote(self.path.partition("?")[0])
                number = proxy.number(self.command, path)
                fault = proxy.script(Request(self.command, path, dict(self.headers), number))
                if fault == "drop":
                    self.close_connection = True
                elif isinstance(fault, Status):
                    self.answer(fault.status, {}, f"<Error><Code>{fault.code}</Code></Error>".encode())
                else:
                    self.pass_on(body, fault)

            def pass_on(self, body: bytes, fault: Fault | None) -> None:
                store = http.client.HTTPConnection(proxy._target, timeout=30)
                store.request(self.command, self.path, body or None, dict(self.headers))
                answer = store.getresponse()
                content, headers = answer.read(), dict(answer.getheaders())
                store.close()
                if fault == "lose answer":
                    self.close_connection = True
                else:
                    self.answer(answer.status, headers, content, fault)

            def answer(self, status: int, headers: dict[str, str], body: bytes, fault: Fault | None = None) -> None:
                self.send_response_only(status)
                length = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                if fault == "no length":
                    self.send_header("Connection", "close")
                else:
                    self.send_header("Content-Length", length)
                self.end_headers()
                self.close_connection = self.close_connection or fault is not None
                if self.command == "HEAD":
                    return
                half = len(body) // 2
                if fault == "flip":
                    body = body[:half] + bytes([body[half] ^ 1]) + body[half + 1 :]
                self.wfile.write(body[:half] if fault in ("truncate", "no length", "stall") else body)
                if fault == "stall":
                    self.wfile.flush()
                    time.sleep(STALL_S)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward  # noqa: N815

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        return Handler


@contextmanager
def proxy_of(access: Access) -> Iterator[Proxy]:
    """A proxy in front of a store, that runs within."""
    assert access.endpoint_url is not None
    proxy = Proxy(access.endpoint_url)
    thread = threading.Thread(target=proxy.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.server.shutdown()
        proxy.server.server_close()
