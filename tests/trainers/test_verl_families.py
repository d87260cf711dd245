"""Every family that the patch covers, under verl's engines: the trainer's log-probabilities are the rollout's, bit for
bit, before a step and behind it; what is refused is known, and said in the README, whose table is of such a run."""

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


def test_what_is_refused_is_what_the_readme_says(backend, outcomes):
    kept = {r["case"].split()[0]: r["refused"] for r in readme._records("verl_families") if backend in r["case"]}
    assert set(kept) >= {outcome.family for outcome in outcomes}, "python -m trainers.verl_families writes them anew"
    said = {outcome.family: outcome.refused.split(":")[0] for outcome in outcomes if outcome.refused}
    assert said == {name: kept[name].split(":")[0] for name in kept if kept[name] and name in FAMILIES[backend]}
