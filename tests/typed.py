"""Every public name as a user's typed program has it: mypy --strict must accept this file. It is never run."""

from collections.abc import Callable
from typing import assert_type

import torch
from torch import Tensor, nn

import vexact_ops as vx
from vexact_engine import (
    Classification,
    Completion,
    Engine,
    EngineAsleep,
    EngineClosed,
    EngineConfig,
    EngineForked,
    HandoverFailed,
    Increment,
    Load,
    Metrics,
    ModelInUse,
    NodeReceivers,
    PeerLost,
    ReplicaDied,
    ReplicaInfo,
    Replicas,
    RequestError,
    SamplingParams,
    ShardedWeightSender,
    Speculation,
    StageDied,
    StepFailed,
    UpdateIncomplete,
    WeightReceiver,
    WeightSender,
    WeightsMissing,
    WeightsTorn,
)


def ops(x: Tensor, w: Tensor, ids: Tensor, offsets: Tensor) -> None:
    assert_type(vx.linear(x, w, None, out_dtype=torch.float32, backend="cpu"), Tensor)
    assert_type(vx.bmm(x, w), Tensor)
    assert_type(vx.grouped_linear(x, w, offsets), Tensor)
    assert_type(vx.moe_route(x, 2, score="sigmoid", bias=w), tuple[Tensor, Tensor])
    assert_type(vx.fused_moe(x, w, w, x, ids, activation="silu"), Tensor)
    assert_type(vx.rmsnorm(x, w), Tensor)
    assert_type(vx.rmsnorm(x, w, 1e-5, x), tuple[Tensor, Tensor])
    assert_type(vx.rmsnorm(x, w, residual=x), tuple[Tensor, Tensor])
    assert_type(vx.rmsnorm_gated(x, x, w), Tensor)
    assert_type(vx.layer_norm(x), Tensor)
    assert_type(vx.layer_norm(x, w, w, 1e-5, x), tuple[Tensor, Tensor])
    assert_type(vx.layer_norm(x, residual=x), tuple[Tensor, Tensor])
    assert_type(vx.gelu(x, approximate="tanh"), Tensor)
    assert_type(vx.sigmoid_mul(x, x), Tensor)
    assert_type(vx.causal_conv(x, w, cu_seqlens=offsets), Tensor)
    assert_type(vx.causal_conv_paged(x, w, None, x, ids, ids, offsets, activation=None, singles=1), Tensor)
    assert_type(vx.delta_gates(x, x, w, w), tuple[Tensor, Tensor])
    assert_type(vx.gated_delta_varlen(x, x, x, x, x, offsets, scale=1.0), Tensor)
    assert_type(vx.gated_delta_varlen(x, x, x, x, x, offsets, return_final_state=True), tuple[Tensor, Tensor])
    assert_type(vx.gated_delta_paged(x, x, x, x, x, x, x, x, x, ids, ids, offsets, 1, singles=1), Tensor)
    step = ids, ids, offsets, 1
    assert_type(vx.conv_gated_delta_paged(x, w, None, x, x, x, w, w, x, x, x, x, *step, double_beta=True), Tensor)
    assert_type(vx.conv_gated_delta_paged(x, w, None, x, x, x, w, w, x, x, x, x, *step, singles=1), Tensor)
    assert_type(vx.rope(x, x, x, x, interleaved=True), tuple[Tensor, Tensor])
    assert_type(vx.rope_cos_sin(ids, x, scaling=2.0), tuple[Tensor, Tensor])
    assert_type(vx.rope_kv_store(x, x, x, x, x, x, x, ids), Tensor)
    assert_type(vx.linear_silu_mul(x, w, x, activation="silu"), Tensor)
    assert_type(vx.silu_mul(x), Tensor)
    assert_type(vx.silu_mul(x, x, activation="gelu_tanh"), Tensor)
    assert_type(vx.log_softmax(x), Tensor)
    assert_type(vx.mean(x, (0, 1), True), Tensor)
    assert_type(vx.sum(x), Tensor)
    assert_type(vx.linear_logits(x, w, softcap=30.0), Tensor)
    assert_type(vx.linear_logprobs(x, w, ids, temperature=x), Tensor)
    assert_type(vx.linear_logprobs(x, w, ids, return_entropy=True), tuple[Tensor, Tensor])
    assert_type(vx.linear_cross_entropy(x, w, ids, reduction="sum", ignore_index=-1), Tensor)
    assert_type(vx.attention_varlen(x, x, x, offsets, 7, window=3, kv_segment=64), Tensor)
    assert_type(vx.attention_paged(x, x, x, ids, ids, offsets, 1, sinks=x), Tensor)
    vx.kv_cache_store(x, x, x, x, ids)
    assert_type(vx.linear_sample(x, w, 1, ids, top_k=ids, softcap=5.0), tuple[Tensor, Tensor, Tensor])
    assert_type(vx.sample(x, 1, ids, temperature=0.7, top_k=ids, top_p=0.9), tuple[Tensor, Tensor, Tensor])


def about_this_process(x: Tensor, w: Tensor) -> None:
    print(vx.explain(vx.linear, x, w).kernels)
    with vx.must_admit(), vx.without_races():
        seconds: float = vx.admit(torch.nn.Linear(8, 8), rows=[1, 8]).seconds
    print(seconds)
    found: dict[str, object] = vx.numerics("cpu", kv_segment=64)
    differs: dict[str, tuple[object, object]] = vx.numerics_difference(found, found)
    assert_type(vx.same_bits(x, x), bool)
    assert_type(vx.different(x, x), Tensor)
    reasons: dict[str, str] = vx.backends()
    vx.synchronize(vx.cuda_stream().device)
    peers: vx.Peers = vx.Peers(0, 2, torch.device("cuda", 0), lambda mine: [mine, mine], limit=3.0)
    joined: Tensor = peers.gather(torch.ones(2, 4))
    joined = peers.gather(joined, packed=True)
    assert_type(peers.race(rounds=3), dict[int, tuple[float, float]])
    joined = vx.linear_awaited(joined, joined)
    sent: Tensor | vx.Sent = vx.linear_send(joined, joined, None, peers)
    sent = vx.linear_gather_send(sent, joined, None, peers)
    joined = peers.receive(vx.linear_silu_mul_send(joined, joined, None, peers, activation="silu"))
    assert_type(vx.rmsnorm_gather(sent, joined, 1e-6, joined, peers, style="llama"), tuple[Tensor, Tensor])
    landing = peers.landing(1 << 20)
    why: str = vx.fused_moe_send(landing, torch.ones(2, 16, 8), 2, activation="silu")
    joined = vx.fused_moe(joined, joined, joined, joined, joined, between=landing)
    peers.close()
    print(joined, why)
    launch: Callable[[], None] = vx.cuda_graph(lambda: None, pool=torch.cuda.graph_pool_handle())
    launch()
    print([one.chosen for one in vx.tune(launch, lambda: lambda: 0.1, "one step")])
    vx.remember("graphs", "an engine", "cpu", [1, 2, 4])
    sizes: object = vx.recall("graphs", "an engine", torch.device("cpu"))
    print(sizes)
    vx.set_backend(None)
    asked: str | None = vx.current_backend()
    print(asked)
    with vx.use_backend("cpu"):
        print(found, differs, reasons)
    try:
        vx.linear(x, w)
    except vx.BackendUnavailable as error:
        print(error)


def patches(model: nn.Module, ids: Tensor, f: Callable[[Tensor], Tensor]) -> None:
    wide: set[str] = vx.patch.kept_in_fp32(model)
    said: str = vx.patch.untested("5.24.0")
    with vx.patch.hf(model, kv_segment=64) as handle:
        logprobs: Tensor = handle.logprobs(ids, temperature=0.7)
        print(logprobs, handle.report(), wide, said)
    with vx.patch.aten() as stray:
        print(stray.report())
    vx.testing.assert_bitwise(f(ids), f(ids), "twice")
    x, w = vx.testing.cancelling(8, 64, 8, seed=0)
    vx.testing.check_rows(f, x, w, neighbours=(0.0,))


async def engine(path: str, model: nn.Module) -> None:
    config = EngineConfig(page_size=16, num_pages=None, kv_segment=64, speculation=Speculation(max_draft_tokens=4))
    params = SamplingParams(max_new_tokens=8, temperature=0.7, seed=1)
    with Engine.from_pretrained(path, device="cpu", dtype="bfloat16", config=config) as engine:
        scores: list[Classification] = engine.classify(["one", [1, 2, 3]])
        print([one.scores for one in scores], engine.labels)
        answers: list[Completion] = engine.generate(["one", [1, 2, 3]], params)
        assert_type(answers[0].metrics, Metrics | None)
        assert_type(engine.load(), Load)
        text: str | None = answers[0].text
        logprobs: list[float] = answers[0].logprobs
        more: list[Completion] = await engine.agenerate("two", params)
        async for news in engine.stream("three", params):
            assert_type(news, Increment)
        engine.abort("nobody")
        engine.save_answers(path)
        engine.load_answers(path)
        engine.update_weights(model.named_parameters(), numerics=vx.numerics())
        engine.pause("keep")
        engine.resume()
        try:
            engine.generate([], raise_on_error=True)
        except RequestError as error:
            assert_type(error.completions, list[Completion])
        except (EngineAsleep, EngineClosed, EngineForked, ModelInUse, StageDied, StepFailed) as error:
            print(error)
        except (WeightsMissing, WeightsTorn) as error:
            print(error)
        freed: dict[str, int] = engine.sleep(level=1, tags=["weights"])
        print(freed, engine.wake_up(), engine.state, engine.asleep)
        print(text, logprobs, more, engine.weight_version, engine.numerics())


def as_elsewhere(engine: Engine) -> None:
    params = SamplingParams(max_tokens=8, min_tokens=1, logprobs=2)
    answers: list[Completion] = engine.chat([{"role": "user", "content": "hi"}], params, enable_thinking=False)
    print(answers)


async def replicas(path: str, model: nn.Module) -> None:
    params = SamplingParams(max_new_tokens=8, seed=1)
    with Replicas.from_pretrained(path, replicas=2, device="cuda", dtype="bfloat16", max_restarts=1) as engine:
        answers: list[Completion] = engine.generate(["one", [1, 2, 3]], params)
        async for news in engine.stream("three", params):
            assert_type(news, Increment)
        try:
            version: int = engine.update_weights(model.named_parameters(), numerics=engine.numerics())
        except UpdateIncomplete as error:
            print(error.failed)
        except ReplicaDied as error:
            print(error)
        state: list[ReplicaInfo] = engine.replicas
        print(answers, version, state, engine.sleep(2), engine.wake_up(["weights"]), engine.stats, engine.load())


def handover(engine: Engine, model: nn.Module) -> None:
    with WeightReceiver(engine, mode="staged") as receiver, WeightSender("address", numerics=vx.numerics()) as sender:
        try:
            sent: int = sender.send(model.named_parameters())
            taken: int = receiver.receive(timeout=1.0)
        except PeerLost as lost:
            doubt: bool = lost.in_doubt
            print(lost, doubt, sender.send(model.named_parameters(), version=7))
        except HandoverFailed as error:
            print(error)
        print(sent, taken)
    with ShardedWeightSender(None, numerics=vx.numerics(), group=None, timeout=60.0) as ranks:
        print(ranks.send(model.state_dict(), version=8))
    with NodeReceivers(engine, mode="staged", timeout=60.0) as receivers:
        addresses: dict[str, str] = receivers.addresses
        version: int = receivers.receive(timeout=None)
        print(addresses, version)
