"""What a caller may choose: EngineConfig for the engine, SamplingParams for one request.

Both are frozen and checked when made: a value of the wrong type raises TypeError, a wrong value ValueError, and the
message names the class, the field, what it got and what it expected. Nothing is clamped or corrected in silence.
"""

import functools
import itertools
import math
import operator
import os
from collections.abc import Iterable, Mapping, Sized
from dataclasses import InitVar, asdict, dataclass, field, is_dataclass
from enum import Enum
from numbers import Real
from typing import TYPE_CHECKING, Any

# Positive temperatures outside this range overflow or flatten fp32 logits, and then the distribution means nothing.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e5
_IN_RANGE = f"0 (greedy), or from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
SLEEP_BACKENDS = ("auto", "storages", "memory_saver")
ADAPTER_DTYPES = "float32", "bfloat16", "float16"
MAX_SAMPLES = 4096  # of one prompt: each holds a copy of its ids
MAX_STOP_TOKEN_IDS = 4096  # of one request
MAX_DRAFT = 1 << 20  # tokens of one request's answers
MAX_DRAFT_TOKENS = 64  # of a sequence in a step
SOURCES = ("given", "answers", "samples", "text")
_DRAFT_MODEL = "a path, a name on the Hub, a loaded model or None"
_INT64_MAX = 2**63 - 1  # what steps and messages between processes carry


@dataclass(frozen=True)
class Speculation:
    """How tokens are drafted that a step then verifies, several of a sequence at once. Completions are byte for byte
    those without it: what is accepted is what would have been drawn.

    max_draft_tokens   of a sequence in a step, 1 to 64
    sources            texts that drafts come from, any of (none, where a model drafts)
                       "given": SamplingParams.draft, an answer that is handed in;
                       "answers": what was answered to the same prompt before, with the same seed first of all, which
                       the engine keeps (Engine.answers);
                       "samples": other samples of the same prompt, that run or ran, and the sequence's own text;
                       "text": its own text alone
    answer_tokens      of "answers", kept at most: prompts and answers together, 4 bytes each. The prompts that were
                       used longest ago go first
    always             verify as much as there is. False: as much as makes tokens per second more, by the times that
                       steps took and by how often drafts were right
    draft_model        a model of the same vocabulary that drafts where texts do not: a directory, a name on the Hub, a
                       GGUF file, or a loaded Hugging Face model, which is taken over. Its cache has as many tokens as
                       the engine's own, in the same memory: with stages or ranks, where it cannot be a loaded one, in
                       that of the last stage's first rank. None: there is none
    mtp                draft with the first of the checkpoint's own heads (Qwen3.5's and Qwen3-Next's `mtp.*`, the layer
                       behind the last of DeepSeek-V3 and GLM-4-MoE), in place of a model
    """

    max_draft_tokens: int = 8
    sources: tuple[str, ...] = SOURCES
    answer_tokens: int = 1 << 24
    always: bool = False
    draft_model: Any = field(default=None, repr=False)
    mtp: bool = False

    def __post_init__(self):
        _set_int(self, "max_draft_tokens", 1, MAX_DRAFT_TOKENS)
        _set_int(self, "answer_tokens", 1, _INT64_MAX)
        _check_bool(self, "always")
        _check_bool(self, "mtp")
        if self.mtp and self.draft_model is not None:
            raise _value_error(self, "mtp", "False with a draft_model: one of the two drafts")
        expected = f"some of {', '.join(SOURCES)}"
        if isinstance(self.sources, str):
            object.__setattr__(self, "sources", (self.sources,))
        if not isinstance(self.sources, Iterable) or isinstance(self.sources, bytes | Mapping):
            raise _type_error(self, "sources", expected)
        sources = tuple(self.sources)
        if not all(isinstance(name, str) for name in sources):
            raise _type_error(self, "sources", expected)
        if not (sources or self.drafts_by_model) or not set(sources) <= set(SOURCES):
            raise _value_error(self, "sources", expected)
        object.__setattr__(self, "sources", tuple(name for name in SOURCES if name in sources))
        draft = self.draft_model
        if isinstance(draft, str | os.PathLike):
            object.__setattr__(self, "draft_model", os.fspath(draft))
        elif draft is not None and not hasattr(draft, "parameters"):
            raise _type_error(self, "draft_model", _DRAFT_MODEL)
        if self.draft_model == "":
            raise _value_error(self, "draft_model", _DRAFT_MODEL)

    @property
    def drafts_by_model(self) -> bool:
        return self.draft_model is not None or self.mtp


@dataclass(frozen=True)
class EngineConfig:
    """How the engine uses its machine. No field may change a bit of any output, except `kv_segment`,
    `latent_attention` and `longrope`.

    page_size                tokens per page of the KV cache
    num_pages                pages in the cache; None: as many as `gpu_memory_utilization` leaves room for
    gpu_memory_utilization   share of the device's memory that weights, activations and cache may take together
    max_num_seqs             sequences that run at once (and never more than `max_num_batched_tokens`)
    max_num_batched_tokens   tokens computed per step: each running decode takes one, prefill chunks share the rest. The
                             experts of a mixture are all read in each: with 8192 the prompts of Qwen3-30B-A3B took an
                             H200 two thirds of the time, and decodes beside them waited longer
    max_model_len            prompt plus generated tokens of one sequence; None: what the model was made for
    enable_prefix_cache      reuse the pages of a prompt that begins like an earlier one
    num_snapshots            of a model whose layers have states (gated delta nets): copies of a sequence's states that
                             the prefix cache keeps, to go on from; 0: nothing of a prompt is reused; None: a quarter of
                             max_num_seqs. The states themselves are `max_num_seqs` times a fixed size: they come out of
                             the same memory as pages do, before them
    num_window_pages         of a model with layers that see a window of keys alone: pages of those layers, which a
                             sequence gives back once no query reads them any more. None: as many as max_num_seqs
                             sequences need, if that is less than num_pages and leaves more of those; else as many as
                             num_pages, and all layers keep all keys. Where every layer has a window, None: num_pages
                             counts them, and a sequence may be longer than they are
    kv_segment               attention's key segment, part of the numerics: None, or the trainer's own value
    latent_attention         where attention is latent (DeepSeek-V3, Moonlight): cache compressed keys instead of every
                             head's; part of the numerics: the trainer's own patch.hf(latent=...)
    longrope                 of a model whose rope type is longrope, the factors of all sequences: "short", for those
                             within its original length (max_model_len is at most that), or "long"; of one whose type
                             is dynamic "short"; part of the numerics: the trainer's own patch.hf(longrope=...).
                             Refused of any other model
    image_tokens_per_step    of a model of images: a step takes in one more image to encode while those that it has come
                             to fewer tokens than this, so that decodes need not wait for many
    image_cache_tokens       tokens of images whose encoding is kept on the device, those used last, by their content
    reserve                  fraction of the running sequences' remaining tokens kept free when another is admitted: 0
                             preempts often where the cache is small, 1 never, and takes many more steps; None: half of
                             what finished ones have used of theirs
    enforce_eager            no CUDA graphs
    record_ahead             CUDA graphs of all sizes are recorded at the start. False: where it is known which sizes
                             are worth one, each when a step first wants it: a start some seconds shorter, and steps
                             some 50 ms longer that record one. Kernels are verified at the start all the same. Not
                             where steps verify drafts, or several processes compute: they have all graphs at the start
    async_scheduling         plan, launch and deliver while the device computes another step; None: on a GPU, where the
                             two run side by side
    sleep_backend            how sleep() gives memory of a GPU back: "memory_saver", by torch_memory_saver, where
                             addresses and so CUDA graphs stay, in a process that was started with its library;
                             "storages", by emptying tensors' storages; "auto": the first where it can be used.
                             Engine.sleep_backend says which it is
    speculation              how tokens are drafted that steps then verify: a Speculation, or its fields as a mapping;
                             None: a step draws one token of a sequence
    adapter                  LoRA that a model directory, or a name on the Hub, is computed with, unmerged, so with the
                             bits of a trainer's PeftModel: a directory of PEFT's, or its name on the Hub; or a
                             LoraConfig's to_dict(), whose tensors updates bring: until then B = 0, and the base alone
                             may be updated. None: there is none, or it came with a loaded model
    adapter_dtype            what it is computed in: of a trainer whose forward casts adapters too (FSDP2's mixed
                             precision, verl's), "bfloat16" or "float16"; None: what PEFT gives them, fp32
    pipeline_parallel_size   stages that the layers are cut into, each in a process of its own and on a GPU of its own
    tensor_parallel_size     ranks that the weights of a stage are cut over by output rows, heads in attention: each a
                             process of its own on a GPU of its own. Sizes that do not divide are refused
    expert_parallel_size     1: ranks have rows of every expert; tensor_parallel_size: each has whole experts
    nodes                    machines of a Ray cluster that the stages lie on, equally many on each: a divisor of
                             pipeline_parallel_size, for ranks of one stage are on one machine
    show_progress            a progress bar; None: on a terminal only
    """

    page_size: int = 16
    num_pages: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    enable_prefix_cache: bool = True
    num_snapshots: int | None = None
    num_window_pages: int | None = None
    kv_segment: int | None = None
    latent_attention: bool = False
    longrope: str | None = None
    image_tokens_per_step: int = 4096
    image_cache_tokens: int = 65536
    reserve: float | None = None
    enforce_eager: bool = False
    record_ahead: bool = True
    async_scheduling: bool | None = None
    sleep_backend: str = "auto"
    pipeline_parallel_size: int = 1
    speculation: Speculation | None = None
    adapter: Any = field(default=None, hash=False)
    adapter_dtype: str | None = None
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    nodes: int = 1
    show_progress: bool | None = None

    def __post_init__(self):
        for name in ("page_size", "max_num_seqs", "max_num_batched_tokens"):
            _set_int(self, name, 1)
        for name in ("image_tokens_per_step", "image_cache_tokens"):
            _set_int(self, name, 1)
        for name in ("pipeline_parallel_size", "tensor_parallel_size", "expert_parallel_size"):
            _set_int(self, name, 1)
        if self.expert_parallel_size not in (1, self.tensor_parallel_size):
            raise _value_error(self, "expert_parallel_size", f"1, or tensor_parallel_size, {self.tensor_parallel_size}")
        _set_int(self, "nodes", 1)
        if self.pipeline_parallel_size % self.nodes:
            raise _value_error(self, "nodes", f"a divisor of pipeline_parallel_size, {self.pipeline_parallel_size}")
        _set_int(self, "num_pages", 1, optional=True)
        _set_int(self, "num_window_pages", 1, optional=True)
        _set_int(self, "num_snapshots", 0, optional=True)
        _set_int(self, "max_model_len", 2, optional=True)  # one token of prompt, one generated
        _set_int(self, "kv_segment", 1, optional=True)
        _set_real(self, "gpu_memory_utilization", lambda u: 0 < u <= 1, "a number above 0 and at most 1")
        if self.reserve is not None:
            _set_real(self, "reserve", lambda share: 0 <= share <= 1, "a number from 0 to 1, or None")
        _check_bool(self, "enable_prefix_cache")
        if self.num_snapshots and not self.enable_prefix_cache:
            raise _value_error(self, "num_snapshots", "None or 0 without enable_prefix_cache, which keeps them")
        _check_bool(self, "latent_attention")
        if self.longrope not in (None, "short", "long"):
            raise _value_error(self, "longrope", "None, short or long")
        _check_bool(self, "enforce_eager")
        _check_bool(self, "record_ahead")
        _check_bool(self, "async_scheduling", optional=True)
        if not isinstance(self.sleep_backend, str):
            raise _type_error(self, "sleep_backend", f"one of {', '.join(SLEEP_BACKENDS)}")
        if self.sleep_backend not in SLEEP_BACKENDS:
            raise _value_error(self, "sleep_backend", f"one of {', '.join(SLEEP_BACKENDS)}")
        if isinstance(self.speculation, Mapping):
            unknown = sorted(set(map(str, self.speculation)) - set(Speculation.__dataclass_fields__))
            if unknown:
                known = ", ".join(Speculation.__dataclass_fields__)
                raise ValueError(f"EngineConfig: speculation has {', '.join(unknown)}, expected {known}")
            object.__setattr__(self, "speculation", Speculation(**self.speculation))
        if not isinstance(self.speculation, Speculation | None):
            raise _type_error(self, "speculation", "a Speculation or None")
        draft = None if self.speculation is None else self.speculation.draft_model
        if self.processes > 1 and not isinstance(draft, str | None):
            raise ValueError(
                f"EngineConfig: speculation: draft_model: got a {type(draft).__name__}, expected a path or a name on "
                f"the Hub with {self.parallel} {getattr(self, self.parallel)}: another process loads it"
            )
        if isinstance(self.adapter, str | os.PathLike) and os.fspath(self.adapter):
            object.__setattr__(self, "adapter", os.fspath(self.adapter))
        elif isinstance(self.adapter, Mapping):
            object.__setattr__(self, "adapter", _plain(self.adapter, "EngineConfig: adapter"))
        elif self.adapter is not None:
            raise _type_error(self, "adapter", "a directory, a name on the Hub, a LoraConfig's to_dict() or None")
        if self.adapter_dtype not in (None, *ADAPTER_DTYPES):
            raise _value_error(self, "adapter_dtype", f"one of {', '.join(ADAPTER_DTYPES)}, or None")
        _check_bool(self, "show_progress", optional=True)

    @property
    def patch_options(self) -> dict[str, Any]:
        """vexact_ops.patch.hf's, of the trainer as of the engine: what of this is part of the numerics."""
        return {"kv_segment": self.kv_segment, "latent": self.latent_attention, "longrope": self.longrope}

    @property
    def processes(self) -> int:
        """Number of processes that an engine computes in, each on a device of its own."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def parallel(self) -> str:
        """The field that asks for several of them."""
        ranks = self.pipeline_parallel_size == 1 < self.tensor_parallel_size
        return "tensor_parallel_size" if ranks else "pipeline_parallel_size"


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and where it stops.

    max_new_tokens     generated tokens per sample, at most
    min_new_tokens     no stop token and no stop string ends a sample that has fewer; they may be drawn all the same, as
                       nothing is masked: log-probabilities are the model's own
    temperature        0 is greedy; otherwise from 1e-6 to 1e5
    top_p              keep the likeliest tokens up to this mass, above 0 and at most 1 (1: off)
    top_k              keep this many of the likeliest tokens (0: off; -1, vLLM's word for that, becomes 0)
    min_p              drop tokens less likely than this share of the likeliest, 0 to 1 (0: off)
    n                  samples per prompt, 1 to 4096, each with a seed of its own
    seed               0 <= seed < 2**64; None draws one, which the completion records
    stop_token_ids     generation ends after any of these, at most 4096, beside the model's own end-of-sequence ids
    stop               a string, or several, or None: generation ends once the generated text contains one of them. The
                       text of a special token, which an answer's text leaves out, stands for its id too: then
                       `stop_reason` is that id
    ignore_eos         generate past the model's end-of-sequence ids (`stop_token_ids` still apply)
    num_top_logprobs   report the log-probabilities of this many of the likeliest tokens at each position; of equally
                       likely ones the lower ids come first
    prompt_logprobs    report the log-probabilities of the prompt's own tokens, at temperature 1. All of the prompt is
                       computed then, once for each sample: nothing is taken from the prefix cache
    num_prompt_top_logprobs   with these, those of this many of the likeliest tokens at each of the prompt's positions
    draft              token ids of an answer, or several, that the model may give: where EngineConfig.speculation has
                       "given" among its sources they are verified several at once, sample i's own is the i-th, in
                       turns. No effect on any byte of a completion; what is not drawn again costs some time
    skip_special_tokens   leave special tokens out of an answer's text. False: they are in it, but for one that ended it
    include_stop_str_in_output   leave the stop string that ended an answer at the end of its text, and, where special
                       tokens are in it, the special token
    max_tokens, min_tokens, logprobs   vLLM's names of max_new_tokens, min_new_tokens and num_top_logprobs, which may be
                       given instead
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    num_top_logprobs: int = 0
    prompt_logprobs: bool = False
    num_prompt_top_logprobs: int = 0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    draft: tuple[tuple[int, ...], ...] = ()
    if TYPE_CHECKING:  # vLLM's names, for type checkers: no fields
        max_tokens: InitVar[int | None] = None
        min_tokens: InitVar[int | None] = None
        logprobs: InitVar[int | None] = None

    def __post_init__(self, *_: int | None) -> None:
        _set_int(self, "max_new_tokens", 1, _INT64_MAX)
        _set_int(self, "min_new_tokens", 0, _INT64_MAX)
        if self.min_new_tokens > self.max_new_tokens:
            raise _value_error(self, "min_new_tokens", f"at most max_new_tokens, {self.max_new_tokens}")
        if not isinstance(self.top_k, bool) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _set_int(self, "top_k", 0, _INT64_MAX)
        _set_int(self, "n", 1, MAX_SAMPLES)
        _set_int(self, "num_top_logprobs", 0, _INT64_MAX)
        _set_int(self, "seed", 0, 2**64 - 1, optional=True)
        _set_real(self, "temperature", lambda t: t == 0 or MIN_TEMPERATURE <= t <= MAX_TEMPERATURE, _IN_RANGE)
        _set_real(self, "top_p", lambda p: 0 < p <= 1, "a number above 0 and at most 1")
        _set_real(self, "min_p", lambda p: 0 <= p <= 1, "a number from 0 to 1")
        _check_bool(self, "ignore_eos")
        _check_bool(self, "prompt_logprobs")
        _check_bool(self, "skip_special_tokens")
        _check_bool(self, "include_stop_str_in_output")
        _set_int(self, "num_prompt_top_logprobs", 0, _INT64_MAX)
        if self.num_prompt_top_logprobs and not self.prompt_logprobs:
            raise _value_error(self, "num_prompt_top_logprobs", "0, or prompt_logprobs=True with it")
        if isinstance(self.stop_token_ids, str | bytes | Mapping) or not isinstance(self.stop_token_ids, Iterable):
            raise _type_error(self, "stop_token_ids", "token ids")
        ids = tuple(itertools.islice(self.stop_token_ids, MAX_STOP_TOKEN_IDS + 1))
        if len(ids) > MAX_STOP_TOKEN_IDS:
            count = f"{len(self.stop_token_ids)} ids" if isinstance(self.stop_token_ids, Sized) else "more"
            raise ValueError(f"SamplingParams: stop_token_ids has {count}, expected at most {MAX_STOP_TOKEN_IDS}")
        ids = tuple(_as_int(self, "stop_token_ids", i, "token ids") for i in ids)
        if any(not 0 <= i <= _INT64_MAX for i in ids):
            raise _value_error(self, "stop_token_ids", "token ids of 0 or more, below 2**63")
        object.__setattr__(self, "stop_token_ids", ids)
        if self.stop is None:
            object.__setattr__(self, "stop", ())
        if isinstance(self.stop, Mapping) or not isinstance(self.stop, Iterable):
            raise _type_error(self, "stop", "a string or several")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(s, str) for s in stop):
            raise _type_error(self, "stop", "a string or several")
        if not all(stop):
            raise _value_error(self, "stop", "strings that are not empty")
        if not all(map(is_unicode, stop)):
            raise _value_error(self, "stop", "Unicode: half a character can never be found")
        object.__setattr__(self, "stop", stop)
        if not (isinstance(self.draft, tuple) and not self.draft):  # an array has a comparison of its own
            object.__setattr__(self, "draft", _answers(self))


_ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "logprobs": "num_top_logprobs"}


def _take_aliases() -> None:
    made = SamplingParams.__init__

    @functools.wraps(made)
    def __init__(self, *args, **given):
        for alias, name in _ALIASES.items():
            value = given.pop(alias, None)
            if value is not None and given.setdefault(name, value) != value:
                raise ValueError(
                    f"SamplingParams: {alias} is {value!r}, expected {name} alone, which is {given[name]!r}"
                )
        made(self, *args, **given)

    SamplingParams.__init__ = __init__
    for alias, name in _ALIASES.items():
        setattr(SamplingParams, alias, property(operator.attrgetter(name)))


_take_aliases()


def is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair: that is in no tokenizer's text, and in no message."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _plain(value: Any, where: str) -> Any:
    """As JSON has it, which other processes are told: a set is a sorted list. TypeError for what JSON has not."""
    value = value.value if isinstance(value, Enum) else value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        found = [_plain(item, where) for item in value]
        return sorted(found, key=str) if isinstance(value, set | frozenset) else found
    raise TypeError(f"{where}: got a {type(value).__name__}, expected what JSON has")


def _type_error(config, name, expected):
    got = getattr(config, name)
    return TypeError(f"{type(config).__name__}: {name} is {got!r} ({type(got).__name__}), expected {expected}")


def _value_error(config, name, expected):
    return ValueError(f"{type(config).__name__}: {name} is {getattr(config, name)!r}, expected {expected}")


def _as_int(config, name, value, expected):
    """Any true integer, NumPy's too; a bool is a mistake here, though Python would take it for 0 or 1."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise _type_error(config, name, expected) from None


def _answers(params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """Of `draft`, which may be one answer or several, of lists, arrays or tensors."""
    given, expected = params.draft, "token ids, or several lists of them"
    if given is None:
        return ()
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise _type_error(params, "draft", expected)
    several = [each.tolist() if hasattr(each, "tolist") else each for each in given]
    if not any(isinstance(each, Iterable) and not isinstance(each, str | bytes | Mapping) for each in several):
        several = [several]
    if not all(isinstance(each, Iterable) for each in several):
        raise _type_error(params, "draft", expected)
    answers = [tuple(_as_int(params, "draft", token, expected) for token in each) for each in several]
    if (count := sum(map(len, answers))) > MAX_DRAFT:
        raise ValueError(f"SamplingParams: draft has {count} tokens, expected at most {MAX_DRAFT}")
    if any(not 0 <= token <= _INT64_MAX for answer in answers for token in answer):
        raise _value_error(params, "draft", "token ids of 0 or more, below 2**63")
    return tuple(answer for answer in answers if answer)


def _set_int(config, name, low, high=None, optional=False):
    value = getattr(config, name)
    if optional and value is None:
        return
    if type(value) is int and value >= low and (high is None or value <= high):  # requests come by the hundred
        return
    expected = f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}"
    expected = f"an integer of {low} or more, below 2**63" if high == _INT64_MAX else expected
    expected += " or None" if optional else ""
    value = _as_int(config, name, value, expected)
    if value < low or (high is not None and value > high):
        raise _value_error(config, name, expected)
    object.__setattr__(config, name, value)


def _set_real(config, name, accept, expected):
    value = getattr(config, name)
    if type(value) is float and accept(value):  # no range has infinities or NaN in it
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _type_error(config, name, expected)
    if not math.isfinite(value) or not accept(value):
        raise _value_error(config, name, expected)
    object.__setattr__(config, name, float(value))


def _check_bool(config, name, optional=False):
    value = getattr(config, name)
    if not (isinstance(value, bool) or (optional and value is None)):
        raise _type_error(config, name, "True, False or None" if optional else "True or False")
