"""Bits do not change unannounced: outputs and gradients of every op against tests/golden.json."""

import functools
import re

import golden
import pytest
import torch

from vexact_ops._core import native
from vexact_ops._core.digest import version

GPU = torch.cuda.is_available()
# Bits of the CPU class depend neither on the instruction set, nor on threads, nor on the caller's floating-point mode:
# subnormals flushed, rounding upwards, is what the last one has.
VARIANTS = {
    "as-found": {},
    "scalar-3-threads": {"isa": "scalar", "threads": 3},
    "avx2-1-thread": {"isa": "avx2", "threads": 1},
    "avx512-2-threads": {"isa": "avx512", "threads": 2},
    "other-float-mode": {"mode": 0xDFC0, "threads": 2},
}


@functools.cache
def cases(device):
    found = {}
    for room, name, run in golden.cases(device):
        found.setdefault(room, {})[name] = run
    return found


ROOMS = sorted(cases("cpu"))


def compare(room, name, found, expected):
    """found, expected: {case: digest}"""
    again = "python tests/golden.py record" + (" --device cpu" if name == "cpu" else "")
    changed = [case for case in found if found[case] != expected.get(case)]
    assert not changed, (
        f"bits changed for {room} of class {name}: {', '.join(changed)}. If that is intended, record anew ({again}) "
        "and say so in the commit; the fingerprint changes by itself"
    )
    assert found.keys() == expected.keys(), f"cases of {room} that are gone: record anew ({again})"


@pytest.fixture
def variant(request):
    """The extension and torch's threads set up as a variant says, and put back."""
    isa, threads, found = native.cpu_isa(), torch.get_num_threads(), native.float_mode()
    options = VARIANTS[request.param]
    try:
        if "isa" in options:
            try:
                native.cpu_isa(options["isa"])
            except RuntimeError:
                pytest.skip(f"this CPU does not run {options['isa']}")
        torch.set_num_threads(options.get("threads", threads))
        if "mode" in options:
            native.ops().float_mode(options["mode"])
        yield request.param
    finally:
        native.ops().float_mode(found)
        native.cpu_isa(isa)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("variant", VARIANTS, indirect=True)
def test_the_cpu_class_has_its_golden_bits(variant, room):
    expected = golden.stored("cpu")
    assert expected, "tests/golden.json has no class cpu"
    found = {name: golden.digest(run()) for name, run in cases("cpu")[room].items()}
    compare(room, "cpu", found, expected.get(room, {}))


def of_the_gpu():
    name = golden.numerics_class("cuda")
    expected = golden.stored(name)
    if expected is None:
        pytest.skip(f"nothing is recorded for class {name}; on this machine: python tests/golden.py record")
    return name, expected


def compare_recorded(room, name, found, expected):
    """compare, and a skip that names what has no record."""
    recorded = {case: value for case, value in found.items() if case in expected}
    compare(room, name, recorded, expected)
    if len(recorded) < len(found):
        missing = ", ".join(sorted(found.keys() - recorded.keys()))
        pytest.skip(f"not recorded for class {name}: {room}: {missing}; on this machine: python tests/golden.py record")


HEAD = "linear_cross_entropy", "linear_sample", "sampler"
PARTS = {  # that take about as long to compile, each in a process of its own
    **{
        f"attention-{t}": lambda room, name, t=t: room == "attention" and name.startswith(t)
        for t in golden.dtypes("cuda")
    },
    "head": lambda room, name: room in HEAD,
    "the-others": lambda room, name: room not in (*HEAD, "attention"),
}
ATTENTION = [part for part in PARTS if part.startswith("attention-")]


@pytest.mark.long
@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("part", PARTS)
def test_the_gpu_class_has_its_golden_bits(part):
    name, expected = of_the_gpu()
    found, failed = golden.measure("cuda", wanted=PARTS[part], jobs=1)
    assert not failed
    for room in {room for room in expected if any(PARTS[part](room, case) for case in expected[room])}:
        stored = {case: value for case, value in expected[room].items() if PARTS[part](room, case)}
        compare(room, name, {case: value for case, value in found[room].items() if case in stored}, stored)


def test_every_golden_case_is_in_one_part():
    assert all(
        sum(part(room, name) for part in PARTS.values()) == 1 for room in cases("cpu") for name in cases("cpu")[room]
    )


@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("part", [*ATTENTION, *(room for room in ROOMS if room != "attention")])
def test_what_is_admitted_has_the_golden_bits_of_its_class(part):
    name, expected = of_the_gpu()
    room, wanted = part.partition("-")[0], PARTS.get(part, lambda room, case: True)
    expected = {case: value for case, value in expected.get(room, {}).items() if wanted(room, case)}
    some = {case: run for case, run in cases("cuda")[room].items() if wanted(room, case)}
    if room == "attention" and version("flash-attn-4") is not None:  # whose gradients are a class of their own
        some = {case: run for case, run in some.items() if "gradients" not in case}
        expected = {case: value for case, value in expected.items() if case in some}
    compare_recorded(room, name, {case: golden.digest(run()) for case, run in some.items()}, expected)


def test_every_room_and_dtype_is_covered():
    from vexact_ops._core.numerics import numerics

    assert set(ROOMS) == set(numerics("cpu")["rooms"])
    for room in set(ROOMS) - {"sampler"}:
        assert {case.split()[0] for case in cases("cpu")[room]} == {"fp32", "bf16"}


def test_a_changed_bit_is_caught_and_the_message_says_what_to_do():
    x = torch.tensor([1.0, -0.0, torch.nan])
    one = golden.digest([x])
    assert one == golden.digest([x.clone()]) != golden.digest([x.abs()])
    assert one != golden.digest([x[None]]) and one != golden.digest([x.double()])
    other_nan = torch.tensor([0x3F800000, -(1 << 31), 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert golden.digest([other_nan]) == one
    with pytest.raises(AssertionError, match=r"bits changed for mean of class cpu: fp32 N=1\. If .*record anew"):
        compare("mean", "cpu", {"fp32 N=1": one}, {"fp32 N=1": "another"})
    with pytest.raises(AssertionError, match="gone"):
        compare("mean", "cpu", {}, {"fp32 N=1": one})


def test_recording_writes_the_class_and_keeps_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "_cases", lambda device: [("mean", "fp32 x", lambda: [torch.ones(2)])])
    path = tmp_path / "golden.json"
    path.write_text('{"sm90": {"mean": {"x": "1"}}}')
    assert "1 new or changed" in golden.record("cpu", path) and "0 new or changed" in golden.record("cpu", path)
    text = path.read_text()
    assert re.search(r'"cpu": \{\s*"mean": \{\s*"fp32 x": "[0-9a-f]{16}"', text) and '"sm90"' in text


def test_inputs_are_what_they_were():
    """Any change of theirs would look like a change of bits."""
    for dtype, expected in (
        (torch.float32, "1c34c85801b48f8a"),
        (torch.bfloat16, "b9072b112094f3fb"),
        (torch.float16, "6fe5b707321f7f12"),
    ):
        make = golden.Inputs(dtype, "cpu")
        made = [make.values(5, 7), make.tricky(40, 3), make.hard(44, 9), *make.cancelling(3, 11, 4), make.below(99, 20)]
        made += [make.distinct(4, 3, 9), *make.keys([3, 4], 2, 1, 5, 6)]
        assert golden.digest(made) == expected
        assert all(torch.equal(x, x.to(dtype).to(x.dtype)) for x in made if not x.isnan().any())
    x, w = golden.Inputs(torch.float32, "cpu").cancelling(3, 64, 5)
    scale = x.double().abs() @ w.double().abs().t()
    assert ((x.double() @ w.double().t()).abs() <= 1e-12 * scale).all()
