"""Names on the Hub. Whether one is there is asked once and quickly: the loader would ask five times for half a minute
where there is no network, and most names that are no path here are mistyped paths. Its files come into the Hub's cache,
and are a directory like any other then."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

SECONDS = 5  # for the Hub's answer
_SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")


def check_name(name: str, config: str = "config.json") -> None:
    """Nothing where `name` is a file or directory here, or a model whose config the Hub or its cache has.

    raises   FileNotFoundError that says what it is not
    """
    if name and Path(name).expanduser().exists():
        return
    missing = f"weights: {name!r}: no such file or directory"
    # A Hub name has at most one slash and begins like no path does.
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(("/", ".gguf")):
        raise FileNotFoundError(missing)
    import huggingface_hub as hub
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(hub.try_to_load_from_cache(name, config), str):
            return
    except HFValidationError:
        raise FileNotFoundError(f"{missing}, and no name on the Hub either") from None
    if hub.constants.HF_HUB_OFFLINE:
        raise FileNotFoundError(f"{missing}, nor is it in the Hub's cache, and HF_HUB_OFFLINE is set")
    url = f"{hub.constants.ENDPOINT}/{name}/resolve/main/{config}"
    try:
        answer = hub.get_session().head(url, headers=hub.utils.build_hf_headers(), timeout=SECONDS)
    except (OSError, RuntimeError, *_transport_errors()) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        where = hub.constants.ENDPOINT
        raise FileNotFoundError(f"{missing}, and the Hub cannot be asked for it ({where}: {why})") from None
    if answer.status_code in (401, 403, 404):
        said = answer.headers.get("X-Error-Message") or f"HTTP {answer.status_code}"
        raise FileNotFoundError(f"{missing}, and the Hub has no such model for you: {said}")


def snapshot(name: str, weights: bool = False) -> Path:
    """The directory in the Hub's cache with a model's files, of one revision.

    weights  those too, and no more of them than transformers would read
    raises   FileNotFoundError, as check_name; or where a file cannot be had
    """
    check_name(name)
    import huggingface_hub as hub

    from .directory import INDEX, SINGLE

    with _fetching(name):
        folder = Path(hub.snapshot_download(name, allow_patterns=[*_SMALL]))
        if weights:
            asked = _named(folder / "config.json", "transformers_weights")
            for file in [asked] if isinstance(asked, str) else [SINGLE, INDEX]:
                if (folder / file).is_file() or _fetched(name, file, folder):
                    if file.endswith(".index.json"):
                        places = _named(folder / file, "weight_map")
                        shards = set(map(str, places.values())) if isinstance(places, dict) else set()
                        hub.snapshot_download(name, revision=folder.name, allow_patterns=sorted(shards))
                    break
    return folder


def adapter_snapshot(name: str) -> Path:
    """The same of an adapter of PEFT's."""
    files = "adapter_config.json", "adapter_model.safetensors"
    check_name(name, files[0])
    import huggingface_hub as hub

    with _fetching(name):
        return Path(hub.snapshot_download(name, allow_patterns=[*files]))


@contextlib.contextmanager
def _fetching(name: str) -> Iterator[None]:
    from .config import quiet

    try:
        with quiet():
            yield
    except (OSError, RuntimeError, *_transport_errors()) as error:
        what = " ".join(str(error).split())
        raise FileNotFoundError(f"weights: {name}: the Hub: {type(error).__name__}: {what}") from error


def _fetched(name: str, file: str, folder: Path) -> bool:
    import huggingface_hub as hub
    from huggingface_hub.errors import EntryNotFoundError

    try:
        hub.hf_hub_download(name, file, revision=folder.name)
    except EntryNotFoundError:  # offline: nor in the cache
        return False
    return True


def _named(file: Path, key: str):
    """What a file of JSON says under a key; None where it is none: whoever reads the directory says so."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found.get(key) if isinstance(found, dict) else None


def _transport_errors() -> tuple[type[Exception], ...]:
    """What the Hub's client raises without a connection: each of its versions has another library below it."""
    from importlib import import_module, util

    names = {"httpx2": "HTTPError", "httpx": "HTTPError", "requests": "RequestException"}
    return tuple(getattr(import_module(module), error) for module, error in names.items() if util.find_spec(module))
