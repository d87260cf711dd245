"""How callers ask for what is generated: by a function call, from asyncio, or token by token.

One form for whatever computes behind it, an engine in this process or several in others. What is here runs in the
callers' threads and only hands over and collects.
"""

import asyncio
import functools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vexact_ops.patch.description import Images

from .classify import Classification, asking, classified
from .config import EngineConfig, SamplingParams
from .media.prompts import read_prompt
from .outputs import Increment, Submission, collected, in_pieces
from .progress import bar, quiet
from .request import Completion, as_requests, start_order
from .text import chat_ids, conversations
from .weights.processors import Processors

Prompt = str | Sequence[int] | Mapping[str, Any]
Listen = Callable[[Increment | BaseException], None]


class Frontend(ABC):
    """`generate`, `agenerate`, `stream` and `chat`, over what a subclass knows of requests.

    A request that is handed over is a *ticket*: it has `completions`, `done` and `result()`; one that is itself at
    fault is a list of completions that say so, and is not handed over.
    """

    config: EngineConfig
    tokenizer: Any
    labels: tuple[str, ...] | None = None
    image_processor: Any
    video_processor: Any
    _text: Any

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raise_on_error: bool = False,
        **template: Any,
    ) -> list[Completion]:
        """Answer a conversation, or several, through the tokenizer's own chat template.

        messages   {"role": ..., "content": ...} each; or a list of such lists
        params, raise_on_error, returns   as of generate
        template   what the model's template takes beside messages (enable_thinking=False, tools=[...], ...), and
                   add_generation_prompt or continue_final_message, as transformers' apply_chat_template has them
        raises     ValueError where there is no template, or where it refuses them; TypeError on options of tokenizers
                   (truncation, ...); and as generate
        """
        several = conversations(messages)
        prompts = [chat_ids(self.tokenizer, conversation, **template) for conversation in several]
        return self.generate(prompts, params, raise_on_error=raise_on_error)

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        raise_on_error: bool = False,
    ) -> list[Completion]:
        """Complete every prompt; returns when all are done.

        prompts         texts or lists of token ids; a text is taken as it stands (apply a chat template first; one that
                        begins with the beginning-of-sequence token gets no second one). With images: {"prompt": text}
                        or {"prompt_token_ids": ids} with "images": [...] (PIL images, or PNG, JPEG, WebP, GIF
                        and BMP files as paths, bytes, "data:" URIs), or
                        with ready "pixel_values" and "image_grid_thw" as the model's processor makes them. Videos:
                        ready "pixel_values_videos" and "video_grid_thw" (and "second_per_grid_ts"). In the prompt an
                        image token stands for each image, or all of its tokens; a video token for each frame that
                        the model has apart, or for each video
        params          one for all, or one for each
        request_ids     names for `abort`, one for each prompt
        raise_on_error  raise RequestError, which holds all completions, where any has finish_reason "error"
        returns         the completions in the order of the prompts, n of each. They begin in that order too, but of
                        the last (2 * max_num_seqs samples) those that may go on for longest begin first, for what runs
                        longest decides when all are done; no bit depends on it. A request that is itself at fault gets
                        finish_reason "error" and says why; the others run on. One that another thread aborts, or that
                        close() meets, has finish_reason "abort" and what it had
        raises          TypeError or ValueError on the call's own arguments, EngineClosed, StepFailed, WeightsTorn; of
                        Replicas ReplicaDied too. On Ctrl-C the requests of this call are aborted, and all can be used
                        again
        """
        done = threading.Event()
        call = Submission(done.set, whole=False)
        each = self._requests(prompts, params, request_ids)
        try:
            made = dict(self._handed_over(each, call))
            if call.tickets:
                self._wait(done, call.tickets)
        except BaseException:
            self._withdraw(call.tickets)
            raise
        return collected([made[index] for index in range(len(each))], raise_on_error)

    async def agenerate(
        self,
        prompts: Sequence[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        raise_on_error: bool = False,
    ) -> list[Completion]:
        """`generate` for asyncio. Cancelling it aborts its requests."""
        arrived = asyncio.Event()
        call = Submission(self._notifier(lambda _: arrived.set(), None), whole=False)
        each = self._requests(prompts, params, request_ids)
        try:
            made = dict(await in_pieces(self._handed_over(each, call, may_wait=False)))
            if call.tickets:
                await arrived.wait()
        finally:
            self._withdraw(call.tickets)
        return collected([made[index] for index in range(len(each))], raise_on_error)

    def classify(
        self,
        prompts: Sequence[Prompt] | str,
        *,
        request_ids: Sequence[str] | None = None,
        raise_on_error: bool = False,
    ) -> list[Classification]:
        """Scores of texts or token ids, of a model that has such (...ForSequenceClassification, `labels`): those that
        the trainer's patched model gives, byte for byte. The prefix cache and all else serve them as they do prompts.

        prompts, request_ids, raise_on_error  as of generate; what is padding at a prompt's end (the model's
                 pad_token_id) is left out, as transformers' class does
        returns  in the order of the prompts
        raises   as generate; ValueError of a model that generates
        """
        done = self.generate(prompts, asking(self), request_ids=request_ids, raise_on_error=raise_on_error)
        return classified(done, self)

    async def aclassify(
        self,
        prompts: Sequence[Prompt] | str,
        *,
        request_ids: Sequence[str] | None = None,
        raise_on_error: bool = False,
    ) -> list[Classification]:
        """`classify` for asyncio. Cancelling it aborts its requests."""
        options = {"request_ids": request_ids, "raise_on_error": raise_on_error}
        return classified(await self.agenerate(prompts, asking(self), **options), self)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[Increment]:
        """The tokens of one request as they come, of all its samples in turn. Leaving the loop early aborts it."""
        news: asyncio.Queue[Increment | BaseException] = asyncio.Queue()
        names = None if request_id is None else [request_id]
        each = self._requests([prompt], params, names)
        made = self._job(*each[0], Submission(lambda: None), self._notifier(news.put_nowait))
        if isinstance(made, list):
            for done in made:
                yield Increment(done.request_id, done.index, [], [], [], "", done)
            return
        left = len(made.completions)
        try:
            self._submit([made])
            while left:
                item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                left -= item.completion is not None
                yield item
        finally:
            self._withdraw([made])

    def _read_prompt(self, prompt: Prompt, images: Images | None) -> tuple[Any, Any]:
        """media.prompts.read_prompt. images: what the model takes of them."""
        return read_prompt(prompt, self._text, images, Processors(self.image_processor, self.video_processor))

    # What a subclass knows

    @abstractmethod
    def check_open(self) -> None:
        """Raises EngineClosed or EngineForked where nothing is taken."""

    @abstractmethod
    def _job(
        self, prompt: Prompt, params: SamplingParams, name: str | None, call: Submission, listen: Listen | None
    ) -> Any:
        """One request of a call, not handed over; or the completions that say what is wrong with it."""

    @abstractmethod
    def _submit(self, tickets: Sequence[Any]) -> None:
        """Hand these over."""

    @abstractmethod
    def _withdraw(self, tickets: Iterable[Any]) -> None:
        """Nobody waits for these any more."""

    @property
    @abstractmethod
    def _call_in(self) -> Callable[[asyncio.AbstractEventLoop, Callable, Any], None]:
        """For the thread that says what has come: `call(item)` in an asyncio loop, with what else there is for it. It
        holds no reference to this: an engine that nobody has any more ends."""

    @property
    @abstractmethod
    def _at_once(self) -> int:
        """Samples that may run at once."""

    @abstractmethod
    def _handed_over(self, each: list[tuple], call: Submission, may_wait: bool = True) -> Iterator[tuple[int, Any]]:
        """`_jobs`, which are handed over while others are made; after the last one the call is whole. may_wait: this
        thread may."""

    @abstractmethod
    def _progress(self, tickets: Sequence[Any]) -> tuple[int, int, int]:
        """Samples that are finished, all of them, and tokens that are there."""

    # Helpers

    def _notifier(self, call: Callable, *item: Any) -> Callable:
        """What has `call` called in the asyncio loop that runs here; called itself in whichever thread."""
        return functools.partial(self._call_in, asyncio.get_running_loop(), call, *item)

    def _requests(self, prompts, params, request_ids) -> list[tuple]:
        self.check_open()
        return as_requests(prompts, params, request_ids)

    def _jobs(self, each: list[tuple], call: Submission) -> Iterator[tuple[int, Any]]:
        """Of each request, as they are to begin, which one it is, and its ticket or what is wrong with it."""
        for index in start_order(each, self._at_once):
            yield index, self._job(*each[index], call, None)

    def _wait(self, done: threading.Event, tickets: list) -> None:
        begin = time.perf_counter()
        with bar(self.config.show_progress) as draw:
            if draw is quiet:
                done.wait()
                return
            while True:
                finished, samples, tokens = self._progress(tickets)
                rate = tokens / max(time.perf_counter() - begin, 1e-9)
                draw("generating", finished, samples, f"{rate:.0f} tokens/s")
                if done.wait(0.1):
                    return
