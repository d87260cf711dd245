"""config.json as transformers understands it, of a model that transformers itself has the class of; and transformers'
errors and bars as they are shown here."""

import contextlib
import io
import sys
from collections.abc import Iterator, Mapping

from vexact_ops.patch import WITH_IMAGES


def import_transformers() -> None:
    """What every causal language model of transformers' imports, which takes seconds."""
    from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401
    from transformers.generation import GenerationMixin  # noqa: F401


def read_config(name: str, label: str | None = None, **options):
    """The config of a causal language model, or of one of images (auto_class).

    name      a directory, or with gguf_file the folder of that
    label     what messages call it
    options   of from_pretrained. dtype: in place of the file's, which may name none ("auto")
    raises    FileNotFoundError or ValueError; for a model that Python of the directory's own would have to make, too:
              that never runs
    """
    from transformers import AutoConfig

    label = label or name
    with quiet():
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
        except Exception as error:
            raise explain(label, error) from error
    named = (getattr(config, "architectures", None) or [""])[0]
    if named.endswith("ForTokenClassification"):
        raise ValueError(
            f"weights: {label}: architectures: got {named}, expected a causal language model, or one that scores "
            "sequences (...ForSequenceClassification): scores of each token are not served"
        )
    if auto_class(config) is None:
        kind = getattr(config, "model_type", type(config).__name__)
        raise ValueError(f"weights: {label}: model type {kind!r} is no causal language model of transformers")
    return plain(config)


def auto_class(config, images: bool = True):
    """Which of transformers' classes makes its model: of images where that is covered, or of text alone, or what scores
    sequences, where its file names a class of those; None: none.

    images  False: of text where there is such a class (Qwen3.5's)
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    named = (getattr(config, "architectures", None) or [""])[0]
    if named.endswith("ForSequenceClassification"):
        scores = type(config) in AutoModelForSequenceClassification._model_mapping
        return AutoModelForSequenceClassification if scores else None
    text = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else None
    if getattr(config, "model_type", None) in WITH_IMAGES and (images or text is None):
        return AutoModelForImageTextToText
    return text


def plain(config):
    """Without an implementation of attention that its file may name: one that is not installed here, or kernels that
    would come from the Hub and run. What runs is ours once the model is patched. Without a quantisation either: what is
    read of one (mxfp4.py) is numbers of 16 bits from then on."""
    config._attn_implementation = None
    config.__dict__.pop("quantization_config", None)
    return config


def own_default(config: Mapping, key: str) -> object:
    """Of a config.json, or a part of one, the value that its class has for a field of its own (Cohere2-MoE's
    rope_theta) and writes whether anybody has set it or not; None where it has no such field."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    made = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None
    value = getattr(made, key, None)
    return value if isinstance(value, int | float) else None


def explain(name: str, error: Exception, config=None) -> Exception:
    """The loader's error, in one line that begins with whose it is; where transformers has looked up a word of the
    config and has nothing by that name, with the word's place."""
    kind = FileNotFoundError if isinstance(error, OSError) else ValueError
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if config is not None and isinstance(error, KeyError) and len(error.args) == 1:
        places = list(_places(config.to_dict(), error.args[0]))
        if places:
            what = f"config.json: {places[0]}: got {error.args[0]!r}, which transformers does not know"
    if name.endswith(".gguf"):
        what = f"truncated or damaged, or no GGUF that transformers reads: {what}"
    return kind(f"weights: {name}: {what}")


def _places(values: dict, word: object) -> Iterator[str]:
    """Where a config has this text."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from (f"{key}: {place}" for place in _places(value, word))
        elif isinstance(value, str) and value == word:
            yield str(key)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hugging Face's bars on a terminal only (some ignore its switch and write to stderr whatever it says), and its
    report on missing weights not at all: they are refused here."""
    from transformers.utils import logging as hf

    verbosity, bars = hf.get_verbosity(), hf.is_progress_bar_enabled()
    hf.set_verbosity_error()
    try:
        if sys.stderr.isatty():
            yield
        else:
            hf.disable_progress_bar()
            with contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        hf.set_verbosity(verbosity)
        if bars:
            hf.enable_progress_bar()
