"""torch_memory_saver: when it is used and when not, in words; regions; and that the real package is what we call."""

import inspect
import os
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_models import bits, build, check_idle, prompts
from paused import Cuda, Ended, Library, Recorder, stand_in

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.parallel.replicas import Replicas
from vexact_engine.runner import graphs, saver
from vexact_engine.runner.sleep import TAGS, Memory

CONFIG = EngineConfig(num_pages=64, page_size=4, max_num_batched_tokens=16, show_progress=False)
PROMPTS = prompts(3, longest=20)
PARAMS = SamplingParams(max_new_tokens=5, seed=1, ignore_eos=True)
GPU = torch.device("cuda", 0)
PATH = "/site/torch_memory_saver_hook_mode_preload_cu13.abi3.so"


def ask(engine):
    return [bits(c) for c in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture
def usable(monkeypatch):
    """A process of a GPU where all is as it should be, for a test to spoil."""
    calls = SimpleNamespace(**dict.fromkeys(saver._CALLS))
    monkeypatch.setattr(saver, "find_spec", lambda name: "found")
    monkeypatch.setattr(saver, "_version", lambda: "0.0.10")
    monkeypatch.setattr(saver, "_path", lambda: Path(PATH))
    monkeypatch.setattr(saver, "_everything", lambda: calls)
    monkeypatch.setattr(saver, "_starts", lambda preload: True)
    monkeypatch.setenv("LD_PRELOAD", f"/lib/other.so:{PATH}")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert saver.unusable(GPU) == ""
    return calls


# Whether it is used


def test_on_a_cpu_storages_are_emptied_and_the_saver_is_refused():
    with Engine.from_pretrained(build(), config=CONFIG) as engine:
        assert engine.sleep_backend == "storages: it is for GPUs" and engine.config.sleep_backend == "auto"
    with Engine.from_pretrained(build(), config=replace(CONFIG, sleep_backend="storages")) as engine:
        assert engine.sleep_backend == "storages"
    with pytest.raises(vx.BackendUnavailable, match="EngineConfig: sleep_backend: got 'memory_saver': it is for GPUs"):
        Engine.from_pretrained(build(), config=replace(CONFIG, sleep_backend="memory_saver"))


@pytest.mark.parametrize(
    "name,value,message",
    [
        ("find_spec", lambda name: None, "torch_memory_saver is not installed. Run: pip install"),
        ("_version", lambda: "0.0.9", "torch_memory_saver is 0.0.9, expected 0.0.10 or later"),
        ("_everything", lambda: SimpleNamespace(), f"was started without its library. Start it with LD_PRELOAD={PATH}"),
        ("_everything", lambda: SimpleNamespace(tms_pause=None), "its library lacks tms_resume, tms_set_current_tag, "),
        ("_path", lambda: Path("/other.so"), f"LD_PRELOAD names {PATH}, expected /other.so alone"),
    ],
    ids=["absent", "old", "not-preloaded", "other-functions", "other-library"],
)
def test_what_is_missing_is_said(usable, monkeypatch, name, value, message):
    monkeypatch.setattr(saver, name, value)
    found, words = saver.choose("auto", GPU)
    assert found is None and words.startswith("storages: ") and message in words
    with pytest.raises(vx.BackendUnavailable) as caught:
        saver.choose("memory_saver", GPU)
    assert str(caught.value) == f"EngineConfig: sleep_backend: got 'memory_saver': {words.removeprefix('storages: ')}"
    assert saver.choose("storages", GPU) == (None, "storages")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_go_past_it(usable, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    assert saver.choose("auto", GPU)[1].startswith(f"storages: {name} has expandable_segments:True")


def test_no_library_for_this_cuda(usable, monkeypatch):
    def none():
        raise RuntimeError("torch_memory_saver: expected exactly one .so\nfound 0")

    monkeypatch.setattr(saver, "_path", none)
    assert saver.unusable(GPU) == "torch_memory_saver: expected exactly one .so found 0"
    monkeypatch.delenv("LD_PRELOAD")
    assert saver.environment("auto", "cuda") == {}


def test_it_is_tried_before_it_is_trusted(usable, monkeypatch):
    library = Library()
    monkeypatch.setattr(saver, "_library", lambda: library)
    monkeypatch.setattr(saver, "_Cuda", lambda device: Cuda(library))
    found, words = saver.choose("auto", GPU)
    assert words == "memory_saver: torch_memory_saver 0.0.10" and found.library is library
    library.cdll.tms_pause = library.cdll.tms_resume = lambda tag: 0  # loaded, and in front of nothing
    found, words = saver.choose("auto", GPU)
    assert found is None
    assert words == "storages: a region of 32 MiB was paused, and 0 MiB of the device were free for it"


def test_processes_are_started_with_it(usable, monkeypatch):
    assert saver.environment("auto", "cuda") == {}  # they inherit this one's
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    for asked in ("auto", "memory_saver"):
        value = saver.environment(asked, "cuda")["LD_PRELOAD"].split(":")
        assert value[0] == PATH and value[-1] == "/lib/other.so"
    monkeypatch.delenv("LD_PRELOAD")
    assert saver.environment("auto", "cuda")["LD_PRELOAD"].split(":")[0] == PATH
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "_starts", lambda preload: False)
        assert saver.environment("auto", "cuda") == {}
    assert saver.environment("storages", "cuda") == saver.environment("auto", "cpu") == {}
    monkeypatch.setattr(saver, "find_spec", lambda name: None)
    assert saver.environment("memory_saver", "cuda") == {}  # the engine there says why


def test_replicas_and_stages_say_which_they_have(tmp_path):
    build().save_pretrained(tmp_path)
    with Engine.from_pretrained(tmp_path, config=replace(CONFIG, pipeline_parallel_size=2)) as engine:
        assert engine.sleep_backend == "storages: it is for GPUs"
    config = replace(CONFIG, sleep_backend="storages")
    with Replicas.from_pretrained(tmp_path, replicas=1, config=config) as replicas:
        assert replicas.sleep_backend == "storages"


# Regions


def made(room=1 << 30):
    library = Library()
    cuda = Cuda(library, room)
    return library, cuda, saver.Saver(library, cuda)


def test_a_region_is_its_own_memory_alone():
    library, _, made_of = made()
    first, second = made_of.region("a"), made_of.region("a")
    with first.allocating():
        x = torch.ones(100, dtype=torch.uint8)
    other = torch.ones(100, dtype=torch.uint8)
    with second.allocating():
        y = torch.ones(50, dtype=torch.uint8)
    assert (first.nbytes, second.nbytes, library.nbytes()) == (100, 50, 150)
    first.pause()
    first.pause()  # again does nothing
    assert first.paused and not second.paused and library.nbytes() == 50
    assert x.tolist() == [0xAB] * 100 and (other == 1).all() and (y == 1).all()
    first.resume()
    first.resume()
    assert library.nbytes() == 150 and not first.paused
    assert not library.marked and library.tag == "default"


def test_a_region_that_sleeps_is_given_nothing():
    library, _, made_of = made()
    region = made_of.region("weights")
    region.pause()
    with pytest.raises(RuntimeError, match="weights: memory is wanted while the region sleeps"), region.allocating():
        pass
    with pytest.raises(RuntimeError, match="while the region sleeps"):
        region.recording(lambda: None)()
    assert not library.allocated


def test_without_room_it_sleeps_on():
    """The library would end the process."""
    _, cuda, made_of = made(room=48 << 20)
    region = made_of.region("a")
    with region.allocating():
        torch.ones(20 << 20, dtype=torch.uint8)
    region.pause()
    cuda.room = 30 << 20
    with pytest.raises(torch.OutOfMemoryError, match="20 MiB are wanted, 30 MiB of the device are free"):
        region.resume()
    assert region.paused
    cuda.room = 36 << 20
    region.resume()


def test_tensors_move_in_and_keep_what_they_share():
    _, _, made_of = made()
    region, base = made_of.region("weights"), torch.arange(12, dtype=torch.int32)
    tensors = [base.view(3, 4), base[4:8], torch.ones(3, dtype=torch.bfloat16), torch.empty(0, dtype=torch.int32)]
    wanted = [t.clone() for t in tensors]
    assert len(region.misplaced(tensors)) == 2 and region.take_in(tensors)
    assert not region.misplaced(tensors) and not region.take_in(tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, wanted)) and region.nbytes == 48 + 6
    tensors[1].fill_(-1)
    assert tensors[0][1].tolist() == [-1] * 4 and base[4] == 4
    tensors[2].data = torch.zeros(3, dtype=torch.bfloat16)  # somebody puts another one there
    assert [len(group) for group in region.misplaced(tensors)] == [1] and region.take_in(tensors)


def test_the_stand_in_ends_where_the_library_would():
    library = Library()
    library.set_config(tag="t", interesting_region=True, enable_cpu_backup=False)
    library.note(torch.ones(4, dtype=torch.uint8).untyped_storage())
    with pytest.raises(Ended):
        library.cdll.tms_resume(b"t")
    library.cdll.tms_pause(b"t")
    with pytest.raises(Ended):
        library.cdll.tms_pause(b"t")


# An engine with it, whose graphs are kept


@pytest.fixture
def engine(monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(graphs, "recorder", Recorder)
    monkeypatch.setattr(Memory, "held", lambda self: None)
    with Engine.from_pretrained(build(), config=CONFIG) as engine:
        engine._worker._memory._on_host = False
        yield engine
        check_idle(engine)


@pytest.fixture(scope="module")
def expected():
    with Engine.from_pretrained(build(), config=CONFIG) as engine:
        return ask(engine)


def recorded(engine):
    runner = engine._worker._runner
    ladders = runner.graphs.mixed, runner.graphs.decode
    return [id(ladder.fit(size).replay) for ladder in ladders for size in ladder.sizes]


@pytest.mark.parametrize(
    "tags", [TAGS, ("weights", "kv_cache"), ("weights",), ("kv_cache",), ("graphs",)], ids="+".join
)
def test_graphs_outlive_any_sleep(engine, expected, tags):
    assert engine.sleep_backend == "memory_saver: a stand-in" and engine._worker._runner.graphs.captured
    before = recorded(engine)
    places = [p.data_ptr() for p in [*engine.model.parameters(), *engine.model.buffers()]]
    assert before and ask(engine) == expected
    for _ in range(2):
        given = engine.sleep(tags=tags)
        assert given.keys() == set(tags) and all(given.values()) and engine.asleep == tuple(tags)
        assert engine.wake_up() == given
        assert recorded(engine) == before and ask(engine) == expected
    assert [p.data_ptr() for p in [*engine.model.parameters(), *engine.model.buffers()]] == places


def test_weights_that_were_replaced_are_taken_in_and_graphs_made_anew(engine, expected):
    """Where somebody has put others there and the engine sleeps before it has looked."""
    before = recorded(engine)
    for mine, theirs in zip(engine.model.parameters(), build().parameters()):
        mine.data = theirs.data
    assert engine.sleep(tags=["weights"]).keys() == {"graphs", "weights"}
    engine.wake_up(["weights"])
    assert not engine._worker._runner.misplaced()
    assert ask(engine) == expected and recorded(engine) and recorded(engine) != before
    engine.sleep()
    engine.wake_up()
    assert ask(engine) == expected


def test_weights_that_are_replaced_while_caches_and_graphs_sleep(engine, expected):
    ask(engine)
    engine.sleep(tags=["kv_cache", "graphs"])
    for mine, theirs in zip(engine.model.parameters(), build(seed=1).parameters()):
        mine.data = theirs.data
    engine.update_weights(build().state_dict(), numerics=engine.numerics())
    engine.wake_up()
    assert engine._worker._runner.graphs.captured and ask(engine) == expected


def test_a_cache_that_wakes_holds_finite_numbers(engine):
    ask(engine)
    engine.sleep()
    engine.wake_up()
    assert not any(cache.any() for part in engine._worker._runner.buffers.caches for cache in part)


def test_closed_while_it_sleeps(monkeypatch, expected):
    stand_in(monkeypatch)
    monkeypatch.setattr(graphs, "recorder", Recorder)
    monkeypatch.setattr(Memory, "held", lambda self: None)
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        with Engine.from_pretrained(model, config=CONFIG) as engine:
            engine._worker._memory._on_host = False
            assert ask(engine) == expected
            engine.sleep()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# The package itself


@pytest.fixture(scope="module")
def package():
    if find_spec(saver.PACKAGE) is None:
        pytest.skip("torch_memory_saver is not installed")
    return Path(find_spec(saver.PACKAGE).origin).parent


def test_the_package_has_what_is_called(package):
    from torch_memory_saver.binary_wrapper import BinaryWrapper
    from torch_memory_saver.utils import get_binary_path_from_package

    real, ours = (inspect.signature(kind.set_config).parameters for kind in (BinaryWrapper, Library))
    assert [name for name in real if name in ours] == list(ours)
    assert all(p.default is not p.empty for name, p in real.items() if name not in ours)
    assert list(inspect.signature(BinaryWrapper).parameters) == ["path_binary"]
    assert list(inspect.signature(get_binary_path_from_package).parameters) == ["stem"]
    version = metadata.version(saver.PACKAGE)
    assert saver._version() == version and saver._numbers_of(version) >= saver._LEAST


def test_its_libraries_have_the_functions_and_stand_before_cuda_s(package):
    names = [*saver._CALLS, "tms_get_interesting_region", "tms_get_enable_cpu_backup", "cudaMalloc", "cudaFree"]
    for major in (12, 13):
        (path,) = [p for p in package.parent.glob(f"{saver.PACKAGE}_hook_mode_preload_cu{major}.*.so")]
        data = path.read_bytes()
        assert all(b"\0" + name.encode() + b"\0" in data for name in names), (path, names)


def test_what_children_are_told_is_what_the_package_does(package, monkeypatch):
    """Its own configure_subprocess, for a torch of CUDA; then the runtime."""
    from torch_memory_saver import configure_subprocess

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(saver, "_starts", lambda preload: True)
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    with configure_subprocess():
        told = os.environ["LD_PRELOAD"].split(":")
    ours = saver.environment("auto", "cuda")["LD_PRELOAD"].split(":")
    assert (ours[0], ours[-1]) == (told[0], told[-1]) and all("/libcudart.so" in path for path in ours[1:-1])


def test_no_process_is_started_that_could_not_start(package, tmp_path):
    """Where there is no driver, or no CUDA runtime, the loader ends whoever has the library preloaded."""
    assert saver._starts("")
    assert not saver._starts(str(tmp_path / "absent.so"))
    if not torch.cuda.is_available():
        assert not saver._starts(str(next(package.parent.glob("*preload_cu13*.so"))))
        assert saver.environment("memory_saver", "cuda") == {}
