#!/usr/bin/env bash
# verl's GRPO with VeXact's rollout and actor: actor/ppo_kl is 0.0 at every step, and nothing is recomputed for it.
# usage: run.sh RECIPE [OVERRIDE ...]
#   RECIPE          qwen3_1_7b | qwen3_30b_a3b | moonlight
#   sharding=       fsdp2 (default) | veomni
#   size=           full (default) | smoke: three steps of a few short answers on one GPU
# Further overrides are verl's own: data.train_files=... trainer.n_gpus_per_node=... actor_rollout_ref.model.path=...
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
recipe=${1:-}
if [[ -z $recipe || $recipe == common || ! -e $here/$recipe.yaml ]]; then
  sed -n '3,8s/^# //p' "$0" >&2
  exit 2
fi
shift
# Both have to be in the environment of every Ray worker: a cluster that runs already needs them in its runtime_env.
export VERL_ENGINE_VENDOR=vexact
export VERL_USE_EXTERNAL_MODULES=${VERL_USE_EXTERNAL_MODULES:-vexact_engine.verl.register}
exec python3 -m verl.trainer.main_ppo --config-path "$here" --config-name "$recipe" "$@"
