"""Names of tensors that are those of a model but for what a wrapper has put before them, and what to say then."""

from collections.abc import Container, Iterable, Mapping, Set

from vexact_ops.patch.lora import WRAPPED

# Before a name, or in it -> who puts it there.
WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "module.": "DistributedDataParallel",
    WRAPPED: "peft",
}
BASE = ".base_layer"  # in PEFT's names of what lies beneath an adapter
_LORA = (".lora_A.", ".lora_B.", ".lora_embedding_", ".lora_magnitude_vector", ".base_layer.", ".modules_to_save.")


TEXT = "model.language_model."  # before names of the text half of a model with vision
_BESIDE = ("model.visual.", "mtp.")  # before those of its tower, and of heads that predict more tokens


def passed_over(known: Iterable[str]) -> tuple[str, ...]:
    """What names begin with that the text half of a model with vision has no use for, given all that it takes."""
    known = list(known)
    if not any(name.startswith(TEXT) for name in known):
        return ()
    return tuple(beside for beside in _BESIDE if not any(name.startswith(beside) for name in known))


def adapter_name(given: str, known: Container[str]) -> str | None:
    """What a tensor of an adapter's file, which names no adapter, is called in a model with one of PEFT's "default";
    None: nothing of it."""
    name = given.removeprefix(WRAPPED)
    owner, _, leaf = name.rpartition(".")
    return next((each for each in (name, f"{owner}.default.{leaf}") if each in known), None)


def peft_aliases(names: Mapping[str, str], adapters: Set[str]) -> dict[str, str]:
    """Other names of what a model with LoRA has -> its own: PEFT's, and those of the model without it.

    names      of all its tensors, old ones too -> its own
    adapters   those of them that are adapters'; where there is one of them alone, its name may be left out
    """
    single = len({name.split(".")[-2] for name in adapters}) == 1
    found: dict[str, str] = {}
    for name, own in names.items():
        forms = [name]
        owner, _, leaf = name.rpartition(".")
        if own in adapters:
            forms += [f"{owner.rpartition('.')[0]}.{leaf}"] if single else []
        elif owner.endswith(BASE):
            forms.append(f"{owner.removesuffix(BASE)}.{leaf}")
        elif owner.endswith("_proj"):  # verl's, adapted or not
            forms.append(f"{owner}{BASE}.{leaf}")
        found |= {other: own for form in forms for other in (form, WRAPPED + form) if other not in names}
    return found


def hint(unknown: Iterable[str], known: Set[str]) -> str:
    """What names that a model does not have are, and what to do: "" where they are none of a wrapper's."""
    unknown = list(unknown)
    if any(part in name for name in unknown for part in _LORA):
        if any(part in name for name in known for part in _LORA):
            return "names of peft's adapters that the model has none of"
        return (
            "names of peft's adapters: merge them first (merge_and_unload()), and give what that returns; an engine "
            "computes with them where EngineConfig.adapter says so"
        )
    for name in unknown:
        found = {part for part in WRAPPERS if name.startswith(part) or f".{part}" in name}
        bare = name
        for part in found:
            bare = bare.removeprefix(part).replace(f".{part}", ".")
        if found and bare in known:
            parts = " and ".join(f"{part!r} of {WRAPPERS[part]}" for part in WRAPPERS if part in found)
            return f"names with {parts}: strip that, or give the wrapped model's own"
    for prefix in sorted({name.partition(".")[0] + "." for name in known if "." in name}):
        if any(prefix + name in known for name in unknown):
            return f"names of the model without its head: put {prefix!r} before them"
        if any(name.startswith(prefix) and name.removeprefix(prefix) in known for name in unknown):
            return f"names with {prefix!r} more than once: strip one"
    return ""
