"""Access to data: paths, hosts, keys, links out of the folder, and text that imitates HTML."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import httpx
import pytest

from areno.errors import UsageError
from areno.serving.errors import ApiError
from areno.viewer.confined import opener
from areno.viewer.server import ViewerServer
from tests.viewer.stage import HOSTILE, client, run_id, write_run

STATIC = Path(__file__).parents[2] / "areno" / "viewer" / "static"
KEY = "correct-horse"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("base")
    (base / "secret.txt").write_text("TOP SECRET")
    run = write_run(base / "runs" / HOSTILE.replace("/", "_"), steps=2, config=f"algo: {json.dumps(HOSTILE)}\n")
    run.append_samples([{"step": 2, "prompt_index": 0, "reward": 1.0, "prompt": HOSTILE, "completion": HOSTILE}])
    run.append_metrics(2, {HOSTILE: 1.0})
    run.append_warning(2, HOSTILE)
    return base / "runs"


@pytest.fixture(scope="module")
def session(folder):
    with client(folder) as opened:
        yield opened


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/%2e%2e/secret.txt",
        "/vendor/../../app.py",
        "/vendor/..%2f..%2fapp.py",
        "//etc/passwd",
        "/etc/passwd",
        "/api/runs/..",
        "/api/runs/..%2f..%2fsecret.txt",
        "/api/runs/%2fetc%2fpasswd/log",
        "/api/events?run=../secret.txt",
        "/api/diff?left=../secret.txt&right=.",
    ],
)
def test_no_path_from_a_client_is_opened(session, path):
    host, port = session.base_url.host, session.base_url.port
    raw = httpx.Request("GET", f"http://{host}:{port}/", extensions={"target": path.encode()})  # not normalized
    answer = session.send(raw)
    assert answer.status_code == 404
    assert "SECRET" not in answer.text
    assert "root:" not in answer.text


@pytest.mark.parametrize("log", [-1, 1, 99])
def test_a_log_number_out_of_range_gives_no_lines(session, log):
    (run,) = session.get("/api/runs").json()["runs"]
    assert session.get(f"/api/runs/{run['id']}/log", params={"file": log}).json()["lines"] == []


def test_hostile_text_arrives_as_json_that_a_browser_does_not_render(session):
    (run,) = session.get("/api/runs").json()["runs"]
    path = f"/api/runs/{run['id']}"
    sample = session.get(f"{path}/samples", params={"text": "onerror"}).json()["samples"][0]
    assert sample["excerpt"] == HOSTILE
    for part in ("", "/samples", f"/samples/{sample['index']}", "/log", "/evaluations", "/timeline"):
        answer = session.get(path + part)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
    detail = session.get(path).json()
    assert detail["algo"] == detail["warnings"][-1]["text"] == HOSTILE
    assert HOSTILE in detail["metrics"]


@pytest.mark.parametrize("path", ["/", "/app.js", "/api/runs", "/api/runs/none", "/missing", "/api/missing"])
def test_every_response_has_restrictive_headers(session, path):
    answer = session.get(path, headers={"Origin": "http://evil.example"})
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'self'"
    assert policy["base-uri"] == policy["object-src"] == policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "192.168.0.1", ""])
@pytest.mark.parametrize("path", ["/", "/api/runs"])
def test_foreign_hosts_are_refused(session, host, path):
    answer = session.get(path, headers={"Host": host})
    assert answer.status_code in (400, 403)
    assert "runs" not in answer.json()


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:80", "view.localhost"])
def test_this_machines_names_are_allowed(session, host):
    assert session.get("/api/runs", headers={"Host": host}).status_code == 200


def test_only_reading_is_possible(session):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert session.request(method, "/api/runs").status_code == 405
        assert session.request(method, "/api/login").status_code in (404, 405)


def test_data_requires_the_key_in_a_header_or_a_login_cookie(folder):
    with client(folder, KEY) as session:
        for path in ("/api/runs", "/api/events", "/api/diff", "/api/anything"):
            assert session.get(path).status_code == 401
            assert session.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert session.get("/").status_code == 200  # the page asks for the key
        assert (
            session.get("/api/runs", headers={"Authorization": f"Bearer {KEY}", "Host": "my.host"}).status_code == 200
        )
        assert session.post("/api/login", content="wrong").status_code == 401
        assert session.post("/api/login", content="x" * 10_000).status_code == 413
        answer = session.post("/api/login", content=KEY)
        assert re.search(r"HttpOnly.*SameSite=strict", answer.headers["set-cookie"], re.IGNORECASE)
        assert KEY not in answer.headers["set-cookie"]
        assert session.get("/api/runs").status_code == 200
        cookie = dict(session.cookies)
    with client(folder, KEY) as session:  # another server
        port = session.base_url.port
        stolen = {f"areno_view_{port}": next(iter(cookie.values()))}
        assert session.get("/api/runs", cookies=stolen).status_code == 401


def test_odd_cookies_of_other_programs_do_not_break_the_login(folder):
    with client(folder, KEY) as session:
        session.post("/api/login", content=KEY).raise_for_status()
        ((name, value),) = dict(session.cookies).items()
        session.cookies.clear()
        odd = f'path=1; settings={{"a": [1, "b"]}}; {name}={value}'  # browsers send those of all ports of a host
        assert session.get("/api/runs", headers={"Cookie": odd}).status_code == 200


def test_logins_through_two_forwarded_ports_do_not_replace_each_other(folder):
    names = []
    with client(folder, KEY) as session:
        for host in ("127.0.0.1:6333", "127.0.0.1:6334", "[::1]:6335", "localhost", "[::1]"):
            session.cookies.clear()
            headers = {"Host": host}  # a browser sends the port of the URL, which SSH forwards to the server's port
            session.post("/api/login", content=KEY, headers=headers).raise_for_status()
            names += session.cookies.keys()
            assert session.get("/api/runs", headers=headers).status_code == 200
    assert names == ["areno_view_6333", "areno_view_6334", "areno_view_6335", "areno_view_", "areno_view_"]


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_pages_of_other_sites_cannot_request_data(session, site, status):
    assert session.get("/api/runs", headers={"Sec-Fetch-Site": site}).status_code == status
    assert session.get("/", headers={"Sec-Fetch-Site": site}).status_code == 200, "a link to the page"


@pytest.mark.parametrize(
    ("host", "key"), [("0.0.0.0", None), ("::", None), ("127.0.0.1", "two words"), ("127.0.0.1", "")]
)
def test_other_addresses_require_a_key_and_invalid_keys_are_rejected(folder, host, key):
    with pytest.raises(UsageError, match="--api-key"):
        ViewerServer(folder, host, 0, key)


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    outside = write_run(tmp_path / "outside", steps=1)
    inside = write_run(tmp_path / "runs" / "real", steps=1)
    os.symlink(outside.path, tmp_path / "runs" / "linked")
    os.symlink(inside.path, tmp_path / "runs" / "alias")
    (tmp_path / "secret.txt").write_text("TOP SECRET\n")
    bad = write_run(tmp_path / "runs" / "bad", steps=1)
    bad.log_path.unlink()
    os.symlink(tmp_path / "secret.txt", bad.log_path)
    fifo = write_run(tmp_path / "runs" / "fifo", steps=1)
    fifo.warnings_path.unlink()
    os.mkfifo(fifo.warnings_path)
    with client(tmp_path / "runs") as session:
        answer = session.get("/api/runs").json()
        rows = {row["path"]: row for row in answer["runs"]}
        assert rows.keys() == {"real", "alias", "bad", "fifo"}
        assert answer["outside"] == 1
        assert "warnings.jsonl" in rows["fifo"]["problem"]
        for part, status in {"": 200, "/samples": 200, "/log": 403}.items():
            reply = session.get(f"/api/runs/{rows['bad']['id']}{part}")
            assert (reply.status_code, "SECRET" in reply.text) == (status, False)
        traces = inside.path / "session_tracer" / "rollout"
        traces.mkdir(parents=True)
        os.symlink(tmp_path / "secret.txt", traces / "sessions-r0.jsonl")
        assert session.get(f"/api/runs/{rows['real']['id']}/timeline").json()["traced"] is False


def test_a_comparison_does_not_tell_whether_files_outside_of_the_folder_are_equal(tmp_path):
    runs = tmp_path / "runs"
    for name, content in (("one", "same"), ("two", "same"), ("three", "other")):
        for folder in (tmp_path, runs):
            path = folder / name / "data.jsonl"
            path.parent.mkdir(parents=True)
            path.write_text(content)
        write_run(runs / f"in-{name}", steps=1, config=f"algo: grpo\ndataset_path: {runs / name}/data.jsonl\n")
        write_run(runs / f"out-{name}", steps=1, config=f"algo: grpo\ndataset_path: {tmp_path / name}/data.jsonl\n")

    with client(runs) as session:

        def differs(left: str, right: str) -> bool:
            sides = {"left": run_id(session, left), "right": run_id(session, right)}
            settings = session.get("/api/diff", params=sides).raise_for_status().json()["settings"]
            return next(one["changes_results"] for one in settings if one["name"] == "dataset_path")

        assert not differs("in-one", "in-two")
        assert differs("in-one", "in-three")
        assert differs("out-one", "out-two")
        assert differs("out-one", "out-three")


@pytest.mark.parametrize("swapped", ["file", "run"])
def test_a_path_that_becomes_a_link_just_before_it_is_opened_is_not_read(tmp_path, monkeypatch, swapped):
    run = write_run(tmp_path / "runs" / "run", steps=1)
    secret = write_run(tmp_path / "secret", steps=1)
    resolve = Path.resolve

    def resolve_and_swap(path, strict=False):
        """Resolve the path, then replace it as an attacker would, at the worst moment."""
        resolved = resolve(path, strict)
        if path == run.log_path:
            old, new = (run.log_path, secret.log_path) if swapped == "file" else (run.path, secret.path)
            old.rename(tmp_path / "moved")
            os.symlink(new, old)
        return resolved

    opened = opener(tmp_path / "runs")
    with opened(run.log_path) as file:
        assert file.readline().endswith(b"line 0\n")
    monkeypatch.setattr(Path, "resolve", resolve_and_swap)
    with pytest.raises(ApiError, match=r"log\.txt of this run is not a regular file"):
        opened(run.log_path)


# -- the page's own files ----------------------------------------------------------------------------------------------

SCRIPTS = sorted(STATIC.glob("*.js"))


def test_the_page_never_parses_text_as_html_or_code():
    assert len(SCRIPTS) > 8
    for path in [*SCRIPTS, *STATIC.glob("vendor/*.js")]:
        source = path.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|DOMParser|srcdoc", source
        ), path
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)", page)
    assert not re.search(r"https?://", page)


def test_files_are_small_and_vendored_ones_match_their_published_hashes():
    assert all(
        len(path.read_text(encoding="utf-8").splitlines()) < 500
        for path in STATIC.iterdir()
        if path.suffix in (".js", ".css", ".html")
    )
    sources = json.loads((STATIC / "vendor" / "sources.json").read_text())
    for package in sources.values():
        assert "MIT" in package["license"]
        for name, digest in package["sha256"].items():
            assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest, name
    listed = {name for package in sources.values() for name in package["sha256"]}
    assert listed | {"sources.json"} == {path.name for path in (STATIC / "vendor").iterdir()}


def test_the_page_and_its_modules_are_served_with_their_types_and_cached(session):
    kinds = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    for path in STATIC.rglob("*"):
        if path.suffix not in kinds:
            continue
        url = "/" if path.name == "index.html" else f"/{path.relative_to(STATIC)}"
        answer = session.get(url)
        assert answer.content == path.read_bytes()
        assert answer.headers["content-type"].startswith(kinds[path.suffix])
        again = session.get(url, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_run_ids_are_not_paths(session):
    assert re.fullmatch(r"[0-9a-f]{16}", run_id(session, HOSTILE.replace("/", "_")))
