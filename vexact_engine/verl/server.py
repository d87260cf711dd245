"""The server of a replica: a Ray actor with an engine, called by verl's clients, its trainer and our adapter."""

import asyncio
import copy
import functools
import hashlib
import itertools
import logging
from dataclasses import dataclass, fields, replace
from typing import Any

import ray
import torch
from verl.utils import normalize_token_ids
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.utils.net_utils import get_free_port
from verl.utils.profiler.profile import build_rollout_dist_profiler
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from ..config import EngineConfig, SamplingParams
from ..engine import Engine
from ..errors import WeightsMissing
from ..request import Completion
from ..weights.load import as_dtype
from ..weights.receiver import MODES, WeightReceiver
from . import check_versions

log = logging.getLogger(__name__)

_WHERE = "rollout.engine_kwargs.vexact"
# verl's names of what this rollout has only one value of, and why.
_ONLY = {
    "tensor_model_parallel_size": (1, "an engine is never cut that way; verl's default is 2"),
    "data_parallel_size": (1, "verl makes a replica of every GPU, or of every pipeline_model_parallel_size"),
    "expert_parallel_size": (1, "all experts are in one stage"),
    "repetition_penalty": (1.0, "log-probabilities are the model's own"),
    "quantization": (None, "weights are the trainer's, bit for bit"),
    "enable_rollout_routing_replay": (False, "not needed: the trainer's routers choose the same experts"),
}
# Of one request: SamplingParams' own, what has one value here, and what is of the text that nobody sees.
_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos", "seed"}
_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1}
_OF_TEXT = {"detokenize", "skip_special_tokens", "spaces_between_special_tokens"}


def server_name(replica_rank: int, kind: str = "", suffix: str = "") -> str:
    """Of the Ray actor."""
    return f"vexact_server_{kind}{replica_rank}_0{suffix}"


@dataclass(frozen=True)
class Options:
    """What verl's RolloutConfig asks of an engine.

    engine     its config
    handover   how new weights come in: WeightReceiver's mode
    timeout    seconds that any one message of that may take
    """

    engine: EngineConfig
    handover: str = "in_place"
    timeout: float = 60.0

    @classmethod
    def of(cls, config: RolloutConfig) -> "Options":
        """verl's own fields, and over them those of engine_kwargs.vexact: EngineConfig's, `handover` and `timeout`.

        raises   ValueError, TypeError, naming the option, what it got and what it expected
        """
        for name, (only, why) in _ONLY.items():
            got = getattr(config, name)
            if got != only:
                raise ValueError(f"vexact: rollout.{name}: got {got!r}, expected {only!r}: {why}. Set it to that")
        if config.mtp is not None and config.mtp.enable and config.mtp.enable_rollout:
            raise ValueError("vexact: rollout.mtp.enable_rollout: got True, expected False: nothing is speculated here")
        given = dict((config.engine_kwargs or {}).get("vexact") or {})
        if "pipeline_parallel_size" in given:
            raise ValueError(f"vexact: {_WHERE}.pipeline_parallel_size: set rollout.pipeline_model_parallel_size")
        own = {name: given.pop(name) for name in ("handover", "timeout") if name in given}
        unknown = given.keys() - {field.name for field in fields(EngineConfig)}
        if unknown:
            known = sorted({field.name for field in fields(EngineConfig)} - {"pipeline_parallel_size"} | own.keys())
            raise ValueError(f"vexact: {_WHERE}: unknown: {', '.join(sorted(unknown))}; there is: {', '.join(known)}")
        if own.get("handover", MODES[0]) not in MODES:
            raise ValueError(f"vexact: {_WHERE}.handover: got {own['handover']!r}, expected one of {', '.join(MODES)}")
        if not own.get("timeout", 1) > 0:
            raise ValueError(f"vexact: {_WHERE}.timeout: got {own['timeout']!r}, expected seconds above 0")
        asked = {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_model_len": config.max_model_len,
            "enable_prefix_cache": config.enable_prefix_caching,
            "enforce_eager": config.enforce_eager,
            "pipeline_parallel_size": config.pipeline_model_parallel_size,
            "show_progress": False,
        }
        return cls(EngineConfig(**asked | given), **own)


class Server:
    """One engine. verl's signatures; all its calls share one event loop."""

    def __init__(self, config, model_config, rollout_mode: RolloutMode, replica_rank: int):
        check_versions()
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self.options = Options.of(self.config)
        self.rollout_mode, self.replica_rank = rollout_mode, replica_rank
        self.engine: Engine | None = None
        self._host = ray.util.get_node_ip_address().strip("[]")
        self._port, self._reserved = get_free_port(self._host, with_alive_sock=True)  # nobody else's while this lives
        self._calls = itertools.count()
        self._running: dict[str, tuple[str, list[str], asyncio.Future]] = {}  # verl's id, the engine's, whether aborted
        self._shut = self._rejecting = False
        self._gate = asyncio.Condition()
        self._steps: dict[int, int] = {}  # the engine's weight_version -> verl's global_steps
        self._receiving: asyncio.Future | None = None
        profiler = self.config.profiler
        tool = None if profiler is None else (profiler.tool_config or {}).get(profiler.tool)
        self._profiler = build_rollout_dist_profiler(
            replica_rank,
            self.config.pipeline_model_parallel_size,
            config=profiler,
            tool_config=None if tool is None else omega_conf_to_dataclass(tool),
        )

    # The beginning

    async def launch_server(self) -> None:
        """Makes the engine. Raises what that raises."""
        self.engine = await asyncio.to_thread(self._make)
        options = self.options
        self._receiver = WeightReceiver(self.engine, mode=options.handover, timeout=options.timeout)

    def _make(self) -> Engine:
        device, given = get_device_name(), self.model_config
        made = functools.partial(
            Engine.from_pretrained, device=device, dtype=self.config.dtype, config=self.options.engine
        )
        dummy = self.rollout_mode != RolloutMode.COLOCATED and "dummy" in self.config.load_format
        if dummy and self.config.pipeline_model_parallel_size == 1:
            model = _unfilled(given, as_dtype(self.config.dtype, device), device)
            if model is not None:
                engine = made(model, tokenizer=given.tokenizer)
                engine.sleep(level=2, tags=["weights"])  # nothing is computed with what stands there
                engine.wake_up(["weights"])
                return engine
        engine = made(given.local_path, tokenizer=given.tokenizer)
        own = engine.model.config
        differ = [name for name in given.override_config if getattr(own, name, None) != given.override_config[name]]
        differ = [name for name in differ if name not in ("attn_implementation", "model_config")]
        if differ:
            engine.close()
            raise ValueError(
                f"vexact: model.override_config: {', '.join(differ)}: the engine reads {given.local_path}/config.json, "
                "which says otherwise: write it there"
            )
        return engine

    def get_server_address(self) -> tuple[str, int]:
        """What verl's load balancer knows this server by. Nobody listens there."""
        return self._host, self._port

    # Requests

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> TokenOutput:
        """One sample of one prompt.

        sampling_params  by vLLM's names, as verl has them. Without a seed each call has one of its own; with
                         full_determinism it follows from rollout.seed, request_id and global_steps
        returns          log_probs, where `logprobs` asks for them, of the whole distribution at the request's
                         temperature, before top-k and top-p: what the trainer recomputes. With `prompt_logprobs` the
                         extra fields prompt_ids and prompt_logprobs, as verl's teacher wants them: of the token after
                         each of the prompt's (0), or of the likeliest K there (K; it costs many times the prompt)
        raises           ValueError, TypeError: what is wrong with this call
        """
        for name, data in (("image", image_data), ("video", video_data), ("audio", audio_data)):
            if data is not None and len(data):
                raise ValueError(f"vexact: {name}_data: got some, expected none: prompts are tokens alone")
        ids, asked = normalize_token_ids(prompt_ids), dict(sampling_params)
        wants_logprobs, teaches = bool(asked.pop("logprobs", False)), asked.pop("prompt_logprobs", None)
        params = self._params(asked, len(ids), request_id)
        if teaches == 0:
            params = replace(params, prompt_logprobs=True)
        if self._shut and not await self._admitted():
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=self._stamp([]))
        (done,) = await self._run([ids], params, request_id)
        extra = self._stamp(done.weight_versions) | {"num_cached_tokens": done.metrics.cached_tokens}
        if teaches is not None and done.finish_reason != "abort":
            tops = [{token: value} for token, value in zip(ids, done.prompt_logprobs or ())][1:]
            if teaches:  # the engine knows these of tokens that it draws: one behind each of the prompt's
                one = SamplingParams(max_new_tokens=1, num_top_logprobs=teaches)
                behind = await self._run([ids[:end] for end in range(1, len(ids))], one, request_id)
                tops = [sample.top_logprobs[0] for sample in behind]
            extra["prompt_ids"] = [*(list(top) for top in tops), [0] * max(teaches, 1)]
            extra["prompt_logprobs"] = [*(list(top.values()) for top in tops), [0.0] * max(teaches, 1)]
        return TokenOutput(
            token_ids=done.token_ids,
            log_probs=done.logprobs if wants_logprobs else None,
            stop_reason="aborted" if done.finish_reason == "abort" else "completed",
            num_preempted=done.metrics.preemptions,
            extra_fields=extra,
        )

    async def _run(self, prompts: list[list[int]], params: SamplingParams, request_id: str) -> list[Completion]:
        """Known to those who abort, from here to the end."""
        key, ended = f"{request_id}/{next(self._calls)}", asyncio.get_running_loop().create_future()
        names = [f"{key}/{index}" for index in range(len(prompts))]
        self._running[key] = request_id, names, ended
        aborted = False
        try:
            found = await self.engine.agenerate(prompts, params, request_ids=names)
            aborted = any(done.finish_reason == "abort" for done in found)
        except WeightsMissing as error:
            raise WeightsMissing(
                f"{error}. Before a first update there are some with rollout.load_format=auto"
            ) from error
        finally:
            del self._running[key]
            ended.set_result(aborted)
        for done in found:
            if done.finish_reason == "error":
                raise ValueError(f"vexact: request {request_id}: {done.error}")
            if done.error:
                log.warning("vexact: request %s: %s", request_id, done.error)
        return found

    def _params(self, asked: dict[str, Any], length: int, request_id: str) -> SamplingParams:
        config, model_len = self.config, self.engine.config.max_model_len
        asked = {name: value for name, value in asked.items() if value is not None and name not in _OF_TEXT}
        for name, only in _NEUTRAL.items():
            if (got := asked.pop(name, only)) != only:
                raise ValueError(f"vexact: sampling_params: {name}: got {got!r}, expected {only!r}")
        room = (model_len or length + config.response_length) - length
        if room < 1:
            raise ValueError(f"vexact: prompt_ids: got {length} tokens, expected fewer than {model_len}, max_model_len")
        most = min(config.response_length, config.prompt_length + config.response_length - length)
        most = asked.pop("max_tokens", asked.pop("max_new_tokens", most))
        seed = None
        if config.full_determinism:
            told = f"{config.seed} {request_id} {self._steps.get(self.engine.weight_version)}"
            seed = int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "big")
        given = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "ignore_eos": config.ignore_eos,
            "seed": seed,
            "max_new_tokens": max(1, min(most, room)),
        }
        if "min_tokens" in asked:
            asked["min_new_tokens"] = asked.pop("min_tokens")
        unknown = asked.keys() - _SAMPLING
        if unknown:
            raise ValueError(
                f"vexact: sampling_params: got {', '.join(sorted(unknown))}: there is no such parameter here"
            )
        given |= asked
        return SamplingParams(**given | {"top_k": max(given["top_k"], 0)})

    def _stamp(self, versions: list[int]) -> dict[str, Any]:
        """Which weights these tokens are of; without any, those that are there."""
        first, last = (versions[0], versions[-1]) if versions else (self.engine.weight_version,) * 2
        first, last = self._steps.get(first), self._steps.get(last)
        return {"global_steps": last, "min_global_steps": first, "max_global_steps": last, "weight_versions": versions}

    # The gate

    async def _admitted(self) -> bool:
        """Once the gate is open; False where it turns calls away."""
        async with self._gate:
            await self._gate.wait_for(lambda: not self._shut or self._rejecting)
        return not self._shut

    async def _turn(self, shut: bool, rejecting: bool = False) -> None:
        self._shut, self._rejecting = shut, rejecting
        async with self._gate:
            self._gate.notify_all()

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Calls under way return what they have. Others wait for resume_generation, or are turned away at once."""
        await self._turn(shut=True, rejecting=reject_request)
        ids = await self._abort(list(self._running.values()))
        return {"aborted_count": len(ids), "request_ids": ids}

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        ids = await self._abort([call for call in self._running.values() if call[0] == request_id])
        return {"aborted": bool(ids), "request_id": request_id}

    async def _abort(self, calls: list[tuple[str, list[str], asyncio.Future]]) -> list[str]:
        for _, names, _ in calls:
            for name in names:
                self.engine.abort(name)
        return [request_id for request_id, _, ended in calls if await ended]

    async def resume_generation(self) -> None:
        await self._turn(shut=False)

    async def wait_for_requests_to_drain(self) -> None:
        """Until the calls that are here have returned; not where nothing is computed at the moment."""
        if self._running and self.engine.state == "running":
            await asyncio.wait([ended for _, _, ended in self._running.values()])

    # Memory

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if self.rollout_mode != RolloutMode.STANDALONE:
            hybrid = self.rollout_mode == RolloutMode.HYBRID
            await asyncio.to_thread(self.engine.wake_up, tags if hybrid else None)

    async def sleep(self) -> None:
        """Hybrid: weights are dropped, an update brings them. Colocated: they wait in host memory."""
        if self.config.free_cache_engine and self.rollout_mode != RolloutMode.STANDALONE:
            await asyncio.to_thread(self.engine.sleep, 2 if self.rollout_mode == RolloutMode.HYBRID else 1)

    async def clear_kv_cache(self) -> None:
        await asyncio.to_thread(self.engine.reset_prefix_cache)

    async def release_kv_cache(self) -> None:
        if self.config.free_cache_engine and self.rollout_mode != RolloutMode.COLOCATED:
            await asyncio.to_thread(self.engine.sleep, tags=["kv_cache"])

    async def resume_kv_cache(self) -> None:
        if self.config.free_cache_engine and self.rollout_mode != RolloutMode.COLOCATED:
            await asyncio.to_thread(self.engine.wake_up, ["kv_cache"])

    # Weights

    def get_weights_address(self) -> str:
        return self._receiver.address

    async def receive_weights(self) -> int:
        """Takes one whole set. Returns the engine's new weight_version. A call while another waits for a sender joins
        it: whoever made that may be dead."""
        if self._receiving is None or self._receiving.done():
            waits = self._receiver.receive, self.options.timeout
            self._receiving = asyncio.ensure_future(asyncio.to_thread(*waits))
        return await asyncio.shield(self._receiving)

    async def set_global_steps(self, global_steps: int) -> None:
        """What the weights that are there now are called."""
        self._steps[self.engine.weight_version] = global_steps

    # Profiles, by verl's own profiler of this process

    async def start_profile(self, **kwargs) -> None:
        self._profiler.start(**kwargs)

    async def stop_profile(self) -> None:
        self._profiler.stop(run_command=False)


def _unfilled(given: HFModelConfig, dtype: torch.dtype, device: str) -> torch.nn.Module | None:
    """The model of a config whose weights an update will bring; None where it has buffers that no update need bring."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(given.hf_config)
    make = functools.partial(AutoModelForCausalLM.from_config, config, dtype=dtype, attn_implementation="eager")
    with torch.device("meta"):
        model = make()
    if model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        return None
    with torch.random.fork_rng(), torch.device(device):
        model = make()
    model.generation_config = given.generation_config or model.generation_config
    return model
