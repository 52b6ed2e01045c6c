"""A local server that speaks as much of the hub's API as huggingface_hub uses to fetch a model."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+?)(?:/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


class Hub:
    """What is served. repos: id -> {revision: {path: bytes}}; "main" must be one of them.

    tokens: id -> the token without which a repository is not found; gated: ids whose files need terms.
    cuts: path -> after how many bytes its next answers break off, one after the other.
    seen: "METHOD path [range]".
    gate: while it is cleared, answers with weights wait.
    """

    def __init__(self):
        self.repos, self.tokens, self.gated, self.cuts = {}, {}, set(), {}
        self.seen, self.lock, self.gate = [], threading.Lock(), threading.Event()
        self.gate.set()

    def add(self, repo, folder, revision="main", **more):
        """Serve a folder's files as a revision. more: path -> bytes, beside them or instead; None: absent."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.repos.setdefault(repo, {})[revision] = files | {k: v for k, v in more.items() if v is not None}

    def commit(self, repo, revision):
        """The commit of a revision, by name or by itself; None: there is none."""
        known = {}
        for name, files in self.repos[repo].items():
            parts = [name.encode() + b"\0" + data for name, data in sorted(files.items())]
            known[hashlib.sha1(repo.encode() + b"\0\0".join(parts)).hexdigest()] = name
        return next((sha for sha, name in known.items() if revision in (sha, name)), None)

    def files(self, repo, commit):
        return next(f for name, f in self.repos[repo].items() if self.commit(repo, name) == commit)

    def fetched(self, repo):
        """Paths of a repository's files whose bytes were asked for, in order."""
        found = [re.match(rf"GET /{repo}/resolve/[^/]+/(\S+)", line) for line in self.seen]
        return [match[1] for match in found if match]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub = None

    def log_message(self, *words):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code):
        self.answer(status, b"{}", X_Error_Code=code, X_Error_Message=code)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        with hub.lock:
            hub.seen.append(" ".join(filter(None, (self.command, path, self.headers.get("Range")))))
        match = API.fullmatch(path) or FILE.fullmatch(path)
        repo = match and match["repo"]
        token = hub.tokens.get(repo)
        if repo not in hub.repos or (token and self.headers.get("Authorization") != f"Bearer {token}"):
            return self.refuse(401, "RepoNotFound")
        commit = hub.commit(repo, match["revision"] or "main")
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        if match.re is FILE:
            if repo in hub.gated:
                return self.refuse(403, "GatedRepo")
            return self.send_file(repo, commit, match["path"])
        files = hub.files(repo, commit)
        found = {
            "id": repo,
            "modelId": repo,
            "sha": commit,
            "siblings": [{"rfilename": name} for name in files],
        }
        if match["what"] == "tree":
            found = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
        return self.answer(200, json.dumps(found).encode(), Content_Type="application/json")

    def send_file(self, repo, commit, path):
        hub, data = self.hub, self.hub.files(repo, commit).get(path)
        if data is None:
            return self.refuse(404, "EntryNotFound")
        headers = {
            "X_Repo_Commit": commit,
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "Accept_Ranges": "bytes",
        }
        first = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
        if first:
            headers["Content_Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        body = data[first:]
        if self.command == "GET" and path.endswith(".safetensors"):
            hub.gate.wait(60)
        cuts = hub.cuts.get(path) if self.command == "GET" else None
        self.close_connection = self.close_connection or bool(cuts)
        sent = body[: cuts.pop(0)] if cuts else body
        return self.answer(206 if first else 200, sent, Content_Length=len(body), **headers)


@contextmanager
def serve():
    """(Hub, its address) while the context lasts."""
    hub = Hub()
    handler = type("Of", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        hub.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
