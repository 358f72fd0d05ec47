"""A retrieval service as skyrl-gym's search tool expects it, on a free port of this machine: one document a query."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class SearchService:
    """`requests` holds what was asked, in order; `failures` is how many requests are answered with 500 first."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[dict[str, Any]] = []
        self.failures = 0


@contextmanager
def search_service() -> Iterator[SearchService]:
    """Serves while it is open."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            service.requests.append(asked)
            code = 500 if len(service.requests) <= service.failures else 200
            documents = [{"document": {"contents": f"{asked['query']} is {n}"}} for n in range(asked["topk"])]
            body = json.dumps({"result": [documents]}).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service = SearchService(f"http://127.0.0.1:{server.server_address[1]}/retrieve")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
