"""A model hub on 127.0.0.1 with all that `huggingface_hub` requests: commits, listings, files with etags."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest

Files = dict[str, bytes]


@dataclass
class Repository:
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False  # requests without TOKEN are refused


TOKEN = "hf_of_the_tests"


class SmallHub:
    """Repositories, and every request received: (method, path, token)."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.url = ""

    def commit(self, name: str, files: Files | Path, branch: str = "main", gated: bool = False) -> str:
        """Put files, or those of a folder, on a branch; returns the commit."""
        if isinstance(files, Path):
            files = {
                path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()
            }
        repository = self.repositories.setdefault(name, Repository())
        repository.gated = gated
        digest = hashlib.sha1(b"".join(key.encode() + b"\0" + files[key] for key in sorted(files))).hexdigest()
        repository.commits[digest] = dict(files)
        repository.branches[branch] = digest
        return digest

    def asked_for(self) -> set[str]:
        """Names of the files whose contents were sent."""
        return {path.split("/", 5)[5] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path}


def _handler(hub: SmallHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            hub.requests.append((self.command, path, token))
            for pattern, answer in (
                (r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", self.info),
                (r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", self.tree),
                (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.file),
            ):
                found = re.fullmatch(pattern, path)
                if found and "/tree/" not in (found[1] + (found[2] or "")):
                    return self.allowed(token, answer, *found.groups())
            self.answer(404, b"{}")

        def allowed(self, token: str, answer: Any, name: str, revision: str | None, *rest: str) -> None:
            repository = hub.repositories.get(name)
            if repository is None:
                return self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            if repository.gated and token != TOKEN:
                return self.answer(403 if token else 401, b"{}", {"X-Error-Code": "GatedRepo"})
            commit = repository.branches.get(revision or "main", revision)
            if commit not in repository.commits:
                return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return answer(name, commit, repository.commits[commit], *rest)

        def info(self, name: str, commit: str, files: Files) -> None:
            siblings = [{"rfilename": file} for file in files]
            self.answer(200, json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings}).encode())

        def tree(self, name: str, commit: str, files: Files) -> None:
            entries = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in files.items()
            ]
            self.answer(200, json.dumps(entries).encode())

        def file(self, name: str, commit: str, files: Files, file: str) -> None:
            if file not in files:
                return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            data, status = files[file], 200
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(part[1]), min(int(part[2] or len(data) - 1), len(data) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                data, status = data[first : last + 1], 206
            self.answer(status, data, headers)

        def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *ignored: Any) -> None:
            pass

    return Handler


@contextmanager
def small_hub() -> Iterator[SmallHub]:
    """Yields a hub that is served as long as the context."""
    hub = SmallHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path, offline: bool = False, token: str = "") -> None:
    """Set the constants that `huggingface_hub` reads from environment variables when it is imported."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.setenv("HF_TOKEN", token)
