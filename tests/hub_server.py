"""A Hub on the loopback interface: enough of the HTTP interface for pushing and pulling models in tests.

Repositories live in memory, every file is an ordinary git blob (no LFS), and each commit gets a hash of its
content, so that pushing the same files twice is seen to change nothing. One token of one user is accepted.

    with loopback_hub() as hub:
        HfApi(endpoint=hub.endpoint, token=hub.token).create_repo("user/name")
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

LICENSES = {"apache-2.0", "cc-by-4.0", "mit", "other"}  # the first few of the Hub's list


@dataclass
class Repository:
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)  # messages, oldest first
    private: bool = False

    @property
    def sha(self) -> str:
        state = [(path, blob_id(content)) for path, content in sorted(self.files.items())]
        return hashlib.sha1(repr((len(self.commits), state)).encode()).hexdigest()


@dataclass
class Hub:
    endpoint: str
    user: str = "user"
    token: str = "hf_loopback"
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # "METHOD /path", in order of arrival


def blob_id(content: bytes) -> str:
    """The name git gives to this content: how a client knows that a file has not changed."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path_only() == "/api/whoami-v2":
            return self.whoami()
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", self.path_only()):
            return self.with_repository(match[1], self.model_info)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+(?:/(.+))?", self.path_only()):
            return self.with_repository(match[1], self.tree, match[2] or "")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path_only()):
            return self.with_repository(match[1], self.resolve, match[2])
        return self.reply(404, {"error": "not found"})

    do_HEAD = do_GET

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path_only() == "/api/validate-yaml":
            return self.validate_yaml(json.loads(body)["content"])
        if not self.authorized():
            return self.reply(401, {"error": "Invalid username or password."})
        if self.path_only() == "/api/repos/create":
            return self.create(json.loads(body))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/[^/]+", self.path_only()):
            return self.with_repository(match[1], self.preupload, json.loads(body)["files"])
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/[^/]+", self.path_only()):
            return self.with_repository(match[1], self.commit, [json.loads(x) for x in body.splitlines()])
        return self.reply(404, {"error": "not found"})

    def whoami(self):
        if self.authorized():
            return self.reply(200, {"type": "user", "name": self.hub.user, "orgs": []})
        return self.reply(401, {"error": "Invalid username or password."})

    def validate_yaml(self, content):
        match = re.match(r"---\n(.*?)\n---\n", content, flags=re.DOTALL)
        try:
            metadata = yaml.safe_load(match[1]) if match else None
        except yaml.YAMLError as error:
            return self.reply(400, {"errors": [{"message": str(error)}], "warnings": []})
        if metadata and metadata.get("license", "mit") not in LICENSES:
            return self.reply(400, {"errors": [{"message": '"license" must be one of [...]'}], "warnings": []})
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        return self.reply(200, {"errors": [], "warnings": warnings})

    def create(self, request):
        name = f"{request.get('organization') or self.hub.user}/{request['name']}"
        if not name.startswith(f"{self.hub.user}/"):
            return self.reply(403, {"error": "You don't have the rights to create a model there."})
        url = {"url": f"{self.hub.endpoint}/{name}", "id": name, "name": name}
        if name in self.hub.repositories:
            return self.reply(409, url | {"error": "You already created this model repo"})
        private = request.get("visibility") == "private" or bool(request.get("private"))
        self.hub.repositories[name] = Repository(private=private)
        return self.reply(200, url)

    def preupload(self, name, repository, files):
        known = {path: blob_id(content) for path, content in repository.files.items()}
        plan = [
            {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": known.get(f["path"])}
            for f in files
        ]
        return self.reply(200, {"files": plan})

    def commit(self, name, repository, lines):
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repository.commits.append(value["summary"])
            elif line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del repository.files[value["path"]]
            else:
                return self.reply(400, {"error": f"this Hub takes no {line['key']!r}"})
        url = f"{self.hub.endpoint}/{name}/commit/{repository.sha}"
        return self.reply(200, {"success": True, "commitOid": repository.sha, "commitUrl": url})

    def model_info(self, name, repository):
        siblings = [{"rfilename": path} for path in sorted(repository.files)]
        info = {"id": name, "modelId": name, "sha": repository.sha, "private": repository.private}
        return self.reply(200, info | {"siblings": siblings, "tags": []})

    def tree(self, name, repository, folder):
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
            for path, content in sorted(repository.files.items())
            if path.startswith(folder + "/" if folder else "")
        ]
        if folder and not entries:
            return self.reply(404, {"error": "no such folder"}, {"X-Error-Code": "EntryNotFound"})
        return self.reply(200, entries)

    def resolve(self, name, repository, path):
        if path not in repository.files:
            return self.reply(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        content = repository.files[path]
        return self.reply(200, content, {"ETag": f'"{blob_id(content)}"', "X-Repo-Commit": repository.sha})

    def with_repository(self, name, answer, *arguments):
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self.authorized()):
            return self.reply(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        return answer(name, repository, *arguments)

    def reply(self, status, content, headers=()):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def path_only(self):
        return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)

    def authorized(self):
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def log_message(self, *_):
        """Instead of a line on stderr."""

    def log_request(self, *_):
        self.hub.requests.append(f"{self.command} {self.path_only()}")

    @property
    def hub(self) -> Hub:
        return self.server.hub


@contextlib.contextmanager
def loopback_hub():
    """Serve an empty Hub on a free port of 127.0.0.1; yields the `Hub`, whose `endpoint` is its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    server.daemon_threads = True
    server.hub = Hub(endpoint=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
