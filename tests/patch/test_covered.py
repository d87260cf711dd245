"""The list of covered families is what patch.hf covers: tiny random models of them, packed and alone.

python tests/patch/test_covered.py    tries every decoder of the installed transformers, in ten minutes, and writes it
                                     and why the others are refused
"""

import functools
import inspect
import json
import re
import textwrap
from pathlib import Path

import pytest
import torch
from families import CONFIG_MAPPING, FAMILIES, alone, config_of, family, packed, sequences, tiny
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import vexact_ops as vx
from vexact_ops.patch import COVERED, REFUSED, covered
from vexact_ops.testing import assert_bitwise

# Sizes of mixtures and of latent attention: a configuration takes of them what it knows.
MIXTURE = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 3),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "topk_group", "first_k_dense_replace"), 1),
    "n_group": 2,
}
LATENT = FAMILIES["deepseek_v3"]
KINDS = [{}, MIXTURE, LATENT, {**MIXTURE, **LATENT}]
MOST = 3_000_000  # parameters: a configuration that has more did not take the sizes


def small(name: str):
    """A model of the first tiny configuration of the family that patch.hf takes. Raises what refused the first one that
    could be made."""
    return tiny(name, **changes_of(name))


@functools.cache
def changes_of(name: str) -> dict:
    reason = None
    for changes in KINDS:
        try:
            with torch.device("meta"):
                whole = AutoModelForCausalLM.from_config(config_of(name, **changes))
            if sum(p.numel() for p in whole.parameters()) > MOST:
                continue
            with vx.patch.hf(tiny(name, **changes)):
                return changes
        except Exception as error:
            refused = isinstance(reason, vx.patch.UnsupportedModule)
            reason = reason if refused else error
    raise reason or ValueError(f"{name}: no tiny configuration")


def check(name: str) -> None:
    model, seqs = small(name), sequences((9, 1, 6))
    with vx.patch.hf(model), torch.no_grad():
        assert_bitwise(packed(model, seqs, "positions"), alone(model, seqs))


@pytest.mark.parametrize("name", [family(n) for n in COVERED if n not in FAMILIES])  # those have tests of their own
def test_a_family_of_the_list_is_covered(name):
    check(name)


def test_families_with_tests_of_their_own_are_on_the_list():
    assert set(FAMILIES) <= set(COVERED)
    assert list(COVERED) == sorted(set(COVERED))


def test_as_many_families_are_covered_as_the_documentation_says():
    assert len(COVERED) >= 70
    assert not set(COVERED) & set(REFUSED)


@pytest.mark.parametrize("name", [family(n) for n in ("cpmant", "falcon_h1", "opt", "phimoe")])
def test_a_family_that_is_not_covered_is_on_the_other_list_with_its_reason(name):
    with pytest.raises(ValueError, match=r"patch\.hf") as refusal:
        small(name)
    assert name not in COVERED
    assert REFUSED[name] == reason_of(refusal.value)


def test_the_contract_points_to_the_list():
    assert "vexact_ops.patch.COVERED" in inspect.getdoc(vx.patch.hf)


def reason_of(error: Exception) -> str:
    """What stands in the way first, in a line, without the path of the module."""
    lines = str(error).splitlines() or [repr(error)]
    if isinstance(error, vx.patch.UnsupportedModule):
        said = re.match(r"  .*?\((\w+)\)(?: and \d+ more)?: (.*)", lines[1])
        return f"{said[1]}: {said[2]}"
    if lines[0].startswith("patch.hf: "):
        return lines[0].removeprefix("patch.hf: ")
    return "not tried: the sizes of tests/patch/families.py make no small model of it"


def _entry(name: str, reason: str) -> str:
    line = f'    "{name}": {json.dumps(reason)},\n'
    if len(line) <= 121:
        return line
    parts = textwrap.wrap(reason, 100, drop_whitespace=False)
    return f'    "{name}": (\n' + "".join(f"        {json.dumps(part)}\n" for part in parts) + "    ),\n"


def write() -> None:
    found, refused = [], {}
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            check(name)
            found.append(name)
        except Exception as error:
            refused[name] = reason_of(error)
            print(f"{name}: {refused[name]}", flush=True)  # noqa: T201
    kept = [name for name in COVERED if name not in CONFIG_MAPPING]  # of another version
    path = Path(covered.__file__)
    head = path.read_text().split("COVERED = ")[0]
    names = "".join(f'    "{name}",\n' for name in sorted({*found, *kept}))
    reasons = "".join(_entry(name, reason) for name, reason in refused.items())
    path.write_text(f"{head}COVERED = (\n{names})\nREFUSED = {{\n{reasons}}}\n")


if __name__ == "__main__":
    write()
