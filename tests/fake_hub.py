"""A Hugging Face Hub on loopback: enough of its HTTP interface to take a model, and as strict as the real one.

It checks what the real one checks: who is asking, the sha256 and size of every large file, that a commit names nothing
that was not uploaded, that the card's metadata can be read, and that its token is not sent to the storage.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml  # type: ignore[import-untyped]

USER, ORGANISATION = "tester", "swarmers"
LARGE_FILES = (".safetensors", ".bin", ".pt")
LARGEST_REGULAR = 10 * 2**20


class Refused(Exception):
    def __init__(self, status: int, message: str, **more: object) -> None:
        super().__init__(message)
        self.status, self.body = status, {"error": message, **more}


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    messages: list[str] = field(default_factory=list)
    sha: str = "0" * 40

    def oid(self, path: str) -> str | None:
        """What the Hub compares to know whether a file has changed: git's name of it, or its sha256."""
        if path not in self.files:
            return None
        data = self.files[path]
        if path in self.large:
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class FakeHub:
    def __init__(self, url: str) -> None:
        self.url = url
        self.storage_url = url.replace("127.0.0.1", "localhost")
        self.token = f"hf_{secrets.token_hex(17)}"
        self.repositories: dict[str, Repository] = {}
        self.storage: dict[str, bytes] = {}
        self.requests: list[str] = []
        self._signatures: dict[str, tuple[str, int]] = {}
        self._failures: dict[str, list[int]] = defaultdict(list)

    def fail(self, route: str, status: int, times: int = 1) -> None:
        """Answer the next requests of a route (the name of its method below) with this status."""
        self._failures[route] += [status] * times

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> tuple[int, dict[str, Any]]:
        path = urlsplit(target).path
        self.requests.append(f"{method} {path}")
        for verb, pattern, route in ROUTES:
            match = re.fullmatch(pattern, path)
            if verb == method and match:
                if self._failures[route.__name__]:
                    raise Refused(self._failures[route.__name__].pop(0), "as the test wants it")
                if route is FakeHub.store:
                    return 200, self.store(target, headers, body)
                self._authorize(headers)
                return 200, route(self, *match.groups(), headers=headers, body=body)
        raise Refused(404, f"no such address: {method} {path}")

    def _authorize(self, headers: Any) -> None:
        if headers["Authorization"] != f"Bearer {self.token}":
            raise Refused(401, "Invalid username or password.")

    def _repository(self, repo: str) -> Repository:
        if repo not in self.repositories:
            raise Refused(404, "Repository not found")
        return self.repositories[repo]

    # Accounts and repositories

    def whoami(self, **_: Any) -> dict[str, Any]:
        return {"type": "user", "name": USER, "orgs": [{"type": "org", "name": ORGANISATION}]}

    def create(self, *, body: bytes, **_: Any) -> dict[str, Any]:
        wanted = json.loads(body)
        owner, name = wanted.get("organization") or USER, wanted["name"]
        if wanted.get("type", "model") != "model":
            raise Refused(400, "this Hub has models only")
        if not re.fullmatch(r"[\w.-]{1,96}", name) or name.endswith("-forbidden"):
            raise Refused(400, f"Invalid repository name {name}")
        if owner not in (USER, ORGANISATION):
            raise Refused(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        repo = f"{owner}/{name}"
        if repo in self.repositories:
            raise Refused(409, "You already created this model repo", url=f"{self.url}/{repo}")
        # Older versions of the library say private, newer ones visibility.
        self.repositories[repo] = Repository(wanted.get("private") is True or wanted.get("visibility") == "private")
        return {"url": f"{self.url}/{repo}", "name": repo}

    def info(self, repo: str, **_: Any) -> dict[str, Any]:
        found = self._repository(repo)
        return {"id": repo, "private": found.private, "sha": found.sha}

    # A commit, from its announcement to its end

    def validate_yaml(self, *, body: bytes, **_: Any) -> dict[str, Any]:
        _check_metadata(json.loads(body)["content"])
        return {"errors": [], "warnings": []}

    def preupload(self, repo: str, *, body: bytes, **_: Any) -> dict[str, Any]:
        found = self._repository(repo)
        files = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            large = path.endswith(LARGE_FILES) or file["size"] > LARGEST_REGULAR
            mode = "lfs" if large else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": found.oid(path)})
        return {"files": files}

    def lfs_batch(self, repo: str, *, headers: Any, body: bytes) -> dict[str, Any]:
        self._repository(repo)
        asked = json.loads(body)
        if headers["Content-Type"] != "application/vnd.git-lfs+json" or asked["hash_algo"] != "sha256":
            raise Refused(422, "not a request of LFS")
        if asked["operation"] != "upload" or "basic" not in asked["transfers"]:
            raise Refused(422, "only basic uploads")
        return {"transfer": "basic", "objects": [self._instructions(repo, item) for item in asked["objects"]]}

    def _instructions(self, repo: str, item: dict[str, Any]) -> dict[str, Any]:
        oid, size = item["oid"], item["size"]
        if oid in self.storage:
            return {"oid": oid, "size": size}
        signature = secrets.token_hex(8)
        self._signatures[signature] = (oid, size)
        upload = {"href": f"{self.storage_url}/storage/{oid}?signature={signature}"}
        verify = {"href": f"{self.url}/{repo}.git/info/lfs/objects/verify"}
        return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}}

    def store(self, target: str, headers: Any, body: bytes) -> dict[str, Any]:
        """The storage is another service: it knows signatures, and refuses whoever also shows a token."""
        signature = parse_qs(urlsplit(target).query).get("signature", [""])[0]
        if signature not in self._signatures:
            raise Refused(403, "The signature is not one of ours")
        if headers["Authorization"] is not None:
            raise Refused(400, "Only one auth mechanism allowed")
        oid, size = self._signatures[signature]
        if len(body) != size or hashlib.sha256(body).hexdigest() != oid:
            raise Refused(400, "The content is not what was announced")
        self.storage[oid] = body
        return {}

    def lfs_verify(self, repo: str, *, body: bytes, **_: Any) -> dict[str, Any]:
        self._repository(repo)
        asked = json.loads(body)
        if len(self.storage.get(asked["oid"], b"")) != asked["size"]:
            raise Refused(404, "The object was not uploaded")
        return {}

    def commit(self, repo: str, *, headers: Any, body: bytes) -> dict[str, Any]:
        """All of it or nothing."""
        found = self._repository(repo)
        if headers["Content-Type"] != "application/x-ndjson":
            raise Refused(415, "not a stream of JSON lines")
        header, *operations = [json.loads(line) for line in body.splitlines()]
        if header["key"] != "header" or not header["value"]["summary"]:
            raise Refused(400, "A commit begins with its header")
        files, large = dict(found.files), set(found.large)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file" and value["encoding"] == "base64":
                files[value["path"]] = base64.b64decode(value["content"], validate=True)
            elif operation["key"] == "lfsFile" and value["algo"] == "sha256":
                if len(self.storage.get(value["oid"], b"")) != value["size"]:
                    raise Refused(400, f"LFS pointer {value['path']} points to a file that does not exist")
                files[value["path"]] = self.storage[value["oid"]]
                large.add(value["path"])
            else:
                raise Refused(400, f"cannot do {operation['key']}")
        if "README.md" in files:
            _check_metadata(files["README.md"].decode())
        found.files, found.large, found.sha = files, large, secrets.token_hex(20)
        found.messages.append(header["value"]["summary"])
        url = f"{self.url}/{repo}/commit/{found.sha}"
        return {"success": True, "commitOid": found.sha, "commitUrl": url}


_REPO = r"([\w.-]+/[\w.-]+?)"
ROUTES: list[tuple[str, str, Callable[..., dict[str, Any]]]] = [
    ("GET", "/api/whoami-v2", FakeHub.whoami),
    ("POST", "/api/repos/create", FakeHub.create),
    ("GET", f"/api/models/{_REPO}(?:/revision/main)?", FakeHub.info),
    ("POST", "/api/validate-yaml", FakeHub.validate_yaml),
    ("POST", f"/api/models/{_REPO}/preupload/main", FakeHub.preupload),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", FakeHub.lfs_batch),
    ("PUT", "/storage/[0-9a-f]{64}", FakeHub.store),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/verify", FakeHub.lfs_verify),
    ("POST", f"/api/models/{_REPO}/commit/main", FakeHub.commit),
]


def _check_metadata(card: str) -> None:
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    try:
        metadata = yaml.safe_load(match[1]) if match else {}
    except yaml.YAMLError as error:
        raise Refused(400, "Invalid metadata in README.md", errors=[{"message": str(error)}]) from None
    bases = metadata.get("base_model", [])
    for base in [bases] if isinstance(bases, str) else bases:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", base):
            raise Refused(
                400, "Invalid metadata in README.md", errors=[{"message": f'"base_model" {base} is no model'}]
            )


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            length = self.headers["Content-Length"]
            status: int = 411
            answer: dict[str, Any] = {"error": "how long is it?"}
            if self.command == "GET" or length is not None:
                body = self.rfile.read(int(length or 0))
                try:
                    status, answer = hub.answer(self.command, self.path, self.headers, body)
                except Refused as refused:
                    status, answer = refused.status, refused.body
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
