"""What is done in a thread of its own: kernels are verified while weights are copied to a GPU, and modules are imported
while an engine starts."""

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator

import torch

import vexact_ops as vx
from vexact_ops.patch.admit import empty_of, needs_of

from ..config import EngineConfig

log = logging.getLogger(__name__)


@contextlib.contextmanager
def verifying(model: torch.nn.Module, device: torch.device, config: EngineConfig) -> Iterator[None]:
    """What an engine of this model would verify at its start, as far as it comes until the block ends.

    What has to be timed is left to the start, where nothing disturbs it; what fails here is met there again.

    model   its config is read before the block begins
    """
    dtype = next(model.parameters()).dtype
    if device.type != "cuda" or vx.current_backend() not in (None, "cuda") or dtype == torch.float32:
        yield
        return
    empty, ended = empty_of(model), threading.Event()

    def verify() -> None:
        rows = [*range(1, min(config.max_num_seqs, config.max_num_batched_tokens) + 1), config.max_num_batched_tokens]
        how = {"dtype": dtype, "device": device, "page_size": config.page_size, "kv_segment": config.kv_segment}
        try:
            needs = needs_of(empty, joined=True)
            with _own_stream(device), vx.must_admit():
                found = vx.admit(needs, rows=rows, **how, progress=False, timed=False, until=ended.is_set)
            log.info("%d kinds of calls verified while weights were copied, in %.1f s", len(found), found.seconds)
        except Exception:
            log.info("nothing more is verified while weights are copied", exc_info=True)

    try:
        with _beside(verify, "verify", ended.set):
            yield
    finally:
        torch.cuda.empty_cache()  # of a stream that is not used again


@contextlib.contextmanager
def importing(device: torch.device) -> Iterator[None]:
    """Beside a start, which the block is: the modules of attention that it would come to, which take seconds to import.
    What cannot be imported is said where it is met."""
    if device.type != "cuda" or vx.current_backend() not in (None, "cuda"):
        yield
        return

    def read() -> None:
        with contextlib.suppress(Exception):
            importlib.import_module("vexact_ops.attention.cute").import_ahead()

    with _beside(read, "import"):
        yield


@contextlib.contextmanager
def _beside(work: Callable[[], None], name: str, end: Callable[[], None] = lambda: None) -> Iterator[None]:
    """`end` is called before the block's end waits for the thread."""
    thread = threading.Thread(target=work, name=f"vexact-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end()
        thread.join()


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
        torch.cuda.current_stream(device).synchronize()
