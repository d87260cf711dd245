"""benchmarks start --recipe: the first step of `vexact recipe grpo`, from its command on."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import __main__ as bench
from benchmarks import start
from benchmarks.output import Refused


@pytest.mark.process
def test_the_first_step_of_the_recipe(tmp_path):
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes, **heads), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    args = bench.parse(["start", "--device=cpu", "--recipe"])
    args.shape = str(tmp_path / "model")
    first, again = start.run(args)
    for record, what in ((first, "as shipped"), (again, "warm")):
        assert record["case"] == f"recipe grpo, {args.shape} {what}" and record["room"] == "start"
        assert record["ours"] > record["second_s"] >= 0 and record["unit"] == "s"
        assert (record["decisions"], record["compiled"]) == (0, 0)  # a CPU has nothing to verify or compile
        names = "imports", "trainer", "task", "engine", "hand_over", "rollout", "score", "train", "digests"
        assert (*record["parts"],) == names and min(record["parts"].values()) >= 0
        assert 0 < sum(record["parts"].values()) < record["ours"]
    args.caches = str(tmp_path / "kept")
    (tmp_path / "kept/vexact/kernels").mkdir(parents=True)
    (tmp_path / "kept/vexact/kernels/one.so").touch()
    (warm,) = start.run(args)
    assert warm["case"].endswith("warm") and (tmp_path / "kept/vexact/kernels/one.so").exists()
    args.recipe = False
    with pytest.raises(Refused, match=r"--caches: .* expected --recipe"):
        next(start.run(args))
    args.recipe, args.shape = True, str(tmp_path / "nowhere")
    with pytest.raises(RuntimeError, match=r"(?s)start: recipe grpo: exit code [1-9].*nowhere"):
        next(start.run(args))
