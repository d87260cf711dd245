"""Images and videos that requests name by URL: fetched from hosts that the settings name, and from nowhere else.

A host's addresses are looked up once, all have to be public, and one of them is what is connected to, so that a name
that changes meanwhile leads nowhere else. No proxy is asked, no redirect is followed, and no cookie or key is sent.
"""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

SECONDS = 10.0  # for all that a request names
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48")  # of NAT64, RFC 6052, 8215
_PORTS = {"http": 80, "https": 443}
_PIECE = 64 << 10


def check_host(name: str) -> str:
    """In small letters. ValueError for what is no host, or host:port."""
    parts = urlsplit(f"//{name}")
    try:
        good = bool(parts.hostname) and name.lower() == parts.netloc.lower() and "@" not in name and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"got {name!r}, expected a host, or host:port")
    return name.lower()


def is_remote(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def check_url(url: str, hosts: Collection[str]) -> tuple[str, str, int, str]:
    """(scheme, host, port, what is asked for) of a URL whose host is among those. ValueError otherwise."""
    if not hosts:
        raise ValueError("got a URL, expected a data: URI: nothing is fetched (--allow-image-hosts names hosts)")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError as error:
        raise ValueError(f"got a URL that is none: {error}") from None
    scheme = parts.scheme.lower()
    if "@" in parts.netloc or any(c <= " " or c == "\x7f" for c in url):
        raise ValueError("got a URL with a name, a password or spaces, expected one without")
    usual = _PORTS[scheme]
    named = f"[{host}]" if ":" in host else host
    wanted = {f"{named}:{port or usual}", named} if port in (None, usual) else {f"{named}:{port}"}
    if not wanted & set(hosts):
        raise ValueError(f"got a URL of {parts.netloc[:80]!r}, expected one of {', '.join(sorted(hosts))}")
    path = parts.path or "/"
    return scheme, host, port or usual, f"{path}?{parts.query}" if parts.query else path


def is_public(address: str) -> bool:
    """Not of this machine, its networks, or anything that is reserved; of IPv6 neither what stands for an IPv4 one."""
    found = ipaddress.ip_address(address.partition("%")[0])
    inner = [getattr(found, name, None) for name in ("ipv4_mapped", "sixtofour")]
    inner += list(getattr(found, "teredo", None) or ())
    if any(found in network for network in _TRANSLATED):
        return False
    return all(a.is_global and not a.is_multicast for a in (found, *filter(None, inner)))


def _addresses(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{host!r} is not known: {error}") from None
    return list(dict.fromkeys(info[4][0] for info in found))


class _Connection(http.client.HTTPConnection):
    """To an address that is known already."""

    def __init__(self, scheme: str, host: str, port: int, address: str, seconds: float):
        super().__init__(host, port, timeout=seconds)
        self._scheme, self._address = scheme, address

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._scheme == "https":
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def fetched(url: str, hosts: Collection[str], end: float, types: Collection[str], most: int) -> bytes:
    """What is there by that time of time.monotonic(), of one of these types and no more than so many bytes. ValueError:
    why not."""
    scheme, host, port, path = check_url(url, hosts)
    addresses = _addresses(host, port)
    if not all(map(is_public, addresses)):  # which, is nobody's business
        raise ValueError(f"{host!r} has an address that is not public: nothing is fetched from there")
    left = end - time.monotonic()
    if left <= 0:
        raise ValueError(f"fetching took more than {SECONDS:g} s")
    connection = _Connection(scheme, host, port, addresses[0], left)
    over = threading.Timer(left, _cut, [connection])  # a timeout of the socket's is for each piece
    over.daemon = True
    over.start()
    try:
        connection.request("GET", path, headers={"Accept": ", ".join(types), "Accept-Encoding": "identity"})
        return _read(connection.getresponse(), types, most)
    except (OSError, http.client.HTTPException, AttributeError) as error:  # the last of a socket that was cut
        late = time.monotonic() >= end
        why = f"fetching took more than {SECONDS:g} s" if late else f"fetching failed: {type(error).__name__}: {error}"
        raise ValueError(why) from None
    finally:
        over.cancel()
        connection.close()


def _cut(connection: http.client.HTTPConnection) -> None:
    taken: Any = connection.sock
    if taken is not None:
        with contextlib.suppress(OSError):
            taken.shutdown(socket.SHUT_RDWR)


def _read(response: http.client.HTTPResponse, types: Collection[str], most: int) -> bytes:
    if response.status != 200:
        more = ", and redirects are not followed" if 300 <= response.status < 400 else ""
        raise ValueError(f"fetching gave HTTP {response.status}{more}")
    kind = (response.headers.get_content_type() or "").lower()
    if kind not in types:
        raise ValueError(f"fetching gave {kind[:40]!r}, expected one of {', '.join(types)}")
    if (response.headers.get("Content-Encoding") or "identity").lower() != "identity":
        raise ValueError("fetching gave packed bytes, expected them as they are")
    found = bytearray()
    while piece := response.read1(_PIECE):
        found += piece
        if len(found) > most:
            raise ValueError(f"fetching gave more than {most} bytes")
    if response.length:
        raise ValueError(f"fetching ended {response.length} bytes early")
    return bytes(found)
