"""verl on aligned ops: its rollout (register.py and what it names) and its actor and reference policy (actor.py).

Importing this package touches nothing; check_versions() says what is missing.

| package      | served | known to move                                                                                |
| ------------ | ------ | -------------------------------------------------------------------------------------------- |
| verl         | 0.9.1  | rollout: `_ROLLOUT_REGISTRY` is private and the only way in; `replica_rank`, `name_suffix`,  |
|              |        | `is_teacher_model`, `reject_request`, `release_kv_cache`, `resume_kv_cache` and              |
|              |        | `set_global_steps` are new in 0.9                                                            |
|              |        | actor: `EngineRegistry` with vendors (`_engines` is private), `_build_module` before         |
|              |        | `_build_fsdp_module`, `prepare_model_inputs` and its `input_ids_rmpad_rolled`,               |
|              |        | `temperature_rmpad`, `pad_size`; `get_per_tensor_param`, and `_get_fsdp_state` of torch's    |
|              |        | FSDPModule, which says what a forward casts parameters to                                    |
| veomni       | 0.1.12 | `KernelSpec`, `KERNEL_REGISTRY`, the slots of the generated modeling files                   |
| transformers | >=5.5  | 5.23 breaks `import veomni` 0.1.12: <5.23 beside it; 5.24 keeps routers in fp32, which       |
|              |        | FSDP2 rounds for a forward, and our actor for the rollout                                    |

verl and VeOmni are installed with --no-deps (their bounds exclude each other's and ours); what they need otherwise is
in the extras vexact[verl] and vexact[veomni].
"""

from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from ..extras import pip_line

SERVED = {"verl": "0.9.1", "veomni": "0.1.12"}
_WHERE = "model.fused_kernel_options.vexact"
_OPTIONS = ("kv_segment", "latent_attention", "longrope", "check_every", "check_share", "whole_gradients")
TRANSFORMERS = (5, 5), (5, 23)  # from here on; where VeOmni is, below that


def check_versions(*, veomni: bool = False) -> None:
    """What verl's side of VeXact was made for is installed, VeOmni too where that is asked for.

    raises  RuntimeError naming all that is missing or of another version, and the pip lines that mend it
    """
    wanted = {name: served for name, served in SERVED.items() if veomni or name != "veomni"}
    found = {name: _version(name) for name in (*wanted, "transformers")}
    problems = [
        f"{name}: {'not installed' if found[name] is None else f'got {found[name]}'}, expected {served}"
        for name, served in wanted.items()
        if found[name] is None or found[name].partition("+")[0] != served
    ]
    lines = []
    if problems:
        lines = [pip_line("verl,veomni" if veomni else "verl")]
        lines.append("pip install --no-deps " + " ".join(f"{name}=={served}" for name, served in wanted.items()))
    low, high = TRANSFORMERS
    asked = f"transformers>={low[0]}.{low[1]}" + (f",<{high[0]}.{high[1]}" if veomni else "")
    version = found["transformers"]
    release = tuple(int(part) for part in version.split(".")[:2]) if version else None
    if release is None or release < low or (veomni and release >= high):
        problems.append(f"transformers: {'not installed' if version is None else f'got {version}'}, expected {asked}")
        lines.append(f'pip install "{asked}"')
    if problems:
        raise RuntimeError(f"vexact_engine.verl: {'; '.join(problems)}. Run: {' && '.join(lines)}")


def declared_options(model_config: Any) -> dict[str, Any]:
    """The trainer's kv_segment, latent_attention and longrope, which are part of its numerics: as the rollout's own,
    under `+actor_rollout_ref.model.fused_kernel_options.vexact.kv_segment=...` (or `.latent_attention=true`, or
    `.longrope=short`).

    model_config  verl's HFModelConfig, or the mapping that it is made of
    returns       {"kv_segment": ..., "latent_attention": ..., "longrope": ...}
    raises        ValueError on any other name, or another choice of longrope's; TypeError on the kind of a value
    """
    options, where = _asked(model_config, {"kv_segment": None, "latent_attention": False, "longrope": None}), _WHERE
    if options["kv_segment"] is not None and type(options["kv_segment"]) is not int:
        raise TypeError(f"{where}.kv_segment: got {type(options['kv_segment']).__name__}, expected an int or null")
    if type(options["latent_attention"]) is not bool:
        raise TypeError(f"{where}.latent_attention: got {type(options['latent_attention']).__name__}, expected a bool")
    if options["longrope"] not in (None, "short", "long"):
        raise ValueError(f"{where}.longrope: got {options['longrope']!r}, expected null, short or long")
    return options


def check_options(model_config: Any) -> tuple[int, float]:
    """check_every and check_share, see check.py, which stand beside those.

    raises  ValueError, TypeError, naming it
    """
    every, share = _asked(model_config, {"check_every": 0, "check_share": 0.25}).values()
    if type(every) is not int or every < 0:
        raise ValueError(f"{_WHERE}.check_every: got {every!r}, expected an integer of 0 or more")
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ValueError(f"{_WHERE}.check_share: got {share!r}, expected a number above 0, up to 1")
    return every, float(share)


def wants_whole_gradients(model_config: Any) -> bool:
    """whole_gradients, which stands beside those: under Ulysses the trained weights are those of no Ulysses.

    raises  TypeError
    """
    wanted = _asked(model_config, {"whole_gradients": False})["whole_gradients"]
    if type(wanted) is not bool:
        raise TypeError(f"{_WHERE}.whole_gradients: got {type(wanted).__name__}, expected a bool")
    return wanted


def overridden(model_config: Any, config: Any) -> Iterator[tuple[str, Any, Any]]:
    """What model.override_config asks for and a config has not, parts of it by part: (name, what it has, what was
    asked). How attention is computed is neither's."""
    given = model_config.override_config.get("model_config", model_config.override_config)  # as verl reads it

    def of(given: Mapping, has: Any, before: str) -> Iterator[tuple[str, Any, Any]]:
        for name, wanted in given.items():
            got = has.get(name) if isinstance(has, Mapping) else getattr(has, name, None)
            if isinstance(wanted, Mapping):
                yield from of(wanted, got, f"{before}{name}.")
            elif got != wanted and name != "attn_implementation":
                yield before + name, got, wanted

    return of(given, config, "")


def check_overrides(model_config: Any) -> list[str]:
    """What model.override_config asks for is read by the model's class, as verl gives it that.

    returns  the names that its configuration has not without it, which are read by nobody
    raises   ValueError on what that says elsewhere, where alone it is read: a rope_theta beside rope_parameters
    """
    if not model_config.override_config:
        return []
    from transformers import AutoConfig

    from ..weights.directory import check_once

    check_once("vexact: model.override_config", model_config.hf_config.to_dict())
    path, trusted = model_config.local_hf_config_path, model_config.trust_remote_code
    own = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    return [name for name, *_ in overridden(model_config, own) if not _has(own, name)]


def _has(config: Any, name: str) -> bool:
    *parts, last = name.split(".")
    for part in parts:
        config = getattr(config, part, None)
    return hasattr(config, last)


def _asked(model_config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """These of fused_kernel_options.vexact, or what they are by themselves."""
    given = model_config.get("fused_kernel_options") or {}
    if strange := sorted(set(given) - {"impl_backend", "vexact"}):  # verl's own, and ours
        where = _WHERE.rpartition(".")[0]
        raise ValueError(f"{where}: got {', '.join(map(str, strange))}, expected of impl_backend, vexact")
    asked = given.get("vexact") or {}
    if not isinstance(asked, Mapping):
        raise TypeError(f"{_WHERE}: got {type(asked).__name__}, expected a mapping")
    if unknown := sorted(set(asked) - set(_OPTIONS)):
        raise ValueError(f"{_WHERE}: got {', '.join(unknown)}, expected of {', '.join(_OPTIONS)}")
    return {name: asked.get(name, value) for name, value in options.items()}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
