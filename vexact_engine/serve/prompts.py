"""From what a request asks to the token ids of its prompts: in threads of their own, and checked before and after."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..media.images import MOST_BYTES, TYPES, Pictures, opened_images
from ..media.videos import MOST_BYTES as MOST_OF_VIDEOS
from ..media.videos import TYPES as VIDEO_TYPES
from ..media.videos import opened_videos
from ..weights.processors import NONE, Processors
from . import remote
from .answers import Job
from .errors import APIError
from .lanes import Lane
from .protocol import ChatRequest, ClassifyRequest, CompletionRequest, TokenizeRequest
from .tokens import Chat, Tokens


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """What is wrong with an image or a video is said of its place."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise APIError(400, f"{where}: {error}", param="messages", code="invalid_value") from None


_FETCHING = 16  # requests whose images are fetched at once
_LONG = 32 << 10  # characters: tokenizing more takes long enough to have a thread of its own


class Prompts:
    """Of one server. Long texts have a tokenizer and a thread of their own, so that nobody else waits for them.

    most    tokens that a prompt may have
    images, processors  what the model takes of images (None: none), and what makes patches of pictures and videos
    media_hosts         that they may be fetched from
    most_images         that a prompt may have; None: any number
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        most: int,
        most_samples: int,
        images: Any = None,
        processors: Processors = NONE,
        media_hosts: Collection[str] = (),
        most_images: int | None = None,
    ):
        self.images, self.processors, self.media_hosts = images, processors, media_hosts
        self.most_images = most_images
        self._fetching = ThreadPoolExecutor(_FETCHING, "vexact-serve-fetching")  # whose threads wait, mostly
        self.tokens = Tokens(tokenizer)
        self.vocab_size, self.most, self.most_samples = vocab_size, most, most_samples
        self._short, self._long = Lane("vexact-serve-tokens"), Lane("vexact-serve-long-tokens")
        self._others: Tokens | None = None  # of the long ones

    def close(self) -> None:
        self._short.close()
        self._long.close()
        self._fetching.shutdown(wait=False, cancel_futures=True)

    async def do(self, size: int, function: Callable, *given: Any) -> Any:
        """function(tokens, *given) in a thread; size: characters that it is about."""
        if size <= _LONG:
            return await self._short.do(size, function, self.tokens, *given)
        if self._others is None:
            self._others = await self._short.do(0, self.tokens.another)
        return await self._long.do(size, function, self._others, *given)

    async def of_input(self, asked: ClassifyRequest) -> list[Job]:
        jobs = await self._texts(asked.input, "input", asked.add_special_tokens is not False, 1)
        return [job for job, _ in jobs]

    async def of_text(self, asked: CompletionRequest) -> list[Job]:
        n = 1 if asked.n is None else asked.n
        found = await self._texts(asked.prompt, "prompt", asked.add_special_tokens is not False, n)
        for job, one in found:
            if asked.echo:
                job.echo = one if isinstance(one, str) else await self.do(len(one), Tokens.decode, one)
        return [job for job, _ in found]

    async def _texts(self, prompt: Any, param: str, special: bool, n: int) -> list[tuple[Job, str | list[int]]]:
        """With each what it was asked as."""
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise APIError(400, f"{param}: expected a text, a list of token ids, or several of either", param=param)
        self.check_samples(len(prompt), n, param)
        jobs = []
        for one in prompt:
            if isinstance(one, str):
                ids = await self.do(len(one), Tokens.encode, one, special, self.most)
            elif isinstance(one, list):
                ids = self.check_ids(one, param)
            else:
                raise APIError(400, f"{param}: expected texts or lists of token ids in the list", param=param)
            jobs.append((self._checked(Job(ids), param), one))
        return jobs

    async def of_chat(self, asked: ChatRequest) -> Job:
        if asked.prompt_token_ids is None:
            ids, pictures = await self._chat(asked)
            return self._checked(Job(ids, pictures=pictures), "messages")
        name = "prompt_token_ids"
        if asked.messages:
            raise APIError(400, f"{name}: they are the whole prompt, expected no messages with them", param=name)
        _check_untemplated(asked, name)
        if asked.add_special_tokens:
            raise APIError(400, f"add_special_tokens: expected none with {name}", param="add_special_tokens")
        return self._checked(Job(self.check_ids(asked.prompt_token_ids, name)), name)

    async def of_tokenize(self, asked: TokenizeRequest) -> tuple[list[int], list[str] | None]:
        """Ids, and what they are called where that is wanted."""
        if (asked.prompt is None) == (asked.messages is None):
            raise APIError(400, "prompt: expected either prompt or messages", param="prompt")
        if asked.messages is not None:
            ids, _ = await self._chat(asked)
        else:
            _check_untemplated(asked, "prompt")
            special = asked.add_special_tokens is not False
            ids = await self.do(len(asked.prompt), Tokens.encode, asked.prompt, special, None)
        return ids, await self.do(len(ids), Tokens.names, ids) if asked.return_token_strs else None

    async def _chat(self, asked: ChatRequest | TokenizeRequest) -> tuple[list[int], Pictures | None]:
        go_on = bool(asked.continue_final_message)
        chat = Chat(
            asked.messages or [],
            generate=not go_on if asked.add_generation_prompt is None else asked.add_generation_prompt,
            go_on=go_on,
            special=bool(asked.add_special_tokens),
            tools=asked.tools or None,
            effort=asked.reasoning_effort,
            options=asked.chat_template_kwargs or {},
            images=None if self.images is None else [],
            videos=None if self.images is None or self.images.video is None else [],
            media_hosts=self.media_hosts,
            most_images=self.most_images,
            described=self.images,
        )
        most = None if isinstance(asked, TokenizeRequest) else self.most
        ids = await self.do(chat.size, Tokens.chat, chat, most)
        if not chat.images and not chat.videos:
            return ids, None
        given: list[list[tuple[str, str | bytes]]] = [list(chat.images or ()), list(chat.videos or ())]
        if any(remote.is_remote(url) for each in given for _, url in each):
            given = await asyncio.get_running_loop().run_in_executor(self._fetching, self._fetched, *given)
        size = sum(len(url) for each in given for _, url in each)
        return await self.do(size, self._pictured, ids, chat, most, *given)

    def _fetched(self, *given: list[tuple[str, str]]) -> list[list[tuple[str, str | bytes]]]:
        """In the place of URLs what is there, one after another."""
        end, found = time.monotonic() + remote.SECONDS, []
        for each, bounds in zip(given, ((TYPES, MOST_BYTES), (VIDEO_TYPES, MOST_OF_VIDEOS))):
            found.append([])
            for where, url in each:
                with _named(where):
                    there = remote.fetched(url, self.media_hosts, end, *bounds) if remote.is_remote(url) else url
                found[-1].append((where, there))
        return found

    def _pictured(
        self,
        tokens: Tokens,
        ids: list[int],
        chat: Chat,
        most: int | None,
        images: list[tuple[str, str | bytes]],
        videos: list[tuple[str, str | bytes]],
    ) -> tuple[list[int], Pictures]:
        found: list[list] = [[], [], []]
        for where, image in images:
            with _named(where):
                found[0] += opened_images([image], self.images, self.processors.images)
        for where, video in videos:
            with _named(where):
                for all_of, one in zip(found[1:], opened_videos([video], self.images, self.processors.videos)):
                    all_of += one
        pictures, films, stamps = found
        if stamps and self.images.frames_apart:  # the text says when each frame is seen
            ids = tokens.chat(replace(chat, images=[], videos=[], stamps=stamps), most)
        try:
            made = Pictures(ids, pictures, self.images, films)
        except ValueError as error:
            raise APIError(400, f"messages: {error}", param="messages", code="invalid_value") from None
        return made.prompt_ids, made

    def check_samples(self, prompts: int, n: int, param: str = "prompt") -> None:
        if prompts > self.most_samples:
            raise APIError(400, f"{param}: got {prompts}, expected at most {self.most_samples}", param=param)
        if n * prompts > self.most_samples:
            got = f"got {prompts} prompts of n={n}, expected at most {self.most_samples} samples"
            raise APIError(400, f"n: {got} in one request", param="n")

    def check_ids(self, ids: list, param: str) -> list[int]:
        """Lengths first: of millions each would be looked at."""
        if len(ids) > self.most:
            raise self._too_long(param, len(ids))
        if not set(map(type, ids)) <= {int}:
            raise APIError(400, f"{param}: expected texts or lists of token ids in the list", param=param)
        bad = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            message = f"{param}: got the token id {bad}, expected 0 to {self.vocab_size - 1}"
            raise APIError(400, message, param=param)
        return ids

    def _checked(self, job: Job, param: str) -> Job:
        """Before the engine refuses it, and in this API's words."""
        if not job.prompt_ids:
            raise APIError(400, f"{param}: no tokens in it", param=param)
        if len(job.prompt_ids) > self.most:
            raise self._too_long(param, len(job.prompt_ids))
        self.check_ids(job.prompt_ids, param)
        return job

    def _too_long(self, param: str, length: int) -> APIError:
        message = f"{param}: got {length} tokens, expected at most {self.most}"
        return APIError(400, message, param=param, code="context_length_exceeded")


def _check_untemplated(asked: ChatRequest | TokenizeRequest, prompt: str) -> None:
    """A prompt that goes through no template leaves nothing out in silence that only a template reads."""
    wanted = {
        "tools": asked.tools,
        "add_generation_prompt": asked.add_generation_prompt is False,
        "continue_final_message": asked.continue_final_message,
        "chat_template_kwargs": asked.chat_template_kwargs,
        "reasoning_effort": asked.reasoning_effort not in (None, "none"),
    }
    for name, value in wanted.items():
        if value:
            message = f"{name}: expected none with {prompt}, which goes through no chat template"
            raise APIError(400, message, param=name, code="unsupported_parameter")
