"""Names of tensors that are those of a model but for what a wrapper has put before them, and what to say then."""

from collections.abc import Iterable, Set

# Before a name, or in it -> who puts it there.
WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "module.": "DistributedDataParallel",
    "base_model.model.": "peft",
}
_LORA = (".lora_A.", ".lora_B.", ".lora_embedding_", ".lora_magnitude_vector", ".base_layer.", ".modules_to_save.")


TEXT = "model.language_model."  # before names of the text half of a model with vision
_BESIDE = ("model.visual.", "mtp.")  # before those of its tower, and of heads that predict more tokens


def passed_over(known: Iterable[str]) -> tuple[str, ...]:
    """What names begin with that the text half of a model with vision has no use for, given all that it takes."""
    known = list(known)
    if not any(name.startswith(TEXT) for name in known):
        return ()
    return tuple(beside for beside in _BESIDE if not any(name.startswith(beside) for name in known))


def hint(unknown: Iterable[str], known: Set[str]) -> str:
    """What names that a model does not have are, and what to do: "" where they are none of a wrapper's."""
    unknown = list(unknown)
    if any(part in name for name in unknown for part in _LORA):
        return "names of peft's adapters: merge them first (merge_and_unload()), and give what that returns"
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
