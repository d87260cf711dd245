"""What a command needs beyond torch, and the line that installs it. Imports nothing but the standard library."""

import json
from argparse import Namespace
from importlib import metadata
from importlib.util import find_spec
from urllib.parse import urlsplit
from urllib.request import url2pathname

# What a command imports beyond torch, by the extra of pyproject.toml that brings it.
EXTRAS = {
    "engine": ("transformers", "safetensors", "numpy", "rich", "msgspec"),
    "gguf": ("gguf", "accelerate"),
    "lora": ("peft",),
    "report": ("matplotlib",),
    "video": ("av",),
    "handover": ("zmq", "msgspec"),
    "serve": ("fastapi", "uvicorn", "prometheus_client", "pydantic"),
}


def check_installed(args: Namespace) -> None:
    """Before anything is imported: what this command needs is here, or the line that brings it."""
    beside = {"demo": {"engine", "gguf"}, "doctor": set(), "serve": {"engine", "serve"}}
    beside["recipe"] = {"engine", "handover"}
    wanted = beside.get(args.command, {"engine"})
    if model := getattr(args, "model", None):
        wanted |= {"engine", "gguf"} if model.endswith(".gguf") or model == "smollm2" else {"engine"}
    if getattr(args, "adapter", None):
        wanted |= {"lora"}
    if getattr(args, "html", None) or getattr(args, "plot", None):
        wanted |= {"report"}
    missing = {extra: [name for name in EXTRAS[extra] if find_spec(name) is None] for extra in sorted(wanted)}
    missing = {extra: names for extra, names in missing.items() if names}
    if missing:
        extras = args.command if args.command in ("demo", "recipe") else ",".join(missing)
        names = ", ".join(dict.fromkeys(name for names in missing.values() for name in names))
        raise RuntimeError(f"not installed: {names}. Run: {pip_line(extras)}")


def pip_line(extras: str) -> str:
    """What adds extras to this installation, as it was installed."""
    try:
        found = metadata.distribution("vexact").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        found = None
    origin = json.loads(found) if found else {}
    url = origin.get("url", "")
    if not url:
        return f'pip install "vexact[{extras}]"'
    if "dir_info" not in origin:
        return f'pip install "vexact[{extras}] @ {url}"'
    editable = "-e " if origin["dir_info"].get("editable") else ""
    return f'pip install {editable}"{url2pathname(urlsplit(url).path)}[{extras}]"'
