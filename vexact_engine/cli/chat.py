"""`vexact chat`: a conversation with a model, in a terminal or from a pipe (a line a turn)."""

import asyncio
import contextlib
import sys
from dataclasses import replace
from typing import Any

from . import options

_HELP = """\
/system TEXT   what the model is told before all; without TEXT nothing
/undo          forget the last question and its answer
/retry         another answer to the last question
/reset         begin again
/check         compute the last answer's log-probabilities once more, in one piece, and compare their bytes
/quit          or Ctrl-D. Ctrl-C ends an answer. A line that ends with \\ goes on in the next"""


def add_chat(commands) -> None:
    chat = options.command(
        commands,
        "chat",
        run_chat,
        "a conversation with a model",
        (
            "vexact chat DIR",
            'vexact chat DIR --system "Answer in rhymes." --temperature 0.7',
            "vexact chat DIR < questions.txt",
        ),
    )
    chat.add_argument("model", metavar="DIR|GGUF|HUB-ID", help="safetensors directory, GGUF file or Hub name")
    options.adapter(chat)
    options.tokenizer(chat)
    options.where(chat)
    chat.add_argument("--system", metavar="TEXT", help="what the model is told before all (nothing)")
    options.sampling(chat, max_new_tokens=1024)
    options.engine(chat)


def run_chat(args) -> int:
    from ..config import EngineConfig, SamplingParams
    from ..engine import Engine

    params = SamplingParams(**options.sampling_of(args))
    config = EngineConfig(**options.engine_of(args), show_progress=False)
    device = options.device(args.device)
    options.check_engine(args, device)
    with options.progress(args, lines=False) as progress:
        progress("load", 0, 1)
        loaded = options.load(args, device)
        if not getattr(loaded.tokenizer, "chat_template", None):
            raise ValueError(f"{args.model}: it has no chat template: vexact generate continues a text")
        engine = Engine(loaded, config)
    with engine:
        conversation = Conversation(engine, params, args.seed, args.system)
        terminal = sys.stdin.isatty()
        if terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  arrows and a history, where Python has them
            print(f"{engine.name}: /help says what can be done", file=sys.stderr)
        while (line := _read(terminal)) is not None:
            if not _run_line(conversation, line.strip()):
                break
    return 0


class Conversation:
    """What has been said. An answer that was broken off stays as far as it came."""

    def __init__(self, engine: Any, params: Any, seed: int = 0, system: str | None = None):
        self.engine, self.params, self.seed, self.system = engine, params, seed, system
        self.turns: list[list[str]] = []  # of a question and its answer
        self.last: Any = None  # the last answer's completion, if it came to its end
        self._answers = 0

    def ask(self, text: str, show=lambda text: None) -> str:
        """The answer, shown as it comes. ValueError where there is none, and nothing was said then."""
        from ..proof.prompts import Prompt, encode

        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for question, answer in self.turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": text})
        (ids,) = encode([Prompt("chat", messages=tuple(messages))], self.engine.tokenizer)
        params = replace(self.params, seed=(self.seed + self._answers) % 2**64)
        self._answers += 1
        said: list[str] = []
        self.last = None

        async def listen() -> None:
            async for increment in self.engine.stream(ids, params):
                if increment.finish_reason == "error":
                    raise ValueError(increment.completion.error)
                said.append(increment.text)
                show(increment.text)
                self.last = increment.completion

        try:
            asyncio.run(listen())
        except KeyboardInterrupt:
            show(" ...")
        self.turns.append([text, "".join(said)])
        return self.turns[-1][1]

    def check(self) -> str:
        """The verdict on the last answer: its log-probabilities, which came one by one from a cache, against those of
        the whole conversation computed at once, as a trainer does."""
        import torch

        from ..proof.compare import compare

        if self.last is None:
            raise ValueError("there is no whole answer to check")
        before = self.last.prompt_ids
        params = replace(self.params, max_new_tokens=1, prompt_logprobs=True)
        (again,) = self.engine.generate([before + self.last.token_ids], params, raise_on_error=True)
        sides = self.last.raw_logprobs, again.prompt_logprobs[len(before) :]
        return compare(*(torch.tensor(side, dtype=torch.float32) for side in sides)).verdict()


def _read(terminal: bool) -> str | None:
    """A line, or several; None at the end."""
    lines = []
    while True:
        try:
            lines.append(input(("> " if not lines else "  ") if terminal else ""))
        except EOFError:
            if terminal:
                print()
            return "\n".join(lines) if lines else None
        if not lines[-1].endswith("\\"):
            return "\n".join(lines)
        lines[-1] = lines[-1][:-1]


def _run_line(conversation: Conversation, line: str) -> bool:
    """Do what a line says; False where that is to end."""
    command, _, argument = line.partition(" ")
    try:
        if command in ("/quit", "/exit"):
            return False
        if command == "/help":
            print(_HELP)
        elif command == "/system":
            conversation.system = argument.strip() or None
        elif command == "/reset":
            conversation.turns.clear()
            conversation.last = None
        elif command in ("/undo", "/retry"):
            if not conversation.turns:
                raise ValueError("nothing has been said yet")
            question, _ = conversation.turns.pop()
            conversation.last = None
            if command == "/retry":
                _answer(conversation, question)
        elif command == "/check":
            print(conversation.check())
        elif command.startswith("/"):
            raise ValueError(f"{command}: there is no such command: /help says which there are")
        elif line:
            _answer(conversation, line)
    except ValueError as error:
        print(f"vexact chat: {error}", file=sys.stderr)
    return True


def _answer(conversation: Conversation, text: str) -> None:
    def show(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    conversation.ask(text, show)
    print()
    if conversation.last is not None and conversation.last.finish_reason == "length":
        print("vexact chat: the answer was cut: --max-new-tokens, or all the room there is", file=sys.stderr)
