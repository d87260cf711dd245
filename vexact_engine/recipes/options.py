"""What a run may choose, and the model that both of its sides load."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ..config import MAX_DRAFT_TOKENS, EngineConfig, Speculation, _set_int, _set_real, _value_error
from ..weights.fetch import fetch_smollm2
from ..weights.hub import check_name
from ..weights.load import Loaded, as_dtype, load
from ..weights.random import CONFIGS, load_random
from . import tasks

SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct, as the demo fetches it
ADVANTAGES = ("grpo", "rloo")
_COUNTS = (
    "steps",
    "prompts",
    "max_new_tokens",
    "max_prompt_tokens",
    "mini_batches",
    "ranks",
    "replicas",
)
SEQUENCES = 8  # of a forward and backward
_ENGINE = ("num_pages", "max_num_seqs", "max_num_batched_tokens")
# What two runs with the same bits may have otherwise: how long they are, where they lie and run, how the engine is cut.
_FREE = {
    "model",
    "trust_remote_code",
    "device",
    "steps",
    "check_every",
    "check_share",
    "speculation",
    "replicas",
    "page_size",
    "enable_prefix_cache",
    *_ENGINE,
}


@dataclass(frozen=True)
class Options:
    """Of one run. Checked when made: ValueError or TypeError names the field.

    model              "smollm2"; a directory, GGUF file or Hub name; or a name of weights.random.CONFIGS, whose
                       dimensions then get random weights
    layers             random weights: the first so many layers alone
    tokenizer          a path or a name on the Hub in place of the one beside the weights; "none": none
    trust_remote_code  run the Python that a directory brings for its tokenizer
    task, task_options see tasks.make; None: reasoning-gym's chain_sum of two digits, without a tokenizer "evens"
    device, dtype      of trainer and engine; the trainer's masters are fp32 always
    ranks              trainer processes, each on a GPU of its own from `device` on; the engine shares the first one's
    epoch_steps        steps of an epoch: then the questions of the first are asked again, with their seeds; None: none
                       is asked twice
    prompts, samples   questions of a step, and answers to each: a group
    temperature        of rollout and training alike
    advantage          "grpo": (reward - mean of its group) / standard deviation of it; "rloo": reward - mean of the
                       others of its group
    mini_batches       optimizer steps of a step. From the second on the policy has moved: then the clip is at work
    micro_batch        sequences of one forward and backward, on each rank; None: as many as come to some 8,192 tokens,
                       and of a model of up to 1,024 features on a GPU to twice that, but 8 with any_layout and of the
                       stock trainer, which holds their logits
    clip               of the ratio, to [1 - clip, 1 + clip]
    max_grad_norm      gradients are scaled down to it
    any_layout         sum gradients in one tree, so that any power of two of ranks ends with the same parameters. A
                       micro_batch is a leaf of it: mini-batches are whole numbers of these, on every rank as many
    speculation        tokens that are drafted of an answer in a step of the engine, at most: from what was answered to
                       the question an epoch before above all. No bit depends on it; 0: none; None: 8 where questions
                       are asked again (epoch_steps), else none
    check_every        score a part of the answers once more before training, in every so many steps from the first on,
                       and end the run where they have other bytes than the rollout's; 0: never
    check_share        of each rank's answers, which part: see check.py
    replicas           engines that share the answers, all on the first trainer's device
    page_size, num_pages, max_num_seqs, max_num_batched_tokens, enable_prefix_cache
                       of each engine, see EngineConfig; None: room for all answers of a step. They change no bit
    """

    model: str = SMOLLM2
    layers: int | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False
    task: str | None = None
    task_options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    dtype: str = "bfloat16"
    ranks: int = 1
    steps: int = 10
    epoch_steps: int | None = None
    prompts: int = 4
    samples: int = 8
    max_new_tokens: int = 32
    max_prompt_tokens: int = 512
    temperature: float = 1.0
    advantage: str = "grpo"
    mini_batches: int = 1
    micro_batch: int | None = None
    learning_rate: float = 2e-5
    weight_decay: float = 0.0
    clip: float = 0.2
    entropy_coefficient: float = 0.0
    max_grad_norm: float = 1.0
    any_layout: bool = False
    speculation: int | None = None
    check_every: int = 10
    check_share: float = 0.25
    replicas: int = 1
    page_size: int = 16
    num_pages: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_cache: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (*_COUNTS, "replicas", "page_size"):
            _set_int(self, name, 1)
        _set_int(self, "samples", 2)  # an advantage compares the answers to one prompt
        _set_int(self, "seed", 0, 2**64 - 1)
        _set_int(self, "check_every", 0)
        for name in ("layers", "epoch_steps", "micro_batch", *_ENGINE):
            _set_int(self, name, 1, optional=True)
        if self.speculation is not None:
            _set_int(self, "speculation", 0, MAX_DRAFT_TOKENS)
        for name in ("temperature", "learning_rate", "clip", "max_grad_norm"):  # greedy answers would all be the same
            _set_real(self, name, lambda value: value > 0, "a number above 0")
        _set_real(self, "check_share", lambda value: 0 < value <= 1, "a number above 0, up to 1")
        _set_real(self, "weight_decay", lambda value: value >= 0, "a number of 0 or more")
        _set_real(self, "entropy_coefficient", lambda value: True, "a number")
        if self.advantage not in ADVANTAGES:
            raise _value_error(self, "advantage", f"one of {', '.join(ADVANTAGES)}")
        if self.layers is not None and self.model not in CONFIGS:
            raise _value_error(self, "layers", f"a model of {', '.join(CONFIGS)} with it")
        shares = self.mini_batches * self.ranks
        if self.prompts * self.samples % shares:
            raise ValueError(
                f"Options: prompts x samples: got {self.prompts} x {self.samples}, expected a multiple of "
                f"mini_batches x ranks, {shares}: every rank runs as many forwards as every other"
            )

        if self.any_layout:
            if self.ranks & (self.ranks - 1):
                raise _value_error(self, "ranks", "a power of two with any_layout")
            if self.prompts * self.samples % (shares * self._leaf):
                raise ValueError(
                    f"Options: micro_batch: got {self._leaf} with any_layout, expected prompts x samples, "
                    f"{self.prompts} x {self.samples}, to be a multiple of mini_batches x ranks x micro_batch"
                )

    @property
    def _leaf(self) -> int:
        return self.micro_batch or SEQUENCES

    def share(self, samples: Sequence, rank: int) -> list:
        """What a rank trains on of a step's samples, in its order: every ranks-th of them, or of leaves."""
        if not self.any_layout:
            return list(samples[rank :: self.ranks])
        leaves = [samples[i : i + self._leaf] for i in range(0, len(samples), self._leaf)]
        return [sample for leaf in leaves[rank :: self.ranks] for sample in leaf]

    def check_model(self) -> None:
        """Before anything is fetched and any process started for it: the device serves the dtype, and the model is one
        that is known by name, lies here, or is on the Hub. TypeError, FileNotFoundError."""
        as_dtype(self.dtype, self.device)
        if self.model != SMOLLM2 and self.model not in CONFIGS:
            check_name(self.model)

    def load(self, dtype: str, device: torch.device) -> Loaded:
        """The model, on its device; no parameter wants a gradient."""
        chosen = {
            "tokenizer": False if self.tokenizer == "none" else self.tokenizer,
            "trust_remote_code": self.trust_remote_code,
        }
        if self.model in CONFIGS:
            return load_random(self.model, dtype=dtype, device=device, seed=self.seed, layers=self.layers, **chosen)
        path = fetch_smollm2() if self.model == SMOLLM2 else self.model
        return replace(load(path, dtype=dtype, device=device, images=False, **chosen), name=self.model)

    def engine_config(self) -> EngineConfig:
        """Room for all answers of a step at once, up to 256 of them. On a GPU the rest of it is the trainer's."""
        longest = self.max_prompt_tokens + self.max_new_tokens
        rows = self.max_num_seqs or min(self.prompts * self.samples, EngineConfig.max_num_seqs)
        drafted = self.speculation
        if drafted is None:
            drafted = Speculation.max_draft_tokens if self.epoch_steps else 0
        return EngineConfig(
            show_progress=False,
            page_size=self.page_size,
            num_pages=self.num_pages or rows * -(-longest // self.page_size),
            max_num_seqs=rows,
            max_num_batched_tokens=self.max_num_batched_tokens or max(2048, rows),
            enable_prefix_cache=self.enable_prefix_cache,
            record_ahead=False,  # nobody waits for a single answer
            speculation=Speculation(max_draft_tokens=drafted) if drafted else None,
        )

    def to_json(self) -> dict:
        return asdict(self)

    def check_same(self, others: dict[str, Any], whose: str) -> None:
        """ValueError names what changes bits and is another one in `others`, another run's to_json()."""
        free = _FREE | {"ranks"} if self.any_layout else _FREE
        for name, value in self.to_json().items():
            if name not in free and others.get(name) != value:
                raise ValueError(f"recipe: {name}: got {value!r}, but {whose} has {others.get(name)!r}")
        if self.task in tasks.OF_SIZE and _questions(self.to_json()) != _questions(others):
            raise ValueError(
                f"recipe: steps: got {self.steps}, but {whose} has {others['steps']}: which questions {self.task} asks "
                "depends on how many there are"
            )


def _questions(options: dict[str, Any]) -> int:
    """How many are made: those of a run, or of its first epoch."""
    return options["prompts"] * min(options["steps"], options["epoch_steps"] or options["steps"])
