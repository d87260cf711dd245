"""One rank of two that train tiny models with VeOmni: its own parallel state, meta models, FSDP2, expert parallelism.

RANK=0 WORLD_SIZE=2 python -m trainers.veomni_ranks FOLDER CASE... writes FOLDER/CASE/RANK.json: for every check "", or
what was wrong. The sequences and the engine's log-probabilities lie in FOLDER/CASE already (test_veomni.py).
"""

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import vexact_ops as vx
from vexact_ops.patch.veomni import FIELDS
from vexact_ops.testing import assert_bitwise

from . import models
from .models import SIZES, SPECIAL, WITH_VISION

RANKS = 2
TEMPERATURE = 0.7
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUPS = {"n_group": 4, "topk_group": 2, "q_lora_rank": 24}
# family, changes of its configuration, ranks that experts lie on, covered before or after build_parallelize_model, and
# the options that trainer and engine share
CASES = {
    "qwen3": ("qwen3", {}, 1, "before"),
    "qwen3-after": ("qwen3", {"tie_word_embeddings": True}, 1, "after"),
    "llama": ("llama", {"tie_word_embeddings": True}, 1, "before"),
    "qwen2": ("qwen2", {}, 1, "after"),
    "qwen3_moe": ("qwen3_moe", {}, 1, "before"),
    "moonlight": ("deepseek_v3", {}, 1, "before"),
    "gpt_oss": ("gpt_oss", {}, 1, "before"),
    "deepseek_v3": ("deepseek_v3", GROUPS, 1, "after"),
    "moonlight-latent": ("deepseek_v3", {}, 1, "before", {"latent": True, "kv_segment": 64}),
    "qwen3_moe-ep2": ("qwen3_moe", {}, 2, "before"),
    "qwen3_moe-ep2-after": ("qwen3_moe", {}, 2, "after"),
    "moonlight-ep2": ("deepseek_v3", {}, 2, "before"),
    "qwen3_5": ("qwen3_5", {}, 1, "before"),
    "qwen3_5_moe": ("qwen3_5_moe", {}, 1, "after"),
}
CHECKS = (
    "log-probabilities of the engine",
    "log-probabilities and entropies of patch.hf",
    "scored like trained",
    "under autocast",
    "loss of patch.hf",
    "gradients of patch.hf",
    "steps repeat",
    "stock kernels differ",
    "undone",
    "a stock model beside it",
)


def has_stock(case: str) -> bool:
    """Whether VeOmni's own eager kernels compute it: experts on one rank, and no gated delta nets."""
    return CASES[case][2] == 1 and CASES[case][0] not in WITH_VISION


def config_of(case: str):
    family, changes, *_ = CASES[case]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return models.config_of(family, **{**SIZES, **SPECIAL.get(family, {}), **ids, **changes})


class Batch:
    """Sequences packed in one row, as VeOmni's collator gives them; of a model of images with places on four axes."""

    def __init__(self, sequences: list[list[int]], axes: int = 1):
        self.axes = axes
        self.lengths = [len(s) for s in sequences]
        self.ids = torch.tensor([[token for sequence in sequences for token in sequence]], device=DEVICE)
        self.cu = torch.tensor([0, *self.lengths], device=DEVICE).cumsum(0).int()
        self.positions = torch.cat([torch.arange(n, device=DEVICE) for n in self.lengths])[None]
        follow = self.ids.roll(-1, 1)
        follow[0, self.cu[1:].long() - 1] = -100
        self.next = follow

    def arguments(self, **more) -> dict:
        longest = max(self.lengths)
        packed = {"cu_seq_lens_q": self.cu, "cu_seq_lens_k": self.cu, "max_length_q": longest, "max_length_k": longest}
        places = self.positions.expand(self.axes, 1, -1) if self.axes > 1 else self.positions
        return {"input_ids": self.ids, "position_ids": places, **packed, "use_cache": False, **more}

    def scored(self, **more) -> dict:
        return self.arguments(
            labels=self.ids, shift_labels=self.next, return_log_probs=True, temperature=TEMPERATURE, **more
        )


class Case:
    def __init__(self, name: str, folder: Path, rank: int):
        self.name, self.rank, self.folder = name, rank, folder / name
        family, _, self.ep, self.when, *options = CASES[name]
        self.stock_attention = "eager" if family == "gpt_oss" else "sdpa"  # which cannot have sinks
        self.options = dict(*options)
        given = json.loads((self.folder / "given.json").read_text())
        axes = 4 if CASES[name][0] in WITH_VISION else 1
        self.batches = [Batch([s["ids"] for s in part], axes) for part in given]
        self.given = given[rank]
        self.batch = self.batches[rank]
        self.results: dict[str, str] = {}

    @contextlib.contextmanager
    def check(self, what: str):
        try:
            yield
            self.results[what] = ""
        except Exception:
            self.results[what] = traceback.format_exc()

    def build(self, fields: dict, cover=None):
        """A model through VeOmni's own functions; cover: what covers it, before or after it is sharded."""
        from veomni.arguments import MixedPrecisionConfig, OpsImplementationConfig
        from veomni.distributed.torch_parallelize import build_parallelize_model
        from veomni.models.auto import build_foundation_model

        path = str(self.folder / "model")
        ops = OpsImplementationConfig(**fields, load_balancing_loss_implementation="eager")
        model = build_foundation_model(path, path, "float32", init_device="meta", ops_implementation=ops)
        if cover and self.when == "before":
            cover(model, **self.options)
        model = build_parallelize_model(
            model,
            init_device="meta",
            weights_path=path,
            mixed_precision=MixedPrecisionConfig(enable=True),
            enable_gradient_checkpointing=True,
            basic_modules=list(model._no_split_modules),
            broadcast_model_weights_from_rank0=True,
        )
        if cover and self.when == "after":
            cover(model, **self.options)
        model.train()
        return model

    def reference(self):
        """The same by transformers' class and patch.hf alone, in bf16: this rank's values, and all gradients."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.folder / "model", dtype=torch.bfloat16).to(DEVICE).train()
        with vx.patch.hf(model, **self.options) as handle:
            values, grads = [], []
            for batch in self.batches:
                model.zero_grad()
                got = handle.logprobs(batch.ids, cu_seqlens=batch.cu, temperature=TEMPERATURE, return_entropy=True)
                objective(*got).backward()
                values.append([v.detach() for v in got])
                grads.append({name: p.grad.float() for name, p in model.named_parameters()})
            with torch.no_grad():
                out = model(**self.batch.arguments(labels=self.batch.ids, shift_labels=self.batch.next))
        mean = {name: sum((g[name] for g in grads[1:]), grads[0][name]) / len(grads) for name in grads[0]}
        return values[self.rank], mean, out.loss

    def steps(self, model, count: int = 2) -> list[torch.Tensor]:
        """Forward, backward, clip, AdamW. -> the parameters of this rank."""
        from veomni.optim import build_optimizer

        optimizer = build_optimizer(model, lr=1e-2, weight_decay=0.01)
        for _ in range(count):
            aux = model(**self.batch.scored()).fused_linear_aux
            objective(aux.log_probs, aux.entropy).backward()
            model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        return [local(p).detach().clone() for p in model.parameters()]

    def run(self) -> None:
        from veomni.distributed.parallel_state import clear_parallel_state, init_parallel_state

        (values, entropies), gradients, loss = self.reference()
        clear_parallel_state()
        init_parallel_state(
            dp_size=RANKS, dp_shard_size=RANKS, dp_mode="fsdp2", extra_parallel_sizes=(self.ep,), name=self.name
        )
        eager = dict.fromkeys(FIELDS, "eager") | {"attn_implementation": self.stock_attention}
        before = None
        if has_stock(self.name):
            model = self.build(eager)
            with torch.no_grad():
                before = model(**self.batch.scored()).fused_linear_aux.log_probs
            with self.check("stock kernels differ"):
                assert not torch.equal(before, values)
        veomni = vx.patch.veomni()
        model = self.build(dict(veomni.fields), veomni.cover)
        with torch.no_grad():
            scored = model(**self.batch.scored()).fused_linear_aux
        with self.check("log-probabilities of the engine"):
            self.compare_with_engine(scored.log_probs[0])
        with self.check("log-probabilities and entropies of patch.hf"):
            assert_bitwise(scored.log_probs, values)
            assert_bitwise(scored.entropy, entropies)
        with self.check("under autocast"), torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
            assert_bitwise(model(**self.batch.scored()).fused_linear_aux.log_probs, values)
        with self.check("loss of patch.hf"), torch.no_grad():
            out = model(**self.batch.arguments(labels=self.batch.ids, shift_labels=self.batch.next))
            assert_bitwise(out.loss, loss)
        trained = model(**self.batch.scored()).fused_linear_aux
        with self.check("scored like trained"):
            assert_bitwise(trained.log_probs.detach(), values)
        objective(trained.log_probs, trained.entropy).backward()
        with self.check("gradients of patch.hf"):
            self.compare_gradients(model, gradients)
        model.zero_grad()
        once = self.steps(model)
        model = self.build(dict(veomni.fields), veomni.cover)
        with self.check("steps repeat"):
            moved = [local(p).detach().clone() for p in model.parameters()]
            again = self.steps(model)
            assert any(not torch.equal(a, b) for a, b in zip(moved, again)), "no weight moved"
            for (name, _), a, b in zip(model.named_parameters(), once, again):
                assert_bitwise(a, b, name)
        with self.check("a stock model beside it"):
            stock_beside(self.folder / "model", self.batch)
        veomni.undo()
        if before is not None:
            with self.check("undone"):
                model = self.build(eager)
                with torch.no_grad():
                    assert_bitwise(model(**self.batch.scored()).fused_linear_aux.log_probs, before)

    def compare_with_engine(self, got: torch.Tensor) -> None:
        compared = 0
        for start, sample in zip(self.batch.cu.tolist(), self.given):
            first = start + sample["prompt"] - 1
            expected = torch.tensor(sample["logprobs"], dtype=torch.float32, device=DEVICE)
            assert_bitwise(got[first : first + len(expected)].clone(), expected)
            compared += len(expected)
        assert compared >= 20, compared

    def compare_gradients(self, model, expected: dict) -> None:
        """FSDP2's mean is that of the ranks' gradients in fp32. Where experts lie on two ranks, an expert sums the rows
        of both, in one accumulator: its own gradient is another sum, but every other one is the same."""
        compared = 0
        for name, parameter in model.named_parameters():
            if name.startswith("model.visual."):  # an encoder that runs, on nothing
                assert parameter.grad is None or not local(parameter.grad).any(), name
                continue
            if self.ep > 1 and ".experts." in name:
                assert local(parameter.grad).isfinite().all(), name
                assert local(parameter.grad).abs().sum() > 0, name
                continue
            of_text = name.replace("model.language_model.", "model.")  # by transformers' class of the text alone
            assert_bitwise(parameter.grad.full_tensor(), expected[of_text], name)
            compared += 1
        assert compared > 10, compared


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def objective(log_probs, entropy):
    """What a policy gradient might be: weights differ from token to token, and there is a bonus for entropy."""
    weight = torch.linspace(-1, 2, log_probs.numel(), device=DEVICE).view(log_probs.shape)
    return (log_probs * weight).sum() + 0.01 * entropy.sum()


def stock_beside(path, batch) -> None:
    """Not patched, in the same process: transformers' own loss, a number and not a tuple; and patched by patch.hf."""
    from transformers import AutoModelForCausalLM
    from transformers.loss.loss_utils import ForCausalLMLoss

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(DEVICE)
    with torch.no_grad():
        out = model(input_ids=batch.ids, labels=batch.ids)
        expected = ForCausalLMLoss(out.logits, batch.ids, model.config.vocab_size)
        assert_bitwise(out.loss, expected)
        with vx.patch.hf(model):
            assert "linear_cross_entropy" in str(model._vexact.report)
            assert torch.is_tensor(model(input_ids=batch.ids, labels=batch.ids).loss)


def main(folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    store = dist.FileStore(f"{folder}/store", RANKS)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[DEVICE]
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS)
    for name in names:
        case = Case(name, Path(folder), rank)
        try:
            case.run()
        except BaseException:
            case.results["ran"] = traceback.format_exc()
            raise
        finally:
            (case.folder / f"{rank}.json").write_text(json.dumps(case.results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
