"""A model in PEFT's wrapper with learned prompts (prompt tuning, p-tuning, a prefix): who calls the model itself, and
not the wrapper, computes without them; and through the wrapper a row is no longer where its token is."""

import sys
from typing import TYPE_CHECKING

import torch

from .instances import instances

if TYPE_CHECKING:
    from .state import Patch


def check(patch: "Patch", op: str) -> None:
    """RuntimeError where learned prompts are active. A model does not know its wrapper: that is looked for, which
    takes time, and so only where as many hold the embedding, which the wrapper does, as never did yet."""
    peft = sys.modules.get("peft")
    if peft is None or torch.compiler.is_compiling():
        return
    embedding = patch.base.get_input_embeddings()
    if sys.getrefcount(embedding) in patch.unprompted:
        return
    found = False
    for wrapper in instances(peft.PeftModel):
        if "prompt_encoder" not in wrapper._modules:
            continue
        if all(module is not patch.model for module in wrapper.base_model.modules()):
            continue
        found = True
        if getattr(wrapper.forward, "__self__", wrapper) is wrapper:  # the model's own is there once they are disabled
            raise RuntimeError(
                f"{op}: the model is in a {type(wrapper).__name__} with {wrapper.peft_type.value}, "
                "which puts states of its own before the prompt, and no engine has them: LoRA is what is covered; "
                "without them, call this under the wrapper's disable_adapter()"
            )
    if not found:
        patch.unprompted.add(sys.getrefcount(embedding))
