"""From what a request asks to the token ids of its prompts: in threads of their own, and checked before and after."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..images import Image, Pictures, opened_images
from . import remote
from .answers import Job
from .errors import APIError
from .lanes import Lane
from .protocol import ChatRequest, CompletionRequest, TokenizeRequest
from .tokens import Chat, Tokens


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """What is wrong with an image is said of its place."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise APIError(400, f"{where}: {error}", param="messages", code="invalid_value") from None


_FETCHING = 16  # requests whose images are fetched at once
_LONG = 32 << 10  # characters: tokenizing more takes long enough to have a thread of its own


class Prompts:
    """Of one server. Long texts have a tokenizer and a thread of their own, so that nobody else waits for them.

    most    tokens that a prompt may have
    images, processor   what the model takes of images, and what makes them of pictures; None: none
    image_hosts         that images may be fetched from
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        most: int,
        most_samples: int,
        images: Any = None,
        processor: Any = None,
        image_hosts: Collection[str] = (),
    ):
        self.images, self.image_processor, self.image_hosts = images, processor, image_hosts
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

    async def of_text(self, asked: CompletionRequest) -> list[Job]:
        prompt = asked.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise APIError(400, "prompt: expected a text, a list of token ids, or several of either", param="prompt")
        self.check_samples(len(prompt), 1 if asked.n is None else asked.n)
        special = asked.add_special_tokens is not False
        jobs = []
        for one in prompt:
            if isinstance(one, str):
                ids = await self.do(len(one), Tokens.encode, one, special, self.most)
                job = Job(ids, one if asked.echo else None)
            elif isinstance(one, list):
                job = Job(self.check_ids(one, "prompt"))
            else:
                raise APIError(400, "prompt: expected texts or lists of token ids in the list", param="prompt")
            jobs.append(self._checked(job, "prompt"))
            if asked.echo and job.echo is None:
                job.echo = await self.do(len(one), Tokens.decode, one)
        return jobs

    async def of_chat(self, asked: ChatRequest) -> Job:
        if asked.prompt_token_ids is None:
            ids, images = await self._chat(asked)
            return self._checked(Job(ids, images=images), "messages")
        if asked.messages:
            message = "prompt_token_ids: they are the whole prompt, expected no messages with them"
            raise APIError(400, message, param="prompt_token_ids")
        name = "prompt_token_ids"
        return self._checked(Job(self.check_ids(asked.prompt_token_ids, name)), name)

    async def of_tokenize(self, asked: TokenizeRequest) -> tuple[list[int], list[str] | None]:
        """Ids, and what they are called where that is wanted."""
        if (asked.prompt is None) == (asked.messages is None):
            raise APIError(400, "prompt: expected either prompt or messages", param="prompt")
        if asked.messages is not None:
            ids, _ = await self._chat(asked)
        else:
            special = asked.add_special_tokens is not False
            ids = await self.do(len(asked.prompt), Tokens.encode, asked.prompt, special, None)
        return ids, await self.do(len(ids), Tokens.names, ids) if asked.return_token_strs else None

    async def _chat(self, asked: ChatRequest | TokenizeRequest) -> tuple[list[int], list[Image]]:
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
            image_hosts=self.image_hosts,
        )
        most = None if isinstance(asked, TokenizeRequest) else self.most
        ids = await self.do(chat.size, Tokens.chat, chat, most)
        if not chat.images:
            return ids, []
        given: list[tuple[str, str | bytes]] = list(chat.images)
        if any(remote.is_remote(url) for _, url in chat.images):
            given = await asyncio.get_running_loop().run_in_executor(self._fetching, self._fetched, chat.images)
        return await self.do(sum(len(url) for _, url in given), self._pictured, ids, given)

    def _fetched(self, urls: list[tuple[str, str]]) -> list[tuple[str, str | bytes]]:
        """In the place of URLs what is there, one after another."""
        end, found = time.monotonic() + remote.SECONDS, []
        for where, url in urls:
            with _named(where):
                found.append((where, remote.fetched(url, self.image_hosts, end) if remote.is_remote(url) else url))
        return found

    def _pictured(
        self, tokens: Tokens, ids: list[int], given: list[tuple[str, str | bytes]]
    ) -> tuple[list[int], list[Image]]:
        found: list[Image] = []
        for where, image in given:
            with _named(where):
                found += opened_images([image], self.images, self.image_processor)
        try:
            return Pictures(ids, found, self.images).prompt_ids, found
        except ValueError as error:
            raise APIError(400, f"messages: {error}", param="messages", code="invalid_value") from None

    def check_samples(self, prompts: int, n: int) -> None:
        if prompts > self.most_samples:
            raise APIError(400, f"prompt: got {prompts}, expected at most {self.most_samples}", param="prompt")
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
