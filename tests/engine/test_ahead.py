"""What is verified while weights are copied to a GPU. On a CPU, with an `admit` that notes what it is asked."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from directories import save
from engine_models import build

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig
from vexact_engine.runner import ahead
from vexact_engine.weights.load import load

CUDA = torch.device("cuda")
CONFIG = EngineConfig(max_num_seqs=3, max_num_batched_tokens=40, page_size=8, kv_segment=256)


class Admit:
    """In place of vx.admit: waits until it is told to end, as it would between two kinds of calls, or fails."""

    def __init__(self, error=None):
        self.asked, self.error, self.begun = [], error, threading.Event()

    def __call__(self, needs, *, until, **options):
        self.asked.append((needs, options))
        self.begun.set()
        if self.error is not None:
            raise self.error
        end = threading.Event()
        while not until():
            end.wait(0.001)
        return vx.patch.admit.Admitted()


@pytest.fixture
def admit(monkeypatch):
    monkeypatch.setattr(ahead, "_own_stream", lambda device: contextlib.nullcontext())
    found = Admit()
    monkeypatch.setattr(vx, "admit", found)
    return found


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "vexact-verify"]


def test_it_runs_beside_the_block_and_ends_with_it(admit):
    model = build("Qwen3").bfloat16()
    with ahead.verifying(model, CUDA, CONFIG):
        assert admit.begun.wait(60) and threads()
    assert not threads()
    ((needs, options),) = admit.asked
    assert needs == ahead.needs_of(model, joined=True) and options.pop("rows") == [1, 2, 3, 40]
    assert options == {
        "dtype": torch.bfloat16, "device": CUDA, "page_size": 8, "kv_segment": 256, "progress": False, "timed": False,
    }  # fmt: skip


def test_a_model_is_never_patched_by_it(admit):
    """Its own weights are copied at the same time."""
    model = build("Qwen3").half()  # on a CPU, whose kernels know no float16
    with ahead.verifying(model, CUDA, CONFIG):
        assert admit.begun.wait(60)
        assert not any("_vexact" in module.__dict__ for module in model.modules())
    ((needs, options),) = admit.asked
    assert needs == ahead.needs_of(build("Qwen3"), joined=True) and options["dtype"] == torch.float16


def test_what_fails_there_is_left_to_the_start(admit):
    admit.error = torch.OutOfMemoryError("no room")
    with ahead.verifying(build("Qwen3").bfloat16(), CUDA, CONFIG):
        assert admit.begun.wait(60)
    assert not threads()


def test_what_fails_in_the_block_is_raised_and_leaves_no_thread(admit):
    with pytest.raises(KeyError), ahead.verifying(build("Qwen3").bfloat16(), CUDA, CONFIG):
        raise KeyError
    assert not threads()


def test_where_there_is_nothing_to_verify(admit):
    model = build("Qwen3")
    with ahead.verifying(model.bfloat16(), torch.device("cpu"), CONFIG):
        pass
    with vx.use_backend("triton"), ahead.verifying(model, CUDA, CONFIG):
        pass
    with ahead.verifying(model.float(), CUDA, CONFIG):
        pass
    assert not admit.asked


def test_an_engine_asks_for_it_while_its_weights_are_copied(tmp_path, monkeypatch):
    save(tmp_path)
    seen = []

    @contextlib.contextmanager
    def meanwhile(model, device, config=None):
        seen.append((type(model).__name__, device.type, config))
        yield

    load(tmp_path, device="cpu", meanwhile=meanwhile)
    load(build("Qwen3"), meanwhile=meanwhile)  # it is where it is
    monkeypatch.setattr("vexact_engine.engine.verifying", meanwhile)
    Engine.from_pretrained(tmp_path, device="cpu", config=CONFIG).close()
    (name, _, _), _ = seen
    assert [each[1:] for each in seen] == [("cpu", None), ("cpu", CONFIG)] and name.endswith("ForCausalLM")


@pytest.mark.parametrize("fails", [False, True])
def test_attention_is_imported_beside_a_start(monkeypatch, fails):
    """In a thread; what cannot be imported is no fault of the start, and on a CPU there is nothing to import."""
    said = []

    def load(name):
        said.append((name, threading.current_thread().name))
        if fails:
            raise ImportError(name)
        return SimpleNamespace(import_ahead=lambda: said.append(("ahead", threading.current_thread().name)))

    monkeypatch.setattr(ahead.importlib, "import_module", load)
    for device in (torch.device("cpu"), CUDA):
        with ahead.importing(device):
            pass
    with vx.use_backend("triton"), ahead.importing(CUDA):
        pass
    names = ["vexact_ops.attention.cute", *([] if fails else ["ahead"])]
    assert said == [(name, "vexact-import") for name in names]
