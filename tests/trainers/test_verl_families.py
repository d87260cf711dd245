"""Every family that the patch covers, under verl's engines: the trainer's log-probabilities are the rollout's, bit for
bit, before a step and behind it; what is refused is known. The README's table is of such runs."""

import pytest
import readme
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from verl.workers import engine as engines

from vexact_ops.patch import COVERED

from .verl_families import OF_VEOMNI, run

FAMILIES = {"fsdp2": [name for name in COVERED if name in CONFIG_MAPPING], "veomni": list(OF_VEOMNI)}


@pytest.fixture(scope="module", params=["fsdp2", "veomni"])
def backend(request):
    if request.param == "veomni" and engines.VeOmniEngineWithLMHead is None:
        import transformers

        pytest.skip(f"VeOmni cannot be imported beside transformers {transformers.__version__}")
    return request.param


@pytest.fixture(scope="module")
def outcomes(backend, tmp_path_factory):
    return run(backend, FAMILIES[backend], tmp_path_factory.mktemp(backend) / "run")


def test_no_log_probability_is_another_float(outcomes):
    differ = [outcome for outcome in outcomes if outcome.before or outcome.after]
    assert not differ
    assert all(outcome.tokens or outcome.refused for outcome in outcomes)


# By verl itself, which finds no layers of BioGPT and CTRL to wrap and asks Fuyu for its key heads, and by a package
# that VeOmni imports. GPT-2's forward takes no vexact_score.
REFUSED = {
    "fsdp2": {
        "biogpt": "transformer layer classes to wrap",
        "ctrl": "transformer layer classes to wrap",
        "fuyu": "num_key_value_heads",
        "gpt2": "vexact_score",
        "gpt-sw3": "vexact_score",
    },
    "veomni": {"seed_oss": "liger_kernel"},
}


def test_what_is_refused_is_known(backend, outcomes):
    refused = {outcome.family: outcome.refused for outcome in outcomes if outcome.refused}
    assert not {name: said for name, said in refused.items() if REFUSED[backend].get(name, said + "?") not in said}


def test_the_records_of_the_readme_are_of_such_runs():
    kept = readme._records("verl_families")
    assert not [record["case"] for record in kept if record["before"] or record["after"]]
    assert {record["case"].split()[0] for record in kept} <= set(COVERED)
