"""What an engine is made of: a scheduler, and a worker that computes in this process or in stages of a pipeline."""

from dataclasses import replace

from ..config import EngineConfig
from ..core.scheduler import Scheduler
from ..runner import shapes
from ..runner.worker import Worker
from ..weights.draft import Draft
from ..weights.load import Loaded


def complete(config: EngineConfig, loaded: Loaded) -> EngineConfig:
    made_for, wanted = shapes.max_positions(loaded.model, config.longrope), config.max_model_len
    if made_for is not None and wanted is not None and wanted > made_for:
        own = f"{loaded.name}'s own" + (f", with longrope={config.longrope!r}" if config.longrope else "")
        raise ValueError(f"EngineConfig: max_model_len is {wanted}, expected at most {made_for}: {own}")
    return replace(config, max_model_len=wanted if wanted is not None else made_for)


def assemble(
    loaded: Loaded, config, vocab_size: int, has_text: bool, backend, draft: Draft | None, find_stop
) -> tuple[Scheduler, Worker]:
    """In the engine's thread, and without a reference to the engine: it ends when nobody has one."""
    if loaded.origin is None:
        worker = Worker(loaded.model, config, backend, draft)
    else:
        from .pipeline import PipelineWorker  # it needs msgspec

        worker = PipelineWorker(loaded, config, backend, draft)
    try:
        scheduler = Scheduler(
            worker.config,
            eos_token_ids=loaded.eos_token_ids,
            vocab_size=vocab_size,
            find_stop=find_stop if has_text else None,
            longest_first=worker.longest_first,
            chunk=worker.chunk,
            draft_model=worker.draft_model,
            reach=worker.reach,
            graphs=worker.verified,
            follows=worker.follows,
        )
    except BaseException:
        worker.close()
        raise
    return scheduler, worker
