"""A model hub of one repository, on a free port of this host."""

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def hub(repo: str, files: dict[str, bytes]) -> Iterator[str]:
    """Serves `files` as `repo`; yields the endpoint."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urllib.parse.urlparse(self.path).path
            resolve = f"/{repo}/resolve/{SHA}/"
            if path == "/":
                self.answer(200, b"")
            elif path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/{SHA}"):
                siblings = [{"rfilename": n, "size": len(d)} for n, d in files.items()]
                info = {"id": repo, "sha": SHA, "siblings": siblings, "private": False}
                self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
            elif path.startswith(f"/api/models/{repo}/tree/"):
                tree = [
                    {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for n, d in files.items()
                ]
                self.answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
            elif path.removeprefix(resolve) in files:
                data = files[path.removeprefix(resolve)]
                tag = f'"{hashlib.sha1(data).hexdigest()}"'
                self.answer(200, data, {"ETag": tag, "X-Repo-Commit": SHA})
            else:
                self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

        def answer(self, code: int, data: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(code)
            for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
