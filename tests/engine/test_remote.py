"""Images by URL: from hosts that are named, at public addresses, whole, in time, and no more of them than allowed."""

import contextlib
import http.server
import socket
import threading
import time

import pytest

from vexact_engine.media import images
from vexact_engine.serve import remote
from vexact_engine.serve.settings import Settings

PNG = b"\x89PNG and so on"


@contextlib.contextmanager
def serving(answer):
    """A server on the loopback, whose `answer(handler)` writes what it likes."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, dict(self.headers)))
            with contextlib.suppress(OSError):  # who asks may be gone
                answer(self)

        def log_message(self, *args):
            pass

    seen: list = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server.server_port, seen
    finally:
        server.shutdown()
        server.server_close()


def give(status=200, kind="image/png", body=PNG, length=None, **headers):
    def answer(handler):
        handler.send_response(status)
        for name, value in {"Content-Type": kind, **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@pytest.fixture
def reachable(monkeypatch):
    """The loopback counts as public, and has a name."""
    monkeypatch.setattr(remote, "is_public", lambda address: address == "127.0.0.1")
    monkeypatch.setattr(remote, "_addresses", lambda host, port: ["127.0.0.1"])


def fetch(port, path="/a.png?b=1", seconds=20.0):
    url, end = f"http://pictures.test:{port}{path}", time.monotonic() + seconds
    return remote.fetched(url, (f"pictures.test:{port}",), end, images.TYPES, images.MOST_BYTES)


def test_what_is_there_is_fetched(reachable):
    with serving(give()) as (port, seen):
        assert fetch(port) == PNG
        ((path, headers),) = seen
        assert path == "/a.png?b=1" and headers["Host"] == f"pictures.test:{port}"
        assert not {"Cookie", "Authorization"} & set(headers)


def slowly(handler):
    """Header by header, each within any timeout of a socket's."""
    for _ in range(2000):
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        handler.wfile.flush()
        time.sleep(0.05)


@pytest.mark.parametrize(
    "answer,said",
    [
        (give(404), "HTTP 404"),
        (give(302, Location="http://127.0.0.1/"), "HTTP 302, and redirects are not followed"),
        (give(kind="text/html"), "fetching gave 'text/html', expected one of image/png"),
        (give(kind="image/svg+xml"), "fetching gave 'image/svg.xml'"),
        (give(Content_Encoding="gzip"), "packed bytes"),
        (give(length=99), "fetching (ended|failed)"),
        (give(body=PNG * 10), "more than 100 bytes"),
        (slowly, "fetching took more than"),
    ],
    ids=["404", "redirect", "html", "svg", "packed", "short", "large", "slow"],
)
def test_what_is_not_an_image_is_refused(reachable, monkeypatch, answer, said):
    monkeypatch.setattr(images, "MOST_BYTES", 100)
    with serving(answer) as (port, _), pytest.raises(ValueError, match=said):
        begin = time.monotonic()
        try:
            fetch(port, seconds=1.0 if answer is slowly else 120.0)
        finally:
            assert time.monotonic() - begin < 60


PRIVATE = ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1")
PRIVATE += (
    "64:ff9b::a01:203",
    "64:ff9b:1::a01:203",
    "224.0.0.1",
    "::1",
    "fe80::1%eth0",
    "fd00::1",
    "::ffff:127.0.0.1",
    "2002:7f00:1::",
    "::",
    "ff02::1",
)


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public(address, monkeypatch):
    assert not remote.is_public(address)
    monkeypatch.setattr(remote, "_addresses", lambda host, port: ["8.8.8.8", address])
    monkeypatch.setattr(socket, "create_connection", lambda *args: pytest.fail("it was connected to"))
    with pytest.raises(ValueError, match=r"'pictures\.test' has an address that is not public") as refused:
        end = time.monotonic() + 5
        remote.fetched("http://pictures.test/a.png", ("pictures.test",), end, images.TYPES, images.MOST_BYTES)
    assert address not in str(refused.value)


def test_public_addresses():
    assert remote.is_public("8.8.8.8") and remote.is_public("2606:4700:4700::1111")


@pytest.mark.parametrize(
    "url,hosts,said",
    [
        ("http://a.test/x", (), "nothing is fetched"),
        ("http://b.test/x", ("a.test",), "got a URL of 'b.test', expected one of a.test"),
        ("http://a.test.b.test/x", ("a.test",), "got a URL of"),
        ("http://a.test:8080/x", ("a.test",), "got a URL of"),
        ("http://a.test@b.test/x", ("a.test",), "with a name, a password"),
        ("http://a.test/x y", ("a.test",), "or spaces"),
        ("http://a.test/\r\nHost: b.test", ("a.test",), "or spaces"),
        ("http://a.test:99999/", ("a.test",), "a URL that is none"),
        ("http:///x", ("a.test",), "got a URL of"),
    ],
)
def test_urls_that_are_refused(url, hosts, said):
    with pytest.raises(ValueError, match=said):
        remote.check_url(url, hosts)


def test_urls_of_hosts_that_are_named():
    assert remote.check_url("HTTPS://A.test/x?y#z", ("a.test",)) == ("https", "a.test", 443, "/x?y")
    assert remote.check_url("http://a.test:8080", ("a.test:8080",)) == ("http", "a.test", 8080, "/")
    assert remote.check_url("http://[2606:4700::1]/", ("[2606:4700::1]",))[1:3] == ("2606:4700::1", 80)


def test_settings_name_hosts():
    assert Settings(allow_image_hosts=("A.test", "b.test:8080")).allow_image_hosts == ("a.test", "b.test:8080")
    for host in ("http://a.test", "a.test/x", "u@a.test", "a.test:0"):
        with pytest.raises(ValueError, match="Settings: allow_image_hosts: got"):
            Settings(allow_image_hosts=(host,))
    with pytest.raises(TypeError, match=r"allow_image_hosts is 'a\.test', expected strings"):
        Settings(allow_image_hosts="a.test")
