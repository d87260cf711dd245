"""The tokenizer of a model: the one beside the weights, another directory's, one that the caller has made, or none.

A tokenizer may be Python of the directory's own. That runs where it is asked for (trust_remote_code), and nobody is
ever asked on a terminal: else the model has no tokenizer, and a line in the log says why. Of everything else the Python
that runs is transformers' own, whoever is trusted.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from .config import explain, quiet
from .directory import base_of, check_kinds, is_adapter
from .hub import snapshot

log = logging.getLogger(__name__)

_TEMPLATE = "chat_template.jinja"
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(source: "str | os.PathLike", tokenizer: Any = None, *, trust_remote_code: bool = False) -> Any:
    """What turns texts into token ids and back.

    source             what the model is loaded from: a directory, a GGUF file, or a name on the Hub
    tokenizer          None: the one beside the weights, None where there is none; a path or a name on the Hub: the one
                       that is there; False: none; anything else is taken as it is
    trust_remote_code  run the Python of a tokenizer that brings its own
    returns            the tokenizer, or None: then prompts are token ids
    raises             FileNotFoundError or ValueError: one that cannot be loaded, or a path that has none
    """
    if tokenizer is False:
        return None
    if tokenizer is not None and not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    asked = tokenizer is not None
    name = os.fspath(tokenizer if asked else source)
    if not name:
        raise FileNotFoundError("weights: tokenizer: got an empty name, expected a directory or a name on the Hub")
    found = _beside(name, trust_remote_code)
    if found is None and asked:
        raise FileNotFoundError(f"weights: tokenizer: {name}: found none there that may be used")
    return found


def _beside(name: str, trust: bool) -> Any:
    path = Path(name).expanduser()
    if path.is_file():
        return _of_gguf(path, trust)
    if not path.is_dir():
        path = snapshot(name)
    check_kinds(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1 and not (path / "config.json").exists():
        return _of_gguf(ggufs[0], trust)
    if not any((path / file).exists() for file in FILES):
        return _beside(base_of(path), trust) if is_adapter(path) else None
    if not trust and (code := _own_code(path)):
        log.warning(
            "weights: %s: its tokenizer is Python of its own (%s), which does not run unasked: without a tokenizer "
            "prompts are token ids. trust_remote_code=True (--trust-remote-code) runs it, tokenizer= (--tokenizer) "
            "takes another one", name, code,
        )  # fmt: skip
        return None
    made = _made(str(path), name, trust)
    said, reads = _config(path).get("chat_template"), getattr(made, "chat_template", None)
    both = (path / _TEMPLATE).exists() and isinstance(said, str) and isinstance(reads, str)
    if both and said.strip() not in ("", reads.strip()):
        log.warning(
            "weights: %s: chat_template: that of %s is read, as transformers does, and not tokenizer_config.json's, "
            "which is another", name, _TEMPLATE,
        )  # fmt: skip
    return made


def _of_gguf(path: Path, trust: bool) -> Any:
    from .gguf import tokenized_otherwise

    made = _made(str(path.parent), str(path), trust, gguf_file=path.name)
    if left := tokenized_otherwise(path, made):
        log.warning(
            "weights: %s: transformers, which reads its tokenizer, passes over %s: texts may get other token ids than "
            "the model was made for; token ids as prompts stay as they are. tokenizer= (--tokenizer) takes another "
            "one", path, "; ".join(left),
        )  # fmt: skip
    return made


def _config(path: Path) -> dict:
    try:
        found = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # whoever loads it says what is wrong
    return found if isinstance(found, dict) else {}


def _own_code(path: Path) -> str:
    """What tokenizer_config.json names of the directory's own Python, where that is no class of transformers; or ""."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    config = _config(path)
    places = config.get("auto_map")
    named = places.get("AutoTokenizer") if isinstance(places, dict) else places
    kind = config.get("tokenizer_class")
    if not named or (isinstance(kind, str) and tokenizer_class_from_name(kind) is not None):
        return ""
    return ", ".join(str(part) for part in (named if isinstance(named, list) else [named]) if part)


def _made(folder: str, label: str, trust: bool, **options) -> Any:
    from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

    with quiet():
        try:
            if trust and (Path(folder) / "config.json").is_file():  # it would be made by Python of its own, too
                try:
                    options["config"] = AutoConfig.from_pretrained(folder, trust_remote_code=False)
                except (ValueError, KeyError):  # of no model of transformers
                    options["config"] = PreTrainedConfig.from_pretrained(folder)
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust, **options)
        except Exception as error:
            said = explain(f"{label}: tokenizer", error)
            what = "tokenizer= (--tokenizer) takes another one, or none"
            raise type(said)(f"{said}; {what}") from error
