"""What Prometheus reads. Counts of the engine are read when asked for; those of requests are kept here."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..engine import Engine
from ..request import Completion

_SHORT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Of one server."""

    def __init__(self, engine: Engine):
        self.registry = CollectorRegistry()
        self.registry.register(_OfEngine(engine))  # type: ignore[arg-type]
        own = {"registry": self.registry}
        self.requests = Counter("vexact_requests", "Requests by how they ended", ["endpoint", "outcome"], **own)
        self.in_progress = Gauge("vexact_requests_in_progress", "Requests in the server", **own)
        self.prompt_tokens = Counter("vexact_prompt_tokens", "Tokens of prompts that were answered", **own)
        self.images = Counter("vexact_images", "Images of prompts that were answered", **own)
        self.videos = Counter("vexact_videos", "Videos of prompts that were answered", **own)
        self.generated = Counter("vexact_generated_tokens", "Tokens that were generated", **own)
        self.samples = Counter("vexact_samples", "Samples by why they ended", ["finish_reason"], **own)
        self.first = Histogram(
            "vexact_time_to_first_token_seconds", "From arrival to the first token", buckets=_LONG, **own
        )
        self.between = Histogram("vexact_inter_token_seconds", "Between two tokens of a sample", buckets=_SHORT, **own)
        self.queued = Histogram("vexact_queue_seconds", "From arrival to the first step", buckets=_LONG, **own)
        self.seconds = Histogram("vexact_request_seconds", "From arrival to the end of a sample", buckets=_LONG, **own)

    def note(self, prompt_tokens: int, completions: list[Completion]) -> None:
        """A request that has ended, with what each sample of it says of itself."""
        self.prompt_tokens.inc(prompt_tokens)
        for counter, name in ((self.images, "image_grid_thw"), (self.videos, "video_grid_thw")):
            grids = getattr(completions[0], name) if completions else None
            counter.inc(0 if grids is None else len(grids))
        for done in completions:
            self.generated.inc(len(done.token_ids))
            self.samples.labels(done.finish_reason).inc()
            found = done.metrics
            if found is None:
                continue
            self.seconds.observe(found.finished - found.arrived)
            if found.started is not None:
                self.queued.observe(found.started - found.arrived)
            if found.time_to_first_token is not None:
                self.first.observe(found.time_to_first_token)
            for one, next_one in zip(found.token_times, found.token_times[1:]):
                self.between.observe(next_one - one)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _OfEngine:
    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        load, stats = engine.load(), engine.stats
        used = load.pages_used / max(1, load.pages)  # no pages: the last replica has died
        windows_used = load.window_pages_used / max(1, load.window_pages)
        gauges = {
            "vexact_sequences_running": ("Sequences that are computed", load.running),
            "vexact_sequences_waiting": ("Sequences that wait to be let in", load.waiting),
            "vexact_kv_cache_pages": ("Pages of the KV cache", load.pages),
            "vexact_kv_cache_used_ratio": ("Share of them that running sequences hold", used),
            "vexact_kv_cache_window_pages": (
                "Those of layers with a window, where others have none",
                load.window_pages,
            ),
            "vexact_kv_cache_window_used_ratio": ("Share of them that running sequences hold", windows_used),
            "vexact_engine_paused": ("1 between pause and resume", float(load.paused)),
            "vexact_weight_version": ("Updates of the weights so far", engine.weight_version),
        }
        if (replicas := getattr(engine, "replicas", None)) is not None:
            gauges["vexact_replicas_alive"] = "Replicas that take requests", sum(one.alive for one in replicas)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        counts = {
            "vexact_steps": ("Steps of the engine", stats.steps),
            "vexact_preemptions": ("Sequences that had to give back their pages", stats.preemptions),
            "vexact_prefill_tokens": (
                "Tokens computed in prompts, those of preempted sequences again",
                stats.prefill_tokens,
            ),
            "vexact_decode_tokens": ("Tokens computed one by one", stats.decode_tokens),
            "vexact_prefix_cached_tokens": ("Tokens that the prefix cache had", stats.prefix_tokens),
            "vexact_drafted_tokens": ("Tokens that were drafted and verified", stats.drafted_tokens),
            "vexact_accepted_tokens": ("Drafted tokens that were drawn", stats.accepted_tokens),
        }
        for name, (text, value) in counts.items():
            yield CounterMetricFamily(name, text, value=value)
