"""EngineConfig and SamplingParams say what is wrong; a request's seeds and prompts are what they claim to be."""

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vexact_engine import Engine
from vexact_engine.config import EngineConfig, SamplingParams
from vexact_engine.request import Request, State, derive_seed

nan, inf = math.nan, math.inf


def test_the_scheduling_modules_import_neither_torch_nor_numpy():
    code = (
        "import sys, vexact_engine.core.scheduler\n"
        "heavy = {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


BAD_VALUES = [
    *((EngineConfig, name, 0) for name in ("page_size", "num_pages", "max_num_seqs", "max_num_batched_tokens")),
    *((EngineConfig, name, -1) for name in ("kv_segment", "pipeline_parallel_size", "tensor_parallel_size")),
    (EngineConfig, "expert_parallel_size", 2),  # and tensor_parallel_size 1
    (EngineConfig, "max_model_len", 1),
    *((EngineConfig, "gpu_memory_utilization", value) for value in (0, -0.5, 1.01, nan, inf)),
    *((SamplingParams, "temperature", value) for value in (nan, inf, -inf, -1, -1e-9, 1e-7, 1e6)),
    *((SamplingParams, "top_p", value) for value in (0, 0.0, -0.1, 1.0001, nan)),
    *((SamplingParams, "min_p", value) for value in (-0.1, 1.1, nan)),
    *((SamplingParams, name, -1) for name in ("num_top_logprobs", "min_new_tokens")),
    (SamplingParams, "top_k", -2),
    (SamplingParams, "min_new_tokens", 129),
    *((SamplingParams, name, value) for name in ("n", "max_new_tokens") for value in (0, -3)),
    *((SamplingParams, "seed", value) for value in (-1, 2**64)),
    (SamplingParams, "stop_token_ids", [5, -1]),
    (SamplingParams, "stop", ""),
    (SamplingParams, "stop", ["a", ""]),
]
BAD_TYPES = [
    *((EngineConfig, "page_size", value) for value in ("16", 16.0, None, True)),
    (EngineConfig, "gpu_memory_utilization", "0.9"),
    (EngineConfig, "enable_prefix_cache", 1),
    (EngineConfig, "enforce_eager", None),
    (EngineConfig, "show_progress", "yes"),
    *((SamplingParams, "temperature", value) for value in ("1", None, True, 1j)),
    *((SamplingParams, "n", value) for value in (1.0, None, False)),
    (SamplingParams, "seed", 1.5),
    *((SamplingParams, "stop_token_ids", value) for value in (7, "7", [1.5], [True], None, {7: 1})),
    *((SamplingParams, "stop", value) for value in (3, ["a", 3], {"a": 1})),
    (SamplingParams, "ignore_eos", 0),
]


@pytest.mark.parametrize(("cls", "name", "value"), BAD_VALUES, ids=lambda v: getattr(v, "__name__", repr(v)))
def test_bad_value(cls, name, value):
    with pytest.raises(ValueError, match=f"^{cls.__name__}: {name} is .*, expected ") as caught:
        cls(**{name: value})
    assert repr(value) in str(caught.value) or name == "stop"


@pytest.mark.parametrize(("cls", "name", "value"), BAD_TYPES, ids=lambda v: getattr(v, "__name__", repr(v)))
def test_bad_type(cls, name, value):
    with pytest.raises(TypeError, match=f"^{cls.__name__}: {name} is .* \\(.*\\), expected "):
        cls(**{name: value})


def test_edges_are_accepted_and_normalised():
    params = SamplingParams(
        temperature=0, top_p=1, min_p=Fraction(1, 2), seed=2**64 - 1, stop="END", stop_token_ids=iter([3, 4])
    )
    assert (params.temperature, params.top_p, params.min_p) == (0.0, 1.0, 0.5)
    assert all(type(v) is float for v in (params.temperature, params.top_p, params.min_p))
    assert (params.stop, params.stop_token_ids) == (("END",), (3, 4))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(temperature=1e-6).temperature == 1e-6
    assert hash(params) == hash(dataclasses.replace(params))
    assert EngineConfig(gpu_memory_utilization=1, max_model_len=2, num_pages=1, page_size=1).num_pages == 1


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().page_size = 1


def test_seeds_are_those_of_splitmix64():
    """The derivation is public: a seed written down today gives the same samples tomorrow.

    SplitMix64 started at s gives mix(s + golden), mix(s + 2 golden), ...; from 0 it begins as published for Java's
    SplittableRandom and the xoshiro authors' splitmix64.c. Our stream starts at mix(seed), and mix(0) is 0.
    """
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [derive_seed(0, i) % 2**64 for i in range(3)] == published
    assert derive_seed(1, 0) != derive_seed(0, 1)


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 10**6), min_size=2, unique=True))
def test_samples_of_a_request_never_share_a_seed(seed, indices):
    seeds = [derive_seed(seed, index) for index in indices]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= s < 2**63 for s in seeds)  # an int64 tensor holds it


def test_neighbouring_seeds_and_samples_do_not_meet():
    everyone = [derive_seed(seed, index) for seed in range(100) for index in range(100)]
    assert len(set(everyone)) == len(everyone)


def test_a_drawn_seed_is_recorded_and_reproduces():
    first, second = Request([1], SamplingParams(n=2)), Request([1], SamplingParams(n=2))
    assert first.seed != second.seed
    again = Request([1], SamplingParams(n=2, seed=first.seed))
    assert [s.seed for s in again.sequences] == [s.seed for s in first.sequences]
    assert again.sequences[1].completion().seed == first.seed


@pytest.mark.parametrize("prompt", ["text", [1.5], [None], 3, [[1]]], ids=repr)
def test_a_prompt_is_token_ids(prompt):
    with pytest.raises(TypeError, match=r"prompt_ids is .*, expected a list of token ids"):
        Request(prompt)


def test_a_prompt_is_not_empty_nor_negative():
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        Request([])
    with pytest.raises(ValueError, match="prompt_ids has -2"):
        Request([1, -2])


def test_a_rejected_sequence_completes_with_its_error():
    request = Request([1, 2], request_id="r")
    request.reject("too long")
    done = request.sequences[0].completion()
    assert request.finished and request.sequences[0].state is State.FINISHED
    assert (done.finish_reason, done.error, done.token_ids, done.request_id) == ("error", "too long", [], "r")


def test_the_names_of_vllm_are_taken_beside_ours():
    params = SamplingParams(max_tokens=7, min_tokens=2, logprobs=3, temperature=0.5)
    assert params == SamplingParams(max_new_tokens=7, min_new_tokens=2, num_top_logprobs=3, temperature=0.5)
    assert (params.max_tokens, params.min_tokens, params.logprobs) == (7, 2, 3) and hash(params) is not None
    assert "max_tokens" not in repr(params) and "max_tokens" not in dataclasses.asdict(params)
    for changes in (
        {"seed": 4},
        {"max_new_tokens": 9},
        {"num_top_logprobs": 0},
        {"max_new_tokens": 7, "max_tokens": 7},
    ):
        again = dataclasses.replace(params, **changes)
        assert all(getattr(again, k) == v for k, v in changes.items()) and again.min_new_tokens == 2
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(ValueError, match="max_tokens is 5, expected max_new_tokens alone, which is 6"):
        SamplingParams(max_new_tokens=6, max_tokens=5)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(TypeError, match="num_top_logprobs is True"):
        SamplingParams(logprobs=True)


def test_a_kv_segment_that_no_kernel_has_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="kv_segment: got 63, expected None or a multiple of 64"):
        Engine.from_pretrained("/nowhere", device="cpu", config=EngineConfig(kv_segment=63))
