"""What vexact_engine.verl and vx.patch.veomni build on, as the installed verl and VeOmni have it.

A failure here names what moved, before a run of hours ends in a TypeError of some Ray worker.
"""

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest

# What we call, or what is called of ours, with the names and defaults of its parameters.
SIGNATURES = {
    # our rollout: what is called in the trainer's ranks and in CheckpointEngineWorker
    "verl.workers.rollout.base:BaseRollout.__init__": "self, config, model_config, device_mesh, *args, **kwargs",
    "verl.workers.rollout.base:BaseRollout.resume": "self, tags",
    "verl.workers.rollout.base:BaseRollout.release": "self",
    "verl.workers.rollout.base:BaseRollout.update_weights": "self, weights, wire_format='named_tensors', **kwargs",
    "verl.workers.rollout.base:get_rollout_class": "rollout_name, mode='async'",
    "verl.workers.rollout.utils:ensure_async_iterator": "iterable",
    # our replica: what the LLMServerManager and the checkpoint engine call
    "verl.workers.rollout.replica:RolloutReplica.__init__": (
        "self, replica_rank, config, model_config, gpus_per_node=8, is_reward_model=False, is_teacher_model=False, "
        "name_suffix=''"
    ),
    "verl.workers.rollout.replica:RolloutReplica.launch_servers": "self",
    "verl.workers.rollout.replica:RolloutReplica.init_hybrid": "self, worker_group",
    "verl.workers.rollout.replica:RolloutReplica.init_colocated": "self, resource_pool",
    "verl.workers.rollout.replica:RolloutReplica.init_standalone": "self",
    "verl.workers.rollout.replica:RolloutReplica.get_ray_class_with_init_args": "self",
    "verl.workers.rollout.replica:RolloutReplica.wake_up": "self",
    "verl.workers.rollout.replica:RolloutReplica.sleep": "self",
    "verl.workers.rollout.replica:RolloutReplica.abort_all_requests": "self, reject_request=False",
    "verl.workers.rollout.replica:RolloutReplica.resume_generation": "self",
    "verl.workers.rollout.replica:RolloutReplica.clear_kv_cache": "self",
    "verl.workers.rollout.replica:RolloutReplica.release_kv_cache": "self",
    "verl.workers.rollout.replica:RolloutReplica.resume_kv_cache": "self",
    "verl.workers.rollout.replica:RolloutReplica.start_profile": "self, **kwargs",
    "verl.workers.rollout.replica:RolloutReplica.stop_profile": "self",
    "verl.workers.rollout.replica:RolloutReplicaRegistry.register": "name, loader",
    "verl.workers.rollout.replica:get_rollout_replica_class": "rollout, disaggregation_enabled=False",
    "verl.workers.rollout.llm_server:LLMServerClient.generate": (
        "self, request_id, *, prompt_ids, sampling_params, image_data=None, video_data=None, audio_data=None, "
        "mm_processor_kwargs=None, **kwargs"
    ),
    "verl.workers.rollout.llm_server:LLMServerManager.__init__": (
        "self, config, worker_group=None, rollout_resource_pool=None, start_rank=0, load_balancer_cls=None"
    ),
    "verl.workers.rollout.llm_server:LLMServerManager.get_client": "self, client_cls=None, **kwargs",
    # our checkpoint engine
    "verl.checkpoint_engine.base:CheckpointEngineRegistry.register": "backend",
    "verl.checkpoint_engine.base:CheckpointEngine.prepare": "self",
    "verl.checkpoint_engine.base:CheckpointEngine.build_topology": "actor_wg_world_size, rollout_world_size, metadata",
    "verl.checkpoint_engine.base:CheckpointEngine.init_process_group": "self, **kwargs",
    "verl.checkpoint_engine.base:CheckpointEngine.send_weights": "self, weights, global_steps=None",
    "verl.checkpoint_engine.base:CheckpointEngine.receive_weights": "self, global_steps=None",
    "verl.checkpoint_engine.base:CheckpointEngine.finalize": "self",
    # our actor
    "verl.workers.engine.base:EngineRegistry.register": "model_type, backend, device='cuda', vendor=None",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_module": "self",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_fsdp_module": "self, module",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_inputs": "self, micro_batch",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_outputs": (
        "self, output, output_args, micro_batch, logits_processor_func"
    ),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.forward_step": (
        "self, micro_batch, loss_function, forward_only"
    ),
    "verl.workers.engine.fsdp.transformer_impl:logprobs_from_logits": "logits, labels, inplace_backward=True",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.get_per_tensor_param": (
        "self, layered_summon=False, base_sync_done=False, **kwargs"
    ),
    "verl.workers.engine.veomni.transformer_impl:VeOmniEngine.get_per_tensor_param": "self, **kwargs",
    "verl.utils.model:convert_weight_keys": "state_dict, model",
    "verl.workers.engine.veomni.transformer_impl:VeOmniEngine._build_model_optimizer": "self",
    "verl.workers.engine.veomni.transformer_impl:VeOmniEngineWithLMHead.prepare_model_inputs": "self, micro_batch",
    "verl.workers.engine.veomni.transformer_impl:VeOmniEngineWithLMHead.prepare_model_outputs": (
        "self, output, output_args, micro_batch, logits_processor_func"
    ),
    # our manager of agent loops
    "verl.experimental.agent_loop.agent_loop:AgentLoopManager._init_agent_loop_workers": "self",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences": "self, prompts",
    # our reward manager
    "verl.experimental.reward_loop.reward_manager.base:RewardManagerBase.__init__": (
        "self, config, tokenizer, compute_score"
    ),
    "verl.experimental.reward_loop.reward_manager.base:RewardManagerBase.run_single": "self, data",
    "verl.experimental.reward_loop.reward_model:RewardModelManager.__init__": "self, config, resource_pool=None",
    # vx.patch.veomni
    "veomni.ops.kernel_registry:KernelSpec.__init__": (
        "self, name, op_name, variant, factory, hardware, description=''"
    ),
    "veomni.ops.kernel_registry:KernelRegistry.register": "self, spec, force=False",
    "veomni.ops.kernel_registry:HardwareRequirement.__init__": (
        "self, device_type, min_compute_capability=None, max_compute_capability=None"
    ),
    "veomni.ops.dispatch:OpSlot.__init__": "self, op_name, variant",
    "veomni.ops.kernels.moe:apply_veomni_fused_moe_patch": "fused_moe_kernel='triton'",
    "veomni.ops.kernels.cross_entropy:chunk_logprobs_function": (
        "hidden_states, weights, labels, chunk_size=1024, ignore_index=-100, shift_labels=None, temperature=1.0"
    ),
    # what these tests hold verl by
    "verl.utils.distributed:initialize_global_process_group_ray": "timeout_second=None, backend=None",
    "verl.trainer.main_ppo:run_ppo": "config, task_runner_class",
    "verl.trainer.ppo.core_algos:register_policy_loss": "name",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_old_log_prob": "self, batch, metrics",
}
# What a subclass has to write: one more, and ours cannot be made.
ABSTRACT = {
    "verl.workers.rollout.base:BaseRollout": {"resume", "release", "update_weights"},
    "verl.workers.rollout.replica:RolloutReplica": {"launch_servers"},
    "verl.checkpoint_engine.base:CheckpointEngine": {
        "prepare",
        "build_topology",
        "init_process_group",
        "send_weights",
        "receive_weights",
        "finalize",
    },
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead": set(),
    "verl.workers.engine.veomni.transformer_impl:VeOmniEngineWithLMHead": set(),
}
# What has to be there, whatever else is.
NAMES = {
    "verl.workers.rollout.base": ("_ROLLOUT_REGISTRY",),
    "verl.workers.rollout.replica": ("RolloutMode", "TokenOutput"),
    "verl.trainer.ppo.v1.agent_loop_tq": ("AgentLoopManagerTQ",),
    "torch.distributed.fsdp:FSDPModule": ("_get_fsdp_state",),
    "veomni.ops.kernel_registry": ("KERNEL_REGISTRY",),
    "veomni.ops.kernels.cross_entropy": ("install_loss_mapping",),
    "veomni.ops.dispatch:OpSlot": ("bind", "use_non_eager_impl", "is_bound", "bound_kernel"),
}
FIELDS = {
    "verl.workers.rollout.replica:TokenOutput": (
        ("token_ids", "log_probs", "routed_experts", "stop_reason", "num_preempted", "extra_fields")
    ),
    "verl.workers.config:RolloutConfig": (
        "name",
        "prompt_length",
        "response_length",
        "temperature",
        "dtype",
        "max_num_seqs",
        "max_model_len",
        "tensor_model_parallel_size",
        "data_parallel_size",
        "pipeline_model_parallel_size",
        "calculate_log_probs",
        "free_cache_engine",
        "engine_kwargs",
        "full_determinism",
        "seed",
        "do_sample",
        "val_kwargs",
        "logprobs_mode",
        "over_sample_rate",
        "scheduling_policy",
        "quantization_config_file",
        "mtp",
    ),
    "veomni.arguments:OpsImplementationConfig": (
        "attn_implementation",
        "moe_implementation",
        "cross_entropy_loss_implementation",
        "rms_norm_implementation",
        "swiglu_mlp_implementation",
        "rotary_pos_emb_implementation",
        "load_balancing_loss_implementation",
    ),
}
DENSE = {("rms_norm", "standard"), ("rotary_pos_emb", "full"), ("swiglu_mlp", "standard")}
LOSS, EXPERTS = ("cross_entropy_loss", "causal"), ("moe_experts", "standard")
# The slots of VeOmni's generated modules, beside that of a classifier's loss.
SLOTS = {
    "llama": DENSE | {LOSS},
    "qwen2": DENSE | {LOSS},
    "qwen3": DENSE | {LOSS},
    "qwen3_moe": DENSE | {LOSS, EXPERTS, ("load_balancing_loss", "standard")},
    "deepseek_v3": {LOSS, EXPERTS},
}


def found(path: str):
    module, _, name = path.partition(":")
    value = importlib.import_module(module)
    for part in filter(None, name.split(".")):
        value = getattr(value, part)
    return value


def parameters(function) -> str:
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))[1:-1]


def moved(signatures=SIGNATURES, abstract=ABSTRACT, names=NAMES, fields=FIELDS) -> list[str]:
    """One line for each thing that is no longer as it is written above."""
    report = []

    def look(path: str):
        try:
            return found(path)
        except (ImportError, AttributeError) as error:
            report.append(f"{path}: is gone ({error})")

    for path, expected in signatures.items():
        function = look(path)
        if function is not None and parameters(function) != expected:
            report.append(f"{path}: parameters are ({parameters(function)}), were ({expected})")
    for path, expected in abstract.items():
        cls = look(path)
        now = getattr(cls, "__abstractmethods__", frozenset())
        if cls is not None and now != expected:
            report.append(f"{path}: abstract are {sorted(now)}, were {sorted(expected)}")
    for path, expected in names.items():
        for name in expected:
            look(f"{path}.{name}" if ":" in path else f"{path}:{name}")
    for path, expected in fields.items():
        cls = look(path)
        if cls is not None:
            known = getattr(cls, "model_fields", None) or cls.__dataclass_fields__
            report += [f"{path}: has no field {name}" for name in expected if name not in known]
    return report


def test_nothing_has_moved():
    report = moved()
    assert not report, "\n".join(report)


def test_what_moves_is_named():
    base, replica = "verl.workers.rollout.base:BaseRollout", "verl.workers.rollout.replica:RolloutReplica"
    signatures = {f"{base}.update_weights": "self, weights", f"{base}.rewind": "self", "verl.moved:f": ""}
    report = moved(signatures, {replica: {"launch"}}, {"verl": ("nowhere",)}, {f"{replica[:-14]}TokenOutput": ("x",)})
    gone = f"{base}.rewind: is gone", "verl.moved:f: is gone", "verl:nowhere: is gone"
    changed = f"{base}.update_weights: parameters are (", f"{replica}: abstract are ['launch_servers']"
    for line in (*gone, *changed, "verl.workers.rollout.replica:TokenOutput: has no field x"):
        assert any(said.startswith(line) for said in report), (line, report)


@pytest.mark.parametrize("family", SLOTS)
def test_the_slots_of_a_generated_module(family):
    package = Path(importlib.util.find_spec("veomni").submodule_search_locations[0])
    path = package / "models" / "transformers" / family / "generated" / f"patched_modeling_{family}_gpu.py"
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    slots = {tuple(ast.literal_eval(a) for a in c.args) for c in calls if getattr(c.func, "id", "") == "OpSlot"}
    assert slots - {("cross_entropy_loss", "seq_cls")} == SLOTS[family]


# Ours, and what of verl's each stands in for.
OURS = {
    "vexact_engine.verl.adapter:ServerAdapter": "verl.workers.rollout.base:BaseRollout",
    "vexact_engine.verl.replica:Replica": "verl.workers.rollout.replica:RolloutReplica",
    "vexact_engine.verl.checkpoint:Broadcast": "verl.checkpoint_engine.base:CheckpointEngine",
}
# What verl says to a server, wherever it does.
CALLERS = ("verl.workers.rollout.replica", "verl.workers.rollout.llm_server")


def refuses(ours, positional: int, keywords: set[str]) -> str | None:
    """Why a function, a method's self apart, does not take a call with so many arguments and these keywords."""
    try:
        inspect.signature(ours).bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)


def is_async(function) -> bool:
    """Whether its caller awaits it, or iterates asynchronously over what it returns."""
    iterates = hasattr(inspect.signature(function).return_annotation, "__aiter__")
    return iterates or inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


@pytest.mark.parametrize("path", OURS)
def test_ours_take_what_verls_own_take(path):
    ours, base = found(path), found(OURS[path])
    assert issubclass(ours, base) and not ours.__abstractmethods__
    for name, function in inspect.getmembers(base, inspect.isfunction):
        own = getattr(ours, name)
        if (name.startswith("_") and name != "__init__") or own is function:
            continue
        kinds = {p.name: p.kind for p in inspect.signature(function).parameters.values()}
        named = {n for n, kind in kinds.items() if kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)}
        if named <= {"self"} and kinds.keys() - named:
            continue  # **kwargs: what another method of ours has named
        why = refuses(own, 0, named)
        assert why is None, f"{path}.{name}: {why}: verl's own takes {sorted(named)}"
        assert is_async(own) == is_async(function), f"{path}.{name}"


def calls_to_servers() -> dict[tuple[str, int, frozenset[str]], str]:
    """(method, positional arguments, keywords) of each `server.method.remote(...)` in verl -> where it stands."""
    calls = {}
    for module in CALLERS:
        tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
        for node in ast.walk(tree):
            target = node.func if isinstance(node, ast.Call) else None
            method = getattr(target, "value", None)
            to_a_server = getattr(getattr(method, "value", None), "id", None) == "server"
            if to_a_server and getattr(target, "attr", None) == "remote":
                given = frozenset(keyword.arg for keyword in node.keywords if keyword.arg)
                calls[method.attr, len(node.args), given] = f"{module}:{node.lineno}"
    return calls


def test_our_server_takes_every_call_of_verls():
    from vexact_engine.verl.server import Server

    calls = calls_to_servers()
    assert {"generate", "sleep", "abort_all_requests", "resume_kv_cache"} <= {name for name, *_ in calls}
    for (name, positional, keywords), where in calls.items():
        assert inspect.iscoroutinefunction(getattr(Server, name, None)), f"{where}: Server has no {name}"
        why = refuses(getattr(Server, name), positional + 1, set(keywords))
        assert why is None, f"{where}: Server.{name}: {why}"


def test_our_engines_are_in_verls_registry(monkeypatch):
    from verl.workers.engine.base import EngineRegistry

    monkeypatch.setenv("VERL_ENGINE_VENDOR", "vexact")
    actor = importlib.import_module("vexact_engine.verl.actor")
    for backend in ("fsdp2", "veomni"):
        cls = EngineRegistry.get_engine_cls("language_model", backend)
        assert cls.__module__ == actor.__name__ and issubclass(cls, actor.AlignedEngine)
