"""What generation_config.json asks for beside the ends of a text, which are all that is read of it here.

transformers' generate takes its temperature, top_k and penalties from there, unasked. Here a request says how it is
sampled, so that the log-probabilities are those that a trainer is told to compute; what the file has is named once.
"""

import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# What a request may ask for as well, and the values that change nothing.
_ASKED: dict[str, tuple] = {
    "do_sample": (True,),
    "temperature": (1,),
    "top_k": (0,),
    "top_p": (1,),
    "min_p": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "num_return_sequences": (1,),
    "stop_strings": ([], ""),
}
# What generate would do to the scores or to the search, and nobody does here.
_OTHERS: dict[str, tuple] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "frequency_penalty": (0,),
    "guidance_scale": (1,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}


def tell_unread(path: Path, name: str) -> None:
    """Name in the log what a directory's generation_config.json asks for, and no request has unasked."""
    try:
        said = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever reads the directory says what is wrong
        return
    asked, others = (_changing(said, known) for known in (_ASKED, _OTHERS))
    what = ["a request says how it is sampled (SamplingParams)"] if asked else []
    what += [f"nothing here does {', '.join(others)}"] if others else []
    if what:
        values = ", ".join(f"{key} {_short(value)}" for key, value in (asked | others).items())
        log.warning("weights: %s: generation_config.json: not taken over: %s: %s", name, values, "; ".join(what))


def _changing(said: dict[str, Any], known: dict[str, tuple]) -> dict[str, Any]:
    return {k: said[k] for k, neutral in known.items() if said.get(k) is not None and said[k] not in neutral}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
