"""The server of a replica: a Ray actor with an engine, called by verl's clients, its trainer and our adapter."""

import asyncio
import hashlib
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from . import check_overrides, check_versions, overridden

check_versions()
import numpy as np
import ray
from cachetools import LRUCache
from verl.utils import normalize_token_ids
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.utils.profiler.profile import build_rollout_dist_profiler
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from .. import extras
from ..config import EngineConfig, SamplingParams
from ..core import garbage
from ..engine import Engine
from ..errors import WeightsMissing
from ..handover.receiver import WeightReceiver
from ..media.images import is_of_pil
from ..parallel.coordinator import NodeReceivers
from ..request import Completion
from ..serve.server import Server as HTTP
from ..serve.settings import Settings
from ..weights.load import as_dtype
from ..weights.processors import load_processors, why_no_processor
from ..weights.random import unfilled
from .lora import rollout_adapter

log = logging.getLogger(__name__)

_LOOK = 0.05  # seconds between two looks at what HTTP has under way
_DAY = 86400.0
_UNLIMITED = {"max_requests": 1 << 20, "request_timeout": _DAY}  # verl sends all that it has at once, and waits
LARGEST_BUCKET = 512 << 20  # bytes; two of them are under way, and larger ones are no faster
_ONLY = {  # verl's names of what this rollout has one value of, and why
    "data_parallel_size": (1, "verl makes a replica of each GPU, or of each tensor x pipeline_model_parallel_size"),
    "do_sample": (True, "rollout.temperature=0 takes the likeliest tokens"),
    "repetition_penalty": (1.0, "log-probabilities are the model's own"),
    "logprobs_mode": ("processed_logprobs", "they are those of rollout.temperature, as the trainer's are"),
    "over_sample_rate": (0, "every sample is answered in full"),
    "scheduling_policy": ("fcfs", "calls are let in as they come"),
    "enable_chunked_prefill": (True, "a prompt is cut where max_num_batched_tokens ends, which changes no bit"),
    "cudagraph_capture_sizes": (None, "the engine chooses sizes by what steps take; enforce_eager=True does without"),
    "enable_sleep_mode": (True, "rollout.free_cache_engine=False keeps the memory"),
    "quantization": (None, "weights are the trainer's, bit for bit"),
    "quantization_config_file": (None, "weights are the trainer's, bit for bit"),
    "enable_rollout_routing_replay": (False, "not needed: the trainer's routers choose the same experts"),
}
_ROLLOUTS = {"vexact", "vllm", "sglang", "trtllm", "hf"}  # whose options stand side by side in engine_kwargs
_OWN = {"handover": "in_place", "timeout": 60.0, "seeds": "step", "shards": "replica"}
_SEEDS, _SHARDS = ("step", "prompt"), ("replica", "replicas")
# Of one request: SamplingParams' own, what has one value here, and what is of a text that nobody sees.
_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos", "seed"}
_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1}
_OF_TEXT = {"detokenize", "skip_special_tokens", "spaces_between_special_tokens"}


def _digest(*what: object) -> bytes:
    return hashlib.blake2b(repr(what).encode(), digest_size=16).digest()


def _content(given: Any) -> bytes | str:
    """What one image or video has and others have not: of PIL's images the pixels and what they stand for, of videos
    their frames and what is said of them; what else may stand for one is named by itself."""
    about: tuple = ()
    if is_of_pil(given):
        about = given.getpalette(None), given.info.get("transparency")
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        given, said = np.asarray(given[0]), given[1]
        about = given.dtype.str, given.shape, {k: v.tolist() if hasattr(v, "tolist") else v for k, v in said.items()}
    if not hasattr(given, "tobytes"):
        return repr(given)
    kind = getattr(given, "mode", None), getattr(given, "size", None), *about
    return hashlib.blake2b(given.tobytes(), key=_digest(kind), digest_size=16).digest()


def server_name(replica_rank: int, kind: str = "", suffix: str = "", node: int = 0) -> str:
    """Of the Ray actor; of a replica's other nodes, of those that begin its stages there."""
    return f"vexact_server_{kind}{replica_rank}_{node}{suffix}"


def engine_options(config: RolloutConfig) -> tuple[EngineConfig, dict[str, Any]]:
    """What the rollout's config asks of the engine: verl's own fields, and over them engine_kwargs.vexact, which has
    EngineConfig's names, `handover` (WeightReceiver's mode), `timeout` (its seconds), `shards` (ranks send what they
    hold where those of one "replica" hold all weights, or those of several "replicas") and `seeds`: of
    full_determinism's calls they follow from the "step" too, or from the "prompt" alone. Then last epoch's answers are
    kept and drafted with, unless `speculation` says otherwise.

    returns  EngineConfig, {"handover": ..., "timeout": ..., "shards": ..., "seeds": ...}
    raises   ValueError, TypeError, naming the option, what it got and what it expected
    """
    for name, (only, why) in _ONLY.items():
        if (got := getattr(config, name)) != only:
            raise ValueError(f"vexact: rollout.{name}: got {got!r}, expected {only!r}: {why}. Set it to {only}")
    if config.qat and config.qat.get("enable"):
        raise ValueError("vexact: rollout.qat.enable: got True, expected False: weights are the trainer's, bit for bit")
    if config.limit_images is not None and (type(config.limit_images) is not int or config.limit_images < 1):
        raise ValueError(f"vexact: rollout.limit_images: got {config.limit_images!r}, expected 1 or more, or null")
    if strange := ", ".join(sorted(set(config.engine_kwargs or {}) - _ROLLOUTS)):
        raise ValueError(f"vexact: rollout.engine_kwargs: got {strange}, expected vexact")
    if config.mtp and config.mtp.get("enable") and config.mtp.get("enable_rollout"):
        said = "engine_kwargs.vexact.speculation.mtp=true drafts with the checkpoint's own head"
        raise ValueError(f"vexact: model.mtp.enable_rollout: got True, expected False: {said}")
    for where, drawn in (("rollout", config), ("rollout.val_kwargs", config.val_kwargs)):
        try:
            SamplingParams(temperature=drawn.temperature, top_p=drawn.top_p, top_k=drawn.top_k)
        except (TypeError, ValueError) as error:
            raise type(error)(f"vexact: {where}: {error}") from None
    given = dict((config.engine_kwargs or {}).get("vexact") or {})
    handover = {name: given.pop(name, default) for name, default in _OWN.items()}
    if (shards := handover["shards"]) not in _SHARDS:
        said = f"got {shards!r}, expected {' or '.join(_SHARDS)}"
        raise ValueError(f"vexact: rollout.engine_kwargs.vexact.shards: {said}")
    if (seeds := handover["seeds"]) not in _SEEDS:
        raise ValueError(f"vexact: rollout.engine_kwargs.vexact.seeds: got {seeds!r}, expected {' or '.join(_SEEDS)}")
    if seeds == "prompt":
        if not config.full_determinism:
            raise ValueError(
                "vexact: rollout.engine_kwargs.vexact.seeds: got 'prompt' without rollout.full_determinism, where no "
                "call's seed follows from anything: expected step"
            )
        given.setdefault("speculation", {})
    sizes = {f"{kind}_parallel_size": getattr(config, f"{kind}_model_parallel_size") for kind in ("pipeline", "tensor")}
    sizes["expert_parallel_size"] = config.expert_parallel_size
    named = {"nodes", "adapter", "adapter_dtype"}  # by verl's own names, as sizes are
    known = {field.name for field in fields(EngineConfig)} - sizes.keys() - named
    if unknown := ", ".join(sorted(given.keys() - known)):
        there = ", ".join(sorted(known | {*handover}))
        raise ValueError(f"vexact: rollout.engine_kwargs.vexact: unknown: {unknown}; there is: {there}")
    asked = {name: getattr(config, name) for name in known if hasattr(config, name)}
    asked |= {"enable_prefix_cache": config.enable_prefix_caching, "show_progress": False}
    return EngineConfig(**sizes, **asked | given), handover


def check_trained(config: RolloutConfig) -> None:
    """Of a rollout whose answers are trained on.

    raises   ValueError, naming the option
    """
    if not config.temperature > 0:
        raise ValueError(
            f"vexact: rollout.temperature: got {config.temperature}, expected a number above 0: the trainer divides "
            "logits by it. Validation alone takes the likeliest tokens, by rollout.val_kwargs.temperature=0"
        )


def _take_processors(engine: Engine, given: HFModelConfig) -> None:
    """Images and videos become what they become for the trainer: verl's own processor makes them, where it has one."""
    made = given.processor
    if made is not None:
        engine.image_processor = getattr(made, "image_processor", None)
        engine.video_processor = getattr(made, "video_processor", None)
        return
    why = why_no_processor(given.local_tokenizer_path, given.trust_remote_code) or "its log has the reason"
    log.warning("vexact: verl has no processor of this model, and takes its prompts for text alone: %s", why)
    if engine.image_processor is None:
        engine.image_processor, engine.video_processor = load_processors(Path(given.local_path), given.local_path)


def say_what_a_wake_up_costs(sleep_backend: str, device: str, eager: bool) -> None:
    """Of a rollout that sleeps in every step, where that takes seconds of it: a warning."""
    how, _, why = sleep_backend.partition(": ")
    if device == "cuda" and how == "storages" and why and not eager:  # without a reason it was asked for
        said = "vexact: every step records its CUDA graphs anew, some seconds: it sleeps by storages (%s). Run: %s"
        log.warning(said, why, extras.pip_line("sleep"))


def say_how_validation_draws(drawn: Any) -> None:
    """Of rollout.val_kwargs whose do_sample, which verl 0.9.1 reads nowhere, says another thing: a warning."""
    if drawn.do_sample != (drawn.temperature > 0):
        how = "draws" if drawn.temperature > 0 else "takes the likeliest tokens"
        said = "vexact: rollout.val_kwargs.do_sample: got %s, but its temperature is what counts: validation %s at %s"
        log.warning(said, drawn.do_sample, how, drawn.temperature)


class Server:
    """One engine. verl's signatures; all calls share one event loop. On a replica of several nodes it is on the first
    of them.

    nodes   for each node of such a replica the actor that begins stages there
    http    OpenAI's API and /metrics, for what verl asks at a replica's address: generative reward models,
            main_generation_server, Prometheus. Without a key, as verl's other rollouts have it; what controls the
            engine is refused there. It listens from here on, and answers once there is an engine
    """

    def __init__(
        self, config, model_config, rollout_mode: RolloutMode, replica_rank: int, nodes: Sequence[Any] | None = None
    ):
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self.options, self.handover = engine_options(self.config)
        for name in check_overrides(self.model_config):
            kind = self.model_config.hf_config.model_type
            log.warning("vexact: model.override_config.%s: no configuration of %s has it: nobody reads it", name, kind)
        if (adapter := rollout_adapter(self.model_config)) is not None:
            dtype = str(as_dtype(self.config.dtype, get_device_name())).removeprefix("torch.")
            self.options = replace(self.options, adapter=adapter, adapter_dtype=dtype)
        self.nodes = nodes
        if nodes is not None:
            self.options = replace(self.options, nodes=len(nodes))
        self.rollout_mode, self.engine = rollout_mode, None
        self._known = {self.config.temperature, self.config.val_kwargs.temperature}  # temperatures, or said
        if rollout_mode == RolloutMode.HYBRID:
            say_how_validation_draws(self.config.val_kwargs)
        given = self.model_config
        told = self.config.prometheus.served_model_name or given.path
        called = (given.path, given.local_path, os.path.basename(given.path), told, os.path.basename(told))
        names = tuple(dict.fromkeys(map(str, called)))
        host = ray.util.get_node_ip_address().strip("[]")
        limits = {**_UNLIMITED, "max_images": self.config.limit_images}
        self.http = HTTP(Settings(host=host, port=0, model_names=names, allow_no_key=True, **limits))
        self._calls = itertools.count()
        self._running: dict[str, tuple[str, list[str], asyncio.Future]] = {}  # verl's id, the engine's, whether aborted
        self._shut = self._rejecting = False
        self._turned = asyncio.Event()
        self._steps: dict[int, int] = {}  # the engine's weight_version -> verl's global_steps
        self._named: int | None = None  # the last of these
        # full_determinism's: of this step, by what was asked, how often it was; and the seeds of aborted calls, by what
        # whoever goes on with them will ask
        self._step: object = None
        self._calls_of: LRUCache[bytes, int] = LRUCache(1 << 18)
        self._broken_off: LRUCache[bytes, list[int]] = LRUCache(1 << 16)
        self._receiving: asyncio.Future | None = None
        self._has_base = False
        tool = (profiler := self.config.profiler) and (profiler.tool_config or {}).get(profiler.tool)
        ranks, tool = self.options.processes, tool and omega_conf_to_dataclass(tool)
        self._profiler = build_rollout_dist_profiler(replica_rank, ranks, config=profiler, tool_config=tool)

    async def launch_server(self) -> None:
        """Makes the engine. Raises what that raises."""
        self.engine, how = await asyncio.to_thread(self._make), self.handover
        make = WeightReceiver if self.nodes is None else NodeReceivers
        options = {"mode": how["handover"], "timeout": how["timeout"]}
        self._receiver = await asyncio.to_thread(make, self.engine, **options)
        await asyncio.to_thread(self.http.start, self.engine)
        garbage.freeze(alone=ray.is_initialized())  # as in an actor

    def _make(self) -> Engine:
        given, device, dtype = self.model_config, get_device_name(), self.config.dtype
        dummy = self.rollout_mode != RolloutMode.COLOCATED and "dummy" in self.config.load_format
        dummy, adapted = dummy and self.options.processes == 1, self.options.adapter is not None
        model = None
        if dummy and not adapted:
            model = unfilled(given.hf_config, dtype, device, given.generation_config)
        options = {"device": device, "dtype": dtype, "config": self.options, "tokenizer": given.tokenizer}
        options["nodes"] = self.nodes
        engine = Engine.from_pretrained(given.local_path if model is None else model, **options)
        if engine.images is not None:
            _take_processors(engine, given)
        if model is not None or (dummy and adapted):  # nothing is computed with what stands there
            engine.sleep(level=2, tags=["weights"])
            engine.wake_up(["weights"])
        for name, got, wanted in overridden(given, engine.model.config):
            engine.close()
            where = f"{given.local_path}/config.json has {got!r}, which the engine reads: write it there"
            raise ValueError(f"vexact: model.override_config.{name}: got {wanted!r}, but {where}")
        if self.rollout_mode == RolloutMode.HYBRID and self.config.free_cache_engine:
            say_what_a_wake_up_costs(engine.sleep_backend, device, self.options.enforce_eager)
        return engine

    def get_server_address(self) -> str:
        """What verl's load balancer knows this server by, and where `http` listens."""
        return self.http.url.removeprefix("http://")

    # Requests

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, image_data: list | None = None,
        video_data: list | None = None, audio_data: list | None = None, mm_processor_kwargs: dict | None = None,
    ) -> TokenOutput:  # fmt: skip
        """One sample of one prompt.

        image_data       PIL images of any mode, those of all turns, as many as prompt_ids have places for; each place
                         has one image token, or all
        video_data       likewise videos: frames, and transformers' metadata of them
        sampling_params  vLLM's names. Without a seed each call has its own; with full_determinism it follows from
                         rollout.seed, request_id, prompt_ids, images and videos, how many calls of these came before
                         in this step, and global_steps, or that not, where the option `seeds` is "prompt":
                         verl's loop gives all its requests one id then, and calls n times for n answers. So a prompt
                         has the same n answers in every run, in the order in which the calls come; what goes on with
                         an aborted call is drawn as if nothing had been. prompt_logprobs is what verl's teacher asks
                         for: of the token after each of the prompt's (0), or the K likeliest
        returns          log_probs of the whole distribution at the request's temperature, before top-k and top-p: what
                         the trainer recomputes. A call that is aborted returns what it has
        raises           ValueError, TypeError: what is wrong with this call
        """
        if audio_data is not None and len(audio_data):
            raise ValueError("vexact: audio_data: got some, expected none: prompts are tokens, images and videos")
        if mm_processor_kwargs:
            got = ", ".join(sorted(map(str, mm_processor_kwargs)))
            raise ValueError(f"vexact: mm_processor_kwargs: got {got}, expected none: as the model's processor says")
        ids, asked = normalize_token_ids(prompt_ids), dict(sampling_params)
        given = (("images", image_data), ("videos", video_data))
        media = {name: list(data) for name, data in given if data is not None and len(data)}
        most, shown = self.config.limit_images, len(media.get("images", ()))
        if most is not None and shown > most:
            raise ValueError(f"vexact: image_data: got {shown} images, expected at most {most}: rollout.limit_images")
        for i, image in enumerate(media.get("images", ())):
            if self.engine.images is not None and not is_of_pil(image):  # a model of text takes none at all
                got = type(image).__name__
                said = "an image of PIL's: verl's processor opens and turns what else there is in a way of its own"
                raise TypeError(f"vexact: image_data[{i}]: got a {got}, expected {said}")
        prompt = {"prompt_token_ids": ids, **media} if media else ids
        shown = ()
        wants_logprobs, teaches = bool(asked.pop("logprobs", False)), asked.pop("prompt_logprobs", None)
        params = self._params(asked, len(ids), request_id)
        if wants_logprobs:
            self._say_temperature(params.temperature)
        if teaches is not None:
            params = replace(params, prompt_logprobs=True, num_prompt_top_logprobs=teaches)
        while self._shut and not self._rejecting:
            await self._turned.wait()
        if self._shut:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=self._stamp([]))
        if self.config.full_determinism and params.seed is None:
            shown = tuple(_content(one) for each in media.values() for one in each)
            params = replace(params, seed=self._seed(ids, request_id, *shown))
        (done,) = await self._run([prompt], params, request_id)
        extra = self._stamp(done.weight_versions) | {"num_cached_tokens": done.metrics.cached_tokens}
        aborted = done.finish_reason == "abort"
        if aborted and self.config.full_determinism:
            self._broken_off.setdefault(_digest(request_id, ids + done.token_ids, *shown), []).append(params.seed)
        if teaches is not None and not aborted:
            _, *tops = done.prompt_top_logprobs or [{token: value} for token, value in zip(ids, done.prompt_logprobs)]
            extra["prompt_ids"] = [*(list(top) for top in tops), [0] * max(teaches, 1)]
            extra["prompt_logprobs"] = [*(list(top.values()) for top in tops), [0.0] * max(teaches, 1)]
        return TokenOutput(
            token_ids=done.token_ids, log_probs=done.logprobs if wants_logprobs else None, extra_fields=extra,
            stop_reason="aborted" if aborted else "completed", num_preempted=done.metrics.preemptions,
        )  # fmt: skip

    def _say_temperature(self, asked: float) -> None:
        """Of an agent loop's own, once: the trainer knows that of the config alone."""
        if asked in self._known or self.rollout_mode == RolloutMode.COLOCATED:
            return
        self._known.add(asked)
        said = "vexact: sampling_params: temperature: got %s, but the trainer divides logits by rollout.temperature, "
        said += "%s: it has other log-probabilities of these answers"
        log.warning(said, asked, self.config.temperature)

    async def _run(self, prompts: list, params: SamplingParams, request_id: str) -> list[Completion]:
        """Known to those who abort, from here to the end."""
        key, ended = f"{request_id}/{next(self._calls)}", asyncio.get_running_loop().create_future()
        names = [f"{key}/{index}" for index in range(len(prompts))]
        self._running[key], found = (request_id, names, ended), []
        try:
            found = await self.engine.agenerate(prompts, params, request_ids=names)
        except WeightsMissing as error:
            raise WeightsMissing(f"{error}. With rollout.load_format=auto there are some before that") from error
        finally:
            del self._running[key]
            ended.set_result(any(done.finish_reason == "abort" for done in found))
        for done in found:
            if done.finish_reason == "error":
                raise ValueError(f"vexact: request {request_id}: {done.error}")
            if done.error:
                log.warning("vexact: request %s: %s", request_id, done.error)
        return found

    def _params(self, asked: dict[str, Any], length: int, request_id: str) -> SamplingParams:
        config, longest = self.config, self.engine.config.max_model_len
        asked = {name: value for name, value in asked.items() if value is not None and name not in _OF_TEXT}
        for name, only in _NEUTRAL.items():
            if (got := asked.pop(name, only)) != only:
                raise ValueError(f"vexact: sampling_params: {name}: got {got!r}, expected {only!r}")
        if longest is not None and length >= longest:
            raise ValueError(f"vexact: prompt_ids: got {length} tokens, expected fewer than max_model_len, {longest}")
        most = min(config.response_length, config.prompt_length + config.response_length - length)
        most = max(1, asked.pop("max_tokens", asked.pop("max_new_tokens", most)))
        given = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "ignore_eos")}
        given["max_new_tokens"] = most if longest is None else min(most, longest - length)
        if "min_tokens" in asked:
            asked["min_new_tokens"] = asked.pop("min_tokens")
        if unknown := ", ".join(sorted(asked.keys() - _SAMPLING)):
            raise ValueError(f"vexact: sampling_params: got {unknown}: there is no such parameter here")
        given |= asked
        return SamplingParams(**given | {"top_k": 0 if given["top_k"] == -1 else given["top_k"]})

    def _seed(self, ids: list[int], request_id: str, *shown: bytes | str) -> int:
        """Of a call of full_determinism's: that of the call that it goes on with, where one was aborted."""
        if waiting := self._broken_off.get(_digest(request_id, ids, *shown)):
            return waiting.pop()
        version = self.engine.weight_version
        step = self._steps.get(version, f"of weights {version}")
        if step != self._step:
            self._step = step
            self._calls_of.clear()
        what = _digest(request_id, ids, *shown)
        place = self._calls_of.get(what, 0)
        self._calls_of[what] = place + 1
        step = step if self.handover["seeds"] == "step" else "of any step"
        return int.from_bytes(_digest(self.config.seed, step, what, place)[:8], "big")

    def _stamp(self, versions: list[int]) -> dict[str, Any]:
        """Which weights these tokens are of; without any, those that are there."""
        known = versions or [self.engine.weight_version]
        first, last = self._steps.get(known[0]), self._steps.get(known[-1])
        return {"global_steps": last, "min_global_steps": first, "max_global_steps": last, "weight_versions": versions}

    def _turn(self, shut: bool, rejecting: bool = False) -> None:
        self._shut, self._rejecting = shut, rejecting
        self._turned.set()
        self._turned = asyncio.Event()

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Calls under way return what they have. Others wait for resume_generation, or are turned away at once; those
        by HTTP, which are not counted, end with what they have, and new ones get 503 until then."""
        self._turn(shut=True, rejecting=reject_request)
        self.http.hold()
        ids = await self._abort(list(self._running.values()))
        return {"aborted_count": len(ids), "request_ids": ids}

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        ids = await self._abort([call for call in self._running.values() if call[0] == request_id])
        return {"aborted": bool(ids), "request_id": request_id}

    async def _abort(self, calls: list[tuple[str, list[str], asyncio.Future]]) -> list[str]:
        for name in (name for _, names, _ in calls for name in names):
            self.engine.abort(name)
        return [request_id for request_id, _, ended in calls if await ended]

    async def resume_generation(self) -> None:
        self._turn(shut=False)
        self.http.go_on()

    async def wait_for_requests_to_drain(self) -> None:
        """Until the calls that are here have returned; not where nothing is computed at the moment."""
        if self._running and self.engine.state == "running":
            await asyncio.wait([ended for _, _, ended in self._running.values()])
        while self.http.active and self.engine.state == "running":
            await asyncio.sleep(_LOOK)

    # Memory, weights, profiles

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if self.rollout_mode != RolloutMode.STANDALONE:
            await asyncio.to_thread(self.engine.wake_up, tags if self.rollout_mode == RolloutMode.HYBRID else None)

    async def sleep(self) -> None:
        """Hybrid: weights are dropped, an update brings them. Colocated: they wait in host memory."""
        if self.config.free_cache_engine and self.rollout_mode != RolloutMode.STANDALONE:
            self._has_base = False
            await asyncio.to_thread(self.engine.sleep, 2 if self.rollout_mode == RolloutMode.HYBRID else 1)

    async def clear_kv_cache(self) -> None:
        await asyncio.to_thread(self.engine.reset_prefix_cache)

    async def release_kv_cache(self) -> None:
        if self.config.free_cache_engine and self.rollout_mode != RolloutMode.COLOCATED:
            await asyncio.to_thread(self.engine.sleep, tags=["kv_cache"])

    async def resume_kv_cache(self) -> None:
        if self.rollout_mode != RolloutMode.COLOCATED:
            await asyncio.to_thread(self.engine.wake_up, ["kv_cache"])

    async def get_weights_address(self, node: int = 0) -> str:
        """Where the replica's part on that of its nodes takes them. To be asked before each update."""
        if self.nodes is None:
            return self._receiver.address
        return await asyncio.to_thread(lambda: list(self._receiver.addresses.values())[node])

    async def receive_weights(self) -> int:
        """Takes one whole set, on each node, and returns the engine's new weight_version. A call while another waits
        for a sender joins it: whoever made that may be dead."""
        if self._receiving is None or self._receiving.done():
            self._has_base = False  # whatever comes of it
            self._receiving = asyncio.ensure_future(asyncio.to_thread(self._receiver.receive, self.handover["timeout"]))
        version = await asyncio.shield(self._receiving)
        self._has_base = True
        return version

    async def has_base(self) -> bool:
        """Whether the last update succeeded, and its weights are there still."""
        return self._has_base

    async def set_global_steps(self, global_steps: int | None) -> None:
        """What the weights that are there now are called; None: as those before, which have come once more."""
        self._named = self._named if global_steps is None else global_steps
        if self._named is not None:
            self._steps[self.engine.weight_version] = self._named

    async def start_profile(self, **kwargs) -> None:
        self._profiler.start(**kwargs)

    async def stop_profile(self) -> None:
        self._profiler.stop(run_command=False)
