"""patch.hf under what training wraps around a model: checkpointing, FSDP2, torch.compile. None of it changes a bit."""

import pytest
import torch
import torch.distributed as dist
import two_ranks
from conftest import devices
from families import alone, family, gradients, pack, rounded, sequences, tiny, world
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from two_ranks import shard, trained, trained_sharded

import vexact_ops as vx
from vexact_ops.patch.batch import positions_of
from vexact_ops.testing import assert_bitwise

KINDS = pytest.mark.parametrize("device,dtype", devices())
FP32 = torch.float32
BF16 = pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))


# gradient checkpointing


@pytest.mark.parametrize("name", [family(n) for n in ("qwen3", "gemma2")])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@KINDS
def test_gradient_checkpointing_has_the_same_bits(name, reentrant, device, dtype, monkeypatch):
    model = tiny(name, dtype, device=device).train()
    ids, cu, _ = pack(sequences(device=device))
    calls = 0
    attend = vx.attention_varlen

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return attend(*args, **kwargs)

    def run():
        model.zero_grad()
        values = handle.logprobs(ids, cu_seqlens=cu)
        values.sum().backward()  # the reentrant form knows no torch.autograd.grad
        return values.detach(), *(p.grad for p in model.parameters())

    with vx.patch.hf(model) as handle:
        expected = run()
        monkeypatch.setattr(vx, "attention_varlen", counted)
        run()
        once, calls = calls, 0
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:  # it passes gradients through inputs that want one
            model.enable_input_require_grads()
        assert_bitwise(run(), expected)
        assert calls == 2 * once, "nothing was computed again"


# derivatives that are not there


@pytest.mark.parametrize("name", [family(n) for n in ("qwen3", "gemma2", "qwen3_moe")])
def test_more_than_a_first_derivative_is_refused(name):
    model = tiny(name).train()
    ids, cu, _ = pack(sequences())
    x = model.get_input_embeddings()(ids).detach().requires_grad_()

    def loss(x):
        return model(inputs_embeds=x, cu_seq_lens_q=cu, use_cache=False).logits.square().mean()

    with vx.patch.hf(model):
        expected = torch.autograd.grad(loss(x), x)
        kept = torch.autograd.grad(loss(x), x, create_graph=True)
        assert_bitwise([kept[0].detach()], list(expected), "under create_graph")
        with pytest.raises(NotImplementedError, match="a gradient of its gradient was asked for"):
            kept[0].square().sum().backward()
        with pytest.raises(NotImplementedError, match="got a dual tensor"), forward_ad.dual_level():
            loss(forward_ad.make_dual(x.detach(), torch.ones_like(x)))
        for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
            with pytest.raises(NotImplementedError, match=r"torch\.func"):
                transform(loss)(x.detach())


# FSDP2


@pytest.mark.parametrize("name", [family(n) for n in ("llama", "gemma2")])
@KINDS
def test_fully_shard_has_the_same_bits(name, device, dtype):
    model = tiny(name, dtype, device=device).train()
    with vx.patch.hf(model) as handle:
        values, expected = trained(model, handle, device)
        with world(device) as mesh:
            shard(model, mesh)
            for _ in range(2):
                got, grads = trained_sharded(model, handle, device)
                assert_bitwise(got, values, "log-probabilities")
                assert_bitwise(list(grads.values()), list(expected.values()), "gradients")


def test_a_hook_on_a_sharded_model_only_looks():
    model, ids = tiny("llama"), sequences((5,))[0]
    with vx.patch.hf(model) as handle, world("cpu") as mesh:
        expected = handle.logprobs(ids)
        shard(model, mesh)
        with model.register_forward_hook(lambda module, args, out: None):
            assert_bitwise(handle.logprobs(ids), expected)
            values, grads = trained_sharded(model, handle, "cpu")
        again = trained_sharded(model, handle, "cpu")
        assert_bitwise([values, *grads.values()], [again[0], *again[1].values()])
        with (
            model.register_forward_hook(lambda module, args, out: getattr(out, "logits", None)),
            pytest.raises(RuntimeError, match="a hook on the whole model asks for logits of what it returns"),
        ):
            handle.logprobs(ids)
        with (
            model.register_forward_hook(lambda module, args, out: tuple(x * 2 for x in out)),
            pytest.raises(RuntimeError, match="a hook on the whole model changes what it returns"),
        ):
            handle.logprobs(ids)


@BF16
def test_fp32_weights_under_mixed_precision_are_the_engine_s_own(device, dtype):
    """A trainer keeps fp32 weights and computes in bf16: it sees what an engine with the rounded weights sees."""
    master = tiny("qwen3", torch.float32, device=device).train()
    model = tiny("qwen3", dtype, device=device).train()  # the same draw, rounded
    with vx.patch.hf(model) as handle:
        values, expected = trained(model, handle, device)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    with vx.patch.hf(master) as handle, world(device) as mesh:
        shard(master, mesh, mp_policy=policy)
        got, grads = trained_sharded(master, handle, device)
    assert_bitwise(got, values, "log-probabilities")
    for name, gradient in grads.items():
        assert gradient.dtype == torch.float32
        assert_bitwise(gradient.to(dtype), expected[name], name)


@BF16
def test_temperatures_are_not_cast_with_the_inputs(device, dtype):
    model, master = (tiny("qwen3", kind, device=device).train() for kind in (dtype, torch.float32))
    ids, cu, _ = pack(sequences(device=device))
    temperatures = torch.linspace(0.51, 1.7, ids.shape[1], device=device)[None]
    assert not torch.equal(temperatures, temperatures.to(dtype).float())
    with vx.patch.hf(model) as handle:
        expected = handle.logprobs(ids, cu_seqlens=cu, temperature=temperatures).detach()
    with vx.patch.hf(master) as handle, world(device) as mesh:
        shard(master, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=True))
        assert_bitwise(handle.logprobs(ids, cu_seqlens=cu, temperature=temperatures).detach(), expected)


@pytest.mark.parametrize("own", [False, True], ids=["root", "own units"])
@BF16
def test_an_output_dtype_rounds_no_log_probabilities(own, device, dtype):
    """As accelerate has FSDP2 wrap a model in mixed precision: what any unit returns is cast to 16 bits."""
    model, master = (tiny("qwen3", kind, device=device, tie_word_embeddings=False).train() for kind in (dtype, FP32))
    with vx.patch.hf(model) as handle:
        values, expected = trained(model, handle, device)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FP32, output_dtype=dtype)
    ids, cu, _ = pack(sequences(device=device))
    with vx.patch.hf(master) as handle, world(device) as mesh:
        if own:
            fully_shard(master.lm_head, mesh=mesh, mp_policy=policy)
        shard(master, mesh, mp_policy=policy)
        got, grads = trained_sharded(master, handle, device)
        assert_bitwise(got, values)
        for name, gradient in grads.items():
            assert_bitwise(gradient.to(dtype), expected[name], name)
        asked = vx.patch.Score(ids[0].roll(-1), kept=True)
        (rounded,) = master(ids, cu_seq_lens_q=cu, use_cache=False, vexact_score=asked)
        assert rounded.dtype == dtype and asked.values[0].dtype == FP32
        assert_bitwise(asked.values[0].detach()[:6], values[0][:6])
        with pytest.raises(ValueError, match=r"FSDP2's output_dtype rounds .* kept=True"):
            master(ids, cu_seq_lens_q=cu, use_cache=False, vexact_score=vx.patch.Score(ids[0].roll(-1)))


@pytest.mark.parametrize("name", [family(n) for n in ("olmo2", "olmo3", "ernie4_5", "flex_olmo")])
@pytest.mark.parametrize("how", ["eager", "checkpointed", "compiled"])
@BF16
def test_fp32_tables_of_angles_are_not_cast_with_the_inputs(name, how, device, dtype):
    """Of these families they are fp32 whatever the model computes in; FSDP2 rounds what it calls a layer with."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 3} if name == "flex_olmo" else {}
    model, master = (tiny(name, kind, device=device, **sizes).train() for kind in (dtype, torch.float32))
    ids, cu, _ = pack(sequences(device=device))
    with vx.patch.hf(model) as handle:
        expected = handle.logprobs(ids, cu_seqlens=cu).detach()
    with vx.patch.hf(master) as handle, world(device) as mesh:
        if how == "checkpointed":
            master.gradient_checkpointing_enable({"use_reentrant": False})
        shard(master, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=True))
        if how == "compiled":
            for layer in master.model.layers:
                layer.compile(backend="aot_eager")
        values = handle.logprobs(ids, cu_seqlens=cu)
        assert_bitwise(values.detach(), expected)
        values.sum().backward()  # checkpointed layers run again
        assert all(p.grad is not None for n, p in master.named_parameters() if "experts" not in n)


@pytest.mark.parametrize("name", [family(n) for n in ("qwen3", "gemma2")])
@BF16
def test_heads_and_embeddings_in_units_of_their_own(name, device, dtype):
    """As verl shards a model whose output layer is its own: the weight is whole inside that layer's call alone."""
    model = tiny(name, dtype, device=device, tie_word_embeddings=False).train()
    ids, cu, _ = pack(sequences(device=device))

    def loss(model):
        return model(ids, cu_seq_lens_q=cu, labels=ids, skip_logits=True, use_cache=False).loss.detach()

    with vx.patch.hf(model) as handle:
        values, expected = trained(model, handle, device)
        logits = model(ids, cu_seq_lens_q=cu, use_cache=False).logits.detach()
        lost = loss(model)
        with world(device) as mesh:
            for unit in (model.lm_head, model.get_input_embeddings()):
                fully_shard(unit, mesh=mesh)
            shard(model, mesh)
            for _ in range(2):
                got, grads = trained_sharded(model, handle, device)
                assert_bitwise(got, values, "log-probabilities")
                assert_bitwise(list(grads.values()), list(expected.values()), "gradients")
            assert_bitwise(model(ids, cu_seq_lens_q=cu, use_cache=False).logits.detach(), logits, "logits")
            assert_bitwise(loss(model), lost, "loss")


@pytest.mark.parametrize("name", [family(n) for n in ("qwen3_moe", "deepseek_v3")])
@BF16
def test_experts_in_units_of_their_own(name, device, dtype):
    """FSDP2 casts what a unit is called with to the dtype of its parameters: DeepSeek's router gives fp32 weights."""
    master, model = (tiny(name, kind, device=device).train() for kind in (torch.float32, dtype))
    rounded(model, dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    with vx.patch.hf(model) as handle:
        values, expected = trained(model, handle, device)
    with vx.patch.hf(master) as handle, world(device) as mesh:
        units = [module for module in master.modules() if hasattr(module, "gate_up_proj") and module._parameters]
        assert units
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        shard(master, mesh, mp_policy=policy)
        got, grads = trained_sharded(master, handle, device)
    assert_bitwise(got, values, "log-probabilities")
    for name, gradient in grads.items():  # of a router that stays in fp32, rounded as FSDP2 has its weight
        assert_bitwise(gradient.to(dtype), expected[name].to(dtype), name)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_ranks(device, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, torch sees {torch.cuda.device_count()}")
    torch.multiprocessing.spawn(two_ranks.one_of_two, (device, str(tmp_path / "store")), nprocs=two_ranks.RANKS)


@pytest.mark.parametrize("name", [family(n) for n in ("llama", "gemma2", "qwen3_moe")])
@pytest.mark.parametrize("own", [False, True], ids=["root", "own units"])
@BF16
def test_a_model_that_is_sharded_already(name, own, device, dtype):
    model = tiny(name, dtype, device=device, tie_word_embeddings=False).train()
    with vx.patch.hf(model) as handle:
        values, expected = trained(model, handle, device)
    with world(device) as mesh:
        for unit in (model.lm_head, model.get_input_embeddings()) if own else ():
            fully_shard(unit, mesh=mesh)
        shard(model, mesh)
        for _ in range(2):
            with vx.patch.hf(model) as handle:
                got, grads = trained_sharded(model, handle, device)
                assert_bitwise(got, values, "log-probabilities")
                assert_bitwise(list(grads.values()), list(expected.values()), "gradients")
                assert {"linear", "linear_logits", "rmsnorm"} <= {row.replacement for row in handle.report()}
            assert all("forward" not in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("name", [family(n) for n in ("llama", "gemma2", "gemma3_text", "qwen3_moe", "deepseek_v3")])
@pytest.mark.parametrize("buffers", ["real", "meta"])
def test_a_model_that_has_no_weights_yet(name, buffers):
    """As ranks that wait for rank 0's build it; the weights come after the patch."""
    model, seqs = tiny(name, torch.bfloat16), sequences((5, 3))
    with vx.patch.hf(model):
        expected = alone(model, seqs)
    with torch.device("meta"):
        empty = type(model)(model.config).bfloat16().eval()
    for kept in vx.patch.kept_in_fp32(empty) & dict(empty.named_parameters()).keys():
        empty.get_parameter(kept).data = empty.get_parameter(kept).data.float()
    if buffers == "real":
        for module in empty.modules():
            own = model.get_submodule(next(p for p, m in empty.named_modules() if m is module))
            module._buffers.update({key: value.clone() for key, value in own._buffers.items() if value is not None})
    with vx.patch.hf(empty):
        empty.to_empty(device="cpu")
        empty.load_state_dict(model.state_dict())
        for key, value in model.named_buffers():
            empty.get_submodule(key.rpartition(".")[0])._buffers[key.rpartition(".")[2]] = value
        assert_bitwise(alone(empty, seqs), expected)


# autocast


@pytest.mark.parametrize("name", [family(n) for n in ("qwen3", "gemma2", "qwen3_moe")])
@BF16
def test_autocast_is_off_inside(name, device, dtype):
    model = tiny(name, dtype, device=device).train()
    with vx.patch.hf(model) as handle:
        values, expected = trained(model, handle, device)
        ids = sequences(device=device)[0][None]
        logits = model(ids, use_cache=False).logits
        for other in {torch.bfloat16, torch.float16} if device == "cuda" else {torch.bfloat16}:
            with torch.autocast(device, other):
                got, grads = trained(model, handle, device)
                assert_bitwise(got, values)
                assert_bitwise(list(grads.values()), list(expected.values()), "gradients")
                assert_bitwise(model(ids, use_cache=False).logits, logits)
                assert_bitwise(model.model(ids, None, use_cache=False)[0], model.model(ids, use_cache=False)[0])
                assert torch.is_autocast_enabled(device)
        assert any("autocast is off inside" in row.note for row in handle.report())
    model = tiny(name, torch.float32, device=device)
    with vx.patch.hf(model) as handle, torch.autocast(device, torch.bfloat16):
        for call in (model, model.model):
            with pytest.raises(RuntimeError, match="autocast: a patched model computes in the dtype of its weights"):
                call(ids)


@BF16
def test_autocast_around_fp32_weights_under_mixed_precision(device, dtype):
    """As verl's trainers run: fp32 masters, FSDP2 casts them, autocast around it all."""
    master, model = (tiny("qwen3", kind, device=device).train() for kind in (torch.float32, dtype))
    with vx.patch.hf(model) as handle:
        values, _ = trained(model, handle, device)
    with vx.patch.hf(master) as handle, world(device) as mesh:
        shard(master, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
        with torch.autocast(device, dtype):
            got, _ = trained_sharded(master, handle, device)
        assert_bitwise(got, values, "log-probabilities")


# torch.compile


COMPILERS = [
    pytest.param(*kind.values, backend, name, id=f"{kind.id}-{backend}-{name}", marks=kind.marks)
    for kind in devices(torch.bfloat16)
    for backend, name in (("aot_eager", "qwen3"), ("inductor", "qwen3"), ("inductor", "gemma2"))
    if backend == "aot_eager" or kind.values[0] == "cuda"  # on a CPU it takes a C++ compiler a minute
]


@pytest.mark.parametrize("device,dtype,backend,name", COMPILERS)
def test_torch_compile_has_the_same_bits(device, dtype, backend, name):
    """Inductor joins elementwise kernels and would leave out the roundings between them: emulate_precision_casts."""
    model = tiny(name, dtype, device=device).train()
    ids, cu, _ = pack(sequences(device=device))
    dy = torch.randn(ids.shape[1], 61, generator=torch.Generator().manual_seed(2)).to(device)
    options = {"emulate_precision_casts": True} if backend == "inductor" else None

    def run(model_or_compiled):
        logits = model_or_compiled(ids, cu_seq_lens_q=cu, max_length_q=11, use_cache=False).logits[0]
        return logits.detach(), *gradients(model, logits, dy).values()

    try:
        with vx.patch.hf(model):
            expected = run(model)
            assert_bitwise(run(torch.compile(model, backend=backend, options=options)), expected)
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("where", ["", "model", "model.layers.1", "model.layers.1.self_attn"])
def test_what_a_module_s_compile_leaves_out_is_refused(where):
    """Before anything is compiled: so it takes no C++ compiler."""
    model, (seq,) = tiny("llama", torch.bfloat16), sequences((5,))
    try:
        with vx.patch.hf(model) as handle, torch.no_grad():
            expected = handle.logprobs(seq)
            module = model.get_submodule(where)
            module.compile(backend="aot_eager")
            assert_bitwise(handle.logprobs(seq), expected)
            module.compile()
            for call in (lambda: handle.logprobs(seq), lambda: model(seq[None], use_cache=False)):
                with pytest.raises(RuntimeError, match=rf"patch.hf: {where or 'the model'}: got compile.*emulate_prec"):
                    call()
            module.compile(backend="eager")
            assert_bitwise(handle.logprobs(seq), expected)
            assert not handle._patch.unrounded()
            module.compile(options={"emulate_precision_casts": True})
            assert not handle._patch.unrounded()
    finally:
        torch._dynamo.reset()


@BF16
def test_compiled_positions_are_right_where_offsets_are_a_view(device, dtype):
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(lambda x, tokens: positions_of(x[2:], tokens), backend=backend, dynamic=False)
    try:
        for lengths in ([7, 1, 11], [0, 3, 0], [4]):
            expected = [[i for length in lengths for i in range(length)]]
            for kind in (torch.int32, torch.int64):
                numbers = torch.tensor([9, 1, 0, *lengths], device=device).cumsum(0).sub(10).to(kind)
                assert positions_of(numbers[2:], sum(lengths)).tolist() == expected
                assert compiled(numbers, sum(lengths)).tolist() == expected
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("begin", [0, 2])
def test_positions_are_not_searched_for_in_a_view(begin):
    """Inductor before torch 2.13 compiles for a GPU a search from the beginning of its memory, and says nothing."""
    searched = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.searchsorted, torch.ops.aten.bucketize):
                searched.append(args[func.overloadpacket is torch.ops.aten.bucketize])
            return func(*args, **kwargs or {})

    numbers = torch.tensor([3, 1, 0, 7, 8, 19][2 - begin :], dtype=torch.int32)
    with Watch():
        positions_of(numbers[begin:], 19)
    for table in searched:
        assert not table._is_view() and table.numel() * table.itemsize == table.untyped_storage().nbytes()


def test_gradients_that_no_rank_adds_up_are_refused():
    """DistributedDataParallel adds up those of its own forwards: logprobs, which it does not see, gave each rank its
    own, and the ranks' weights went apart unseen."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model, (ids, *_) = tiny("llama"), sequences()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with vx.patch.hf(model) as handle:
            expected = handle.logprobs(ids)
            wrapper = nn.parallel.DistributedDataParallel(model)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="logprobs: the model is in DistributedDataParallel"):
                    handle.logprobs(ids)
            with torch.no_grad():
                assert_bitwise(handle.logprobs(ids), expected)
            with wrapper.no_sync():
                assert_bitwise(handle.logprobs(ids), expected)
            asked = vx.patch.Score(ids[1:], torch.arange(len(ids) - 1))
            (values,) = wrapper(input_ids=ids[None], use_cache=False, vexact_score=asked)
            assert_bitwise(values, expected[:-1])
            del wrapper
            assert_bitwise(handle.logprobs(ids), expected)
    finally:
        dist.destroy_process_group()
