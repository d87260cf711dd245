"""`vexact chat`: what is said goes through the template with all that was said before; answers come as drawn."""

import builtins
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import serving
from engine_models import build

from vexact_engine import Engine, SamplingParams, cli
from vexact_engine.proof import compare

ROOT = Path(__file__).parents[2]
OPTIONS = ["--max-new-tokens", "12", "--ignore-eos", "--seed", "3", "--num-pages", "60"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build("Llama", vocab_size=300).save_pretrained(folder)
    serving.tokenizer().save_pretrained(folder)
    return str(folder)


def say(capsys, monkeypatch, model, *lines, options=OPTIONS):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    code = cli.main(["chat", model, "--device", "cpu", *options])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def answers(model):
    """What the engine says to a templated text, at one seed."""
    with Engine.from_pretrained(model) as engine:

        def answer(text, seed):
            ids = engine.tokenizer(text, add_special_tokens=False).input_ids
            return engine.generate([ids], SamplingParams(max_new_tokens=12, ignore_eos=True, seed=seed))[0].text

        yield answer


def test_a_conversation_goes_on_from_what_was_said(capsys, monkeypatch, model, answers):
    first = answers("[user:hello]>", 3)
    second = answers(f"[user:hello][assistant:{first}][user:and]>", 4)
    code, out, err = say(capsys, monkeypatch, model, "hello", "and")
    assert (code, out) == (0, f"{first}\n{second}\n")
    assert err.count("the answer was cut") == 2


def test_commands(capsys, monkeypatch, model, answers):
    first, again = answers("[user:hello]>", 3), answers("[user:hello]>", 4)
    told = answers("[system:be brief][user:two\nlines]>", 5)
    lines = ["hello", "/check", "/retry", "/undo", "/system be brief", "two\\", "lines", "/help", "/quit", "unread"]
    code, out, err = say(capsys, monkeypatch, model, *lines)
    assert code == 0 and "unread" not in err
    verdict = "0 of 12 log-probabilities differ (max |diff| 0.0, KL 0.0)"
    assert out.startswith("\n".join([first, verdict, again, told, "/system TEXT"]))


def test_a_check_that_fails_is_the_exit_code(capsys, monkeypatch, model):
    honest = compare.compare
    monkeypatch.setattr(compare, "compare", lambda a, b: honest(a, b.nextafter(b + 1)))
    code, out, _ = say(capsys, monkeypatch, model, "hello", "/check", "and")
    assert code == 1 and "\n12 of 12 log-probabilities differ (max |diff| " in out


def test_what_is_wrong_with_a_turn_is_a_line_and_the_conversation_goes_on(capsys, monkeypatch, model, answers):
    lines = ["/retry", "/check", "/dance", "x" * 300, "hello"]
    code, out, err = say(capsys, monkeypatch, model, *lines)
    assert (code, out) == (0, answers("[user:hello]>", 4) + "\n")
    said = err.splitlines()
    for line, text in zip(
        said, ["nothing has been said", "no whole answer", "/dance: there is no", "expected at most"]
    ):
        assert line.startswith("vexact chat: ") and text in line


def test_a_model_without_a_template_is_named(capsys, monkeypatch, tmp_path):
    build("Llama", vocab_size=300).save_pretrained(tmp_path)
    serving.tokenizer(None).save_pretrained(tmp_path)
    capsys.readouterr()
    code, out, err = say(capsys, monkeypatch, str(tmp_path), "hello")
    assert (code, out) == (2, "") and "it has no chat template" in err and err.count("\n") == 1


def test_ctrl_c_ends_an_answer_and_not_the_conversation(tmp_path):
    """In a real terminal, with an answer that would take minutes."""
    build("Llama", vocab_size=300, max_position_embeddings=100_000).save_pretrained(tmp_path)
    serving.tokenizer().save_pretrained(tmp_path)
    leader, follower = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "vexact_engine.cli",
        "chat",
        str(tmp_path),
        "--max-new-tokens",
        "90000",
        "--device",
        "cpu",
    ]
    command += ["--ignore-eos", "--num-pages", "6000"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    process = subprocess.Popen(
        command,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=env,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # who runs in the background ignores it
    )
    os.close(follower)
    said = b""

    def wait_for(pattern, seconds=300):
        nonlocal said
        deadline = time.monotonic() + seconds
        while not re.search(pattern, said):
            assert time.monotonic() < deadline and process.poll() is None, said
            if select.select([leader], [], [], 0.1)[0]:
                said += os.read(leader, 4096)
        said = said[re.search(pattern, said).end() :]

    try:
        wait_for(rb"> ")
        os.write(leader, b"hello\n")
        wait_for(rb"hello\r\n.+")
        process.send_signal(signal.SIGINT)
        wait_for(rb" \.\.\.\r\n> ")
        os.write(leader, b"/quit\n")
        assert process.wait(300) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(leader)


def test_ctrl_c_while_nothing_is_said_ends_it(capsys, monkeypatch, model):
    def interrupted(prompt=""):
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupted)
    code, out, err = say(capsys, monkeypatch, model)
    assert (code, out, err.strip()) == (130, "", "vexact chat: interrupted")
