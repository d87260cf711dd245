"""The recipes for verl: each is what verl accepts, and one of them runs, shrunk by its own arguments."""

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest
import readme

import vexact_engine

from .environment import environment
from .models import make_prompts
from .ppo import ZERO, launch, metrics_in, on_this_machine

FOLDER = Path(vexact_engine.__file__).parent / "recipes" / "verl"
READMES = readme.ROOT / "vexact_engine" / "recipes" / "verl" / "README.md", readme.ROOT / "README.md"
RECIPES = ("qwen3_1_7b", "qwen3_30b_a3b", "moonlight")
SHARDINGS, SIZES = ("fsdp2", "veomni"), ("full", "smoke")


def test_all_recipes_are_tested():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*RECIPES, "common"}
    assert {path.stem for path in (FOLDER / "sharding").iterdir()} == set(SHARDINGS)
    assert {path.stem for path in (FOLDER / "size").iterdir()} == set(SIZES)


@pytest.mark.parametrize("recipe,sharding,size", itertools.product(RECIPES, SHARDINGS, SIZES))
def test_a_recipe_is_what_verl_accepts(recipe, sharding, size, models):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from vexact_engine.verl import check_options
    from vexact_engine.verl.server import engine_options

    with initialize_config_dir(str(FOLDER), version_base=None):
        config = compose(recipe, [f"sharding={sharding}", f"size={size}"])
    OmegaConf.resolve(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    ours = config.actor_rollout_ref
    assert ours.actor.strategy == ours.ref.strategy == sharding
    assert ours.model.external_lib == "vexact_engine.verl.actor" and ours.rollout.name == "vexact"
    assert ours.rollout.calculate_log_probs and config.trainer.use_v1
    assert config.algorithm.rollout_correction.bypass_mode and config.trainer.v1.trainer_mode == "sync"
    assert check_options({"fused_kernel_options": ours.model.fused_kernel_options}) == (10, 0.25)
    assert ours.actor.ppo_mini_batch_size == config.data.train_batch_size
    assert config.trainer.n_gpus_per_node % ours.rollout.pipeline_model_parallel_size == 0
    assert (config.trainer.total_training_steps == 3) == (size == "smoke")
    actor = omega_conf_to_dataclass(ours.actor)
    actor.validate(config.trainer.n_gpus_per_node, config.data.train_batch_size)
    engine, _ = engine_options(omega_conf_to_dataclass(ours.rollout))
    assert engine.pipeline_parallel_size == ours.rollout.pipeline_model_parallel_size


# Behind a README's command: a small model and few tokens, on a machine without GPUs and without a network.
SMALL = {
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 512,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "actor_rollout_ref.rollout.max_num_seqs": 16,
    "actor_rollout_ref.rollout.n": 2,
    "data.dataloader_num_workers": 0,
    "data.max_prompt_length": 64,
    "data.max_response_length": 16,
    "data.train_batch_size": 4,
    "reward.num_workers": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.total_training_steps": 3,
}


@pytest.mark.parametrize("file,family", zip(READMES, ("qwen3_moe", "qwen3")))
def test_a_readme_s_command_runs_as_it_stands(file, family, models, tmp_path):
    (line,) = (line for line in readme.commands(file) if line.startswith(("bash ", "python -m verl.")))
    assert "..." not in line
    prompts = make_prompts(tmp_path / "data")
    settings = {
        **SMALL,
        "actor_rollout_ref.model.path": models(family),
        "data.train_files": prompts,
        "data.val_files": prompts,
        **on_this_machine("cpu", 1, tmp_path),
    }
    env = environment(VERL_FILE_LOGGER_PATH=str(tmp_path / "metrics.jsonl"))
    line = line.replace("vexact_engine/recipes/verl/run.sh", str(FOLDER / "run.sh"))  # a wheel has it too
    command = ["bash", "-c", f'exec {line} "$@"', "bash", *(f"{key}={value}" for key, value in settings.items())]
    launch(command, env, tmp_path, timeout=900, forked=False)
    metrics = [step for step in metrics_in(tmp_path) if "actor/grad_norm" in step]  # verl may validate first
    assert len(metrics) == 3
    # The recipe takes the rollout's log-probabilities: verl has nothing to compare, and our actor checks some of them.
    zero = [name for name in ZERO if not line.startswith("bash ") or name.startswith("actor/")]
    for step in metrics:
        assert {name: step[name] for name in zero} == dict.fromkeys(zero, 0.0)
        assert step["actor/grad_norm"] > 1e-3
    checked = [step["actor/rollout_checked"] for step in metrics]
    assert [count > 0 for count in checked] == [line.startswith("bash "), False, False]


def test_what_a_readme_installs_is_what_ci_installs():
    made = (readme.ROOT / ".ci" / "trainers").read_text()
    for file in READMES:
        lines = [line for line in readme.commands(file) if line.startswith("pip install") and "verl" in line]
        assert len(lines) == 2
        assert re.fullmatch(r'pip install -e "\.\[(verl|verl,veomni)\]"', lines[0])
        assert (
            lines[1].replace("install", "install --no-compile -q") in made
            or f"{lines[1].split('install ')[1]} veomni" in made
        )


def test_a_recipe_without_a_name_says_which_there_are():
    done = subprocess.run(["bash", FOLDER / "run.sh"], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("usage: run.sh RECIPE") and all(recipe in done.stderr for recipe in RECIPES)


@pytest.mark.parametrize(
    "how,device,eager,said",
    [
        ("storages: torch_memory_saver is not installed", "cuda", False, True),
        ("storages: it is for GPUs", "cpu", False, False),
        ("storages", "cuda", False, False),  # asked for
        ("storages: torch_memory_saver is not installed", "cuda", True, False),
        ("memory_saver: torch_memory_saver 0.0.10", "cuda", False, False),
    ],
)
def test_what_a_wake_up_costs_is_said_where_it_is_seconds(how, device, eager, said, caplog):
    from vexact_engine.verl.server import say_what_a_wake_up_costs

    say_what_a_wake_up_costs(how, device, eager)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * said
    assert not said or "(torch_memory_saver is not installed). Run: pip install" in caplog.text
