"""One wheel from a package index, for an environment that has neither pip nor uv: the simple API (PEP 503 and 691).

What the user has told pip holds here too: index-url, extra-index-url, find-links, no-index and cert, from the PIP_
variables and pip's files; or uv's UV_DEFAULT_INDEX and UV_INDEX_URL. Proxies are those of the environment.
"""

import base64
import configparser
import hashlib
import html.parser
import json
import os
import re
import shlex
import ssl
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

from ..progress import Progress

DEFAULT = "https://pypi.org/simple"
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
TIMEOUT = 60.0
FOR_ALL_USERS = Path("/etc/pip.conf")


@dataclass(frozen=True)
class Link:
    """A file that an index offers. sha256 is None where the index names none."""

    url: str
    filename: str
    sha256: str | None


def settings() -> dict[str, str]:
    """What pip would go by: its files, the later ones first, and above them its variables."""
    home = Path(os.path.expanduser("~"))
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [FOR_ALL_USERS, home / ".pip" / "pip.conf", config_home / "pip" / "pip.conf"]
    files.append(Path(sys.prefix) / "pip.conf")
    asked = os.environ.get("PIP_CONFIG_FILE")
    files = [] if asked == os.devnull else [*files, *([asked] if asked else [])]
    found: dict[str, str] = {}
    for file in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except configparser.Error as error:
            raise OSError(f"{file}: {error}") from error
        for section in ("global", "download"):
            if parser.has_section(section):
                found |= {key.replace("_", "-"): value for key, value in parser.items(section)}
    for key in ("index-url", "extra-index-url", "find-links", "no-index", "cert"):
        value = os.environ.get("PIP_" + key.upper().replace("-", "_"))
        if value:
            found[key] = value
    if "index-url" not in found:
        found["index-url"] = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL") or DEFAULT
    return {key: value.strip().strip("'\"") for key, value in found.items()}


def places(project: str, found: dict[str, str]) -> list[str]:
    """Where links to a project's files are looked for: folders, and pages of indexes."""
    some = [
        word if "://" in word else Path(word).expanduser().as_uri() for word in shlex.split(found.get("find-links", ""))
    ]
    if found.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        indexes = [found["index-url"], *shlex.split(found.get("extra-index-url", ""))]
        name = re.sub(r"[-_.]+", "-", project).lower()
        some += [f"{index.rstrip('/')}/{name}/" for index in indexes]
    return some


def public(url: str) -> str:
    """A URL without the password that may be in it, for messages."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def download(requirement: str, folder: Path, show: Progress) -> Path:
    """The pure-Python wheel of `name==version`, in a folder. OSError or ValueError where it cannot be had."""
    project, _, version = requirement.partition("==")
    found = settings()
    context = ssl.create_default_context(cafile=found.get("cert"))
    tried = []
    for place in places(project, found):
        try:
            links = list(_links(place, context))
        except (OSError, ValueError) as error:
            tried.append(f"{public(place)}: {error}")
            continue
        for link in links:
            if _is_wheel_of(link.filename, project, version):
                return _fetch(link, folder / link.filename, requirement, context, show)
        tried.append(f"{public(place)}: {len(links)} files, none of them a wheel of {requirement}")
    raise OSError("; ".join(tried) or "no index and no folder is configured")


def _is_wheel_of(filename: str, project: str, version: str) -> bool:
    name, _, rest = filename.partition("-")
    same = re.sub(r"[-_.]+", "_", name).lower() == re.sub(r"[-_.]+", "_", project).lower()
    return same and rest.startswith(f"{version}-") and filename.endswith("-none-any.whl")


def _open(url: str, context: ssl.SSLContext, accept: str = "*/*"):
    """A response; a user's name and password in the URL become a header."""
    request = urllib.request.Request(public(url), headers={"Accept": accept, "User-Agent": "vexact"})
    user, _, password = urlsplit(url).netloc.rpartition("@")[0].partition(":")
    if user:
        known = f"{unquote(user)}:{unquote(password)}".encode()
        request.add_header("Authorization", "Basic " + base64.b64encode(known).decode())
    https = urllib.request.HTTPSHandler(context=context)
    return urllib.request.build_opener(https).open(request, timeout=TIMEOUT)


def _links(place: str, context: ssl.SSLContext) -> Iterator[Link]:
    parts = urlsplit(place)
    if parts.scheme == "file":
        path = Path(urllib.request.url2pathname(parts.path))
        if path.is_dir() and not (path / "index.html").exists():
            yield from (Link(file.as_uri(), file.name, None) for file in sorted(path.glob("*.whl")))
            return
        place = (path / "index.html" if path.is_dir() else path).as_uri()
    with _open(place, context, ACCEPT) as response:
        kind, text = response.headers.get_content_type(), response.read().decode("utf-8", "replace")
    if kind.endswith("+json"):
        for file in json.loads(text)["files"]:
            yield Link(urljoin(place, file["url"]), file["filename"], file.get("hashes", {}).get("sha256"))
        return
    page = _Page()
    page.feed(text)
    for href in page.hrefs:
        url, fragment = urldefrag(urljoin(place, href))
        digest = re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)
        yield Link(url, unquote(urlsplit(url).path.rpartition("/")[2]), digest[1] if digest else None)


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hrefs += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _fetch(link: Link, target: Path, requirement: str, context: ssl.SSLContext, show: Progress) -> Path:
    digest, done = hashlib.sha256(), 0
    with _open(link.url, context) as response, open(target, "wb") as sink:
        size = int(response.headers.get("Content-Length") or 0)
        while block := response.read(1 << 18):
            sink.write(block)
            digest.update(block)
            done += len(block)
            show(f"downloading {requirement}", done, max(size, done))
    if size and done != size:
        raise OSError(f"{public(link.url)}: {done} of {size} bytes arrived")
    if link.sha256 and digest.hexdigest() != link.sha256:
        raise ValueError(f"{public(link.url)}: sha256 {digest.hexdigest()}, the index says {link.sha256}")
    return target
