"""A local server with the parts of the Hugging Face hub's HTTP API that huggingface_hub and datasets use, for tests.

with HubServer() as hub:
    hub.add("models", "owner/name", {"config.json": b"{}"})
    run(..., env={**os.environ, **hub.environment(tmp_path)})
"""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


@dataclass
class Repo:
    """A repository: its files by revision (branch, tag or commit)."""

    private: bool = False
    gated: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        digest = hashlib.sha1(json.dumps([[name, _oid(files[name])] for name in sorted(files)]).encode()).hexdigest()
        self.commits[digest], self.refs[ref] = files, digest
        return digest


class HubServer:
    """The server; `requests` has "GET /path" of each request."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.requests: list[str] = []
        self.large: dict[str, bytes] = {}  # contents of Git LFS objects by SHA-256
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def add(self, kind: str, name: str, files: dict[str, bytes], ref: str = "main", **options: bool) -> str:
        """Add a commit to a repository of "models" or "datasets", and return its hash."""
        return self.repos.setdefault((kind, name), Repo(**options)).commit(files, ref)

    def add_folder(self, name: str, folder: Path, ref: str = "main") -> str:
        """Add a model's folder."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return self.add("models", name, files, ref)

    def environment(self, home: Path) -> dict[str, str]:
        """Return variables that direct huggingface_hub to this server, with its cache in `home`."""
        return {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {path}")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in ("", TOKEN):
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        parts = path.strip("/").split("/")
        if parts[:3] == ["api", "repos", "create"]:
            return self._create(json.loads(body), token)
        if parts == ["api", "validate-yaml"]:  # of a model card
            return self._json({"errors": [], "warnings": []})
        if parts[0] == "lfs" and self.command == "PUT":
            self.hub.large[parts[1]] = body
            return self._json({})
        if parts[0] == "api" and parts[1:] == ["whoami-v2"]:
            return self._json({"type": "user", "name": "tester", "orgs": []})
        if parts[2:] == ["info", "lfs", "objects", "batch"]:
            objects = [{**one, **self._upload(one["oid"])} for one in json.loads(body)["objects"]]
            return self._json({"transfer": "basic", "objects": objects})
        kind = parts.pop(1) if parts[0] == "api" else parts.pop(0) if parts[0] == "datasets" else "models"
        api = parts[0] == "api"
        name, rest = "/".join(parts[api : api + 2]), parts[api + 2 :]
        repo = self.hub.repos.get((kind, name))
        if repo is None or (repo.private and not token):
            return self._refuse(401 if not token else 404, "RepoNotFound", "Repository not found")
        verb, revision = rest[0] if rest else "revision", rest[1] if len(rest) > 1 else "main"
        if not token and verb in ("branch", "preupload", "commit"):
            return self._refuse(401, "", "Invalid username or password.")
        if verb == "branch":
            repo.refs.setdefault(revision, repo.refs["main"])
            return self._json({})
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files, inner = repo.commits[commit], "/".join(rest[2:])
        if repo.gated and verb in ("resolve", "tree"):
            return self._refuse(403, "GatedRepo", "Access to model is restricted")
        if verb == "auth-check":
            return self._json({}) if not repo.gated else self._refuse(403, "GatedRepo", "Access is restricted")
        if verb == "revision":
            siblings = [{"rfilename": file} for file in files]
            return self._json({"id": name, "sha": commit, "private": repo.private, "tags": [], "siblings": siblings})
        if verb == "tree":
            entries = _tree(files, inner, recursive="recursive=true" in self.path.lower())
            return self._json(entries) if entries else self._refuse(404, "EntryNotFound", "Entry not found")
        if verb == "paths-info":
            asked = json.loads(body)["paths"]
            return self._json([_entry(file, files[file]) for file in files if file in asked])
        if verb == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
            answers = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return self._json({"files": answers})
        if verb == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            added = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                if line["key"] == "file"
                else self.hub.large[line["value"]["oid"]]
                for line in lines
                if line["key"] != "header"
            }
            oid = repo.commit({**files, **added}, revision)
            return self._json({"commitOid": oid, "commitUrl": f"{self.hub.address}/{name}/commit/{oid}"})
        if verb != "resolve" or inner not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        return self._send(200, files[inner], {"X-Repo-Commit": commit, "ETag": f'"{_oid(files[inner])}"'})

    def _create(self, wanted: dict[str, Any], token: str) -> None:
        owner = wanted.get("organization") or "tester"
        name = f"{owner}/{wanted['name']}"
        if not token:
            return self._refuse(401, "", "Invalid username or password.")
        if owner not in ("own", "tester"):
            return self._refuse(403, "", f"You don't have the rights to create a model under {owner}")
        if ("models", name) in self.hub.repos:
            there = {"error": "You already created this model repo", "url": f"{self.hub.address}/{name}"}
            return self._send(409, json.dumps(there).encode(), {"Content-Type": "application/json"})
        self.hub.repos["models", name] = repo = Repo(private=wanted.get("visibility") == "private")
        repo.commit({})
        return self._json({"url": f"{self.hub.address}/{name}", "name": name})

    def _upload(self, oid: str) -> dict[str, Any]:
        upload = {"href": f"{self.hub.address}/lfs/{oid}", "header": {}}
        return {} if oid in self.hub.large else {"actions": {"upload": upload}}

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """Return the files in a folder, recursively, or its files and folders."""
    start = f"{folder}/" if folder else ""
    below = [path for path in sorted(files) if path.startswith(start)]
    folders = {start + path.removeprefix(start).partition("/")[0] for path in below if "/" in path.removeprefix(start)}
    here = below if recursive else [path for path in below if "/" not in path.removeprefix(start)]
    entries = [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)]
    return [*(_entry(path, files[path]) for path in here), *([] if recursive else entries)]


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "oid": _oid(content), "size": len(content)}
