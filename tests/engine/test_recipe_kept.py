"""Runs of the recipe that are kept: what they are known by, going on from the disk, and a run held against another."""

import dataclasses
import errno
import itertools
import json
import shutil

import pytest
import torch
from engine_models import build
from torch.distributed.checkpoint import filesystem

pytest.importorskip("zmq", reason="pyzmq is not installed")

from vexact_engine import cli
from vexact_engine.recipes import digests, grpo, record, report
from vexact_engine.recipes.checkpoint import Saving
from vexact_engine.recipes.launch import launch
from vexact_engine.recipes.options import Options

SMALL = {"device": "cpu", "prompts": 2, "samples": 4, "steps": 4, "max_new_tokens": 6, "max_prompt_tokens": 20}
SMALL |= {"learning_rate": 1e-2, "micro_batch": 3}
OTHERWISE = {"replicas": 2, "enable_prefix_cache": False, "max_num_seqs": 3, "page_size": 4, "check_every": 0}


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "Qwen3"
    build("Qwen3").save_pretrained(folder)
    return Options(model=str(folder), **SMALL)


# Digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_sum_of_bits_is_that_of_its_parts_and_every_bit_counts(dtype):
    whole = (torch.arange(2_200_000) % 251).to(dtype)
    cuts = [0, 1, 70_000, 1_048_577, 2_200_000]
    parts = sum(digests.bits_sum(whole[a:b], a) for a, b in itertools.pairwise(cuts))
    assert parts == digests.bits_sum(whole.reshape(2, -1)) != 0
    assert digests.bits_sum(whole[:0], 5) == 0
    for place in (0, 1_048_576, 2_199_999):
        other = whole.clone()
        other[place:].view(torch.uint8)[0] ^= 1
        assert digests.bits_sum(other) != parts
    assert digests.bits_sum(whole.flip(0)) != parts
    assert digests.bits_sum(torch.tensor([0.0])) != digests.bits_sum(torch.tensor([-0.0]))


def test_sha256_is_of_names_and_bytes():
    one, two = torch.arange(6.0), torch.arange(4).bfloat16()
    known = digests.sha256([("a", one), ("b", two)])
    assert known == digests.sha256([("b", two), ("a", one)]) and len(known) == 64
    for other in ([("a", one), ("c", two)], [("a", one.reshape(2, 3)), ("b", two)], [("a", one), ("b", two.float())]):
        assert digests.sha256(other) != known


# A record, and a run held against it


def events(path):
    """What a record was told, in order."""
    for line in path.read_text().splitlines()[1:]:
        entry = json.loads(line)
        kind, side = entry.pop("kind"), entry.pop("side")
        rest = {"step": [entry], "parameters": list(entry.values()), "end": list(entry.values())}
        yield kind, side, *rest[kind]


def made_up(steps):
    figures = {"answers": "a", "tokens": 9, "reward": 0.5, "entropy": 1.0, "grad_norm": 2.0}
    yield "parameters", "aligned", 0, {"w": "00", "v": "10"}
    for step in range(1, steps + 1):
        yield "step", "aligned", {"step": step, **figures}
        yield "parameters", "aligned", step, {"w": f"0{step}", "v": f"1{step}"}
    yield "end", "aligned", "ff"


@pytest.fixture
def recorded(chosen, tmp_path):
    path = tmp_path / "run.jsonl"
    write = record.Recorder(path, {"options": chosen.to_json()})
    for event in made_up(3):
        write(*event)
    return path


@pytest.mark.parametrize(
    "at,change,said",
    [
        (0, {"v": "99"}, "aligned, before the first step: parameter v: got 99, "),
        (3, {"reward": 0.25}, "aligned, step 2: reward: got 0.25, "),
        (3, {"answers": "b", "reward": 0.25}, "aligned, step 2: answers: got b, "),
        (6, {"w": "99", "v": "98"}, "aligned, after step 3: parameter w: got 99, "),
        (7, None, "aligned: SHA-256 of all parameters: got 00, "),
    ],
)
def test_the_first_thing_that_differs_is_named(recorded, chosen, at, change, said):
    against, seen = record.Against(recorded, chosen), list(made_up(3))
    *head, last = seen[at]
    for event in seen[:at]:
        against(*event)
    with pytest.raises(record.RunDiffers) as error:
        against(*head, {**last, **change} if change else "00")
    assert f"recipe: {said}" in str(error.value) and "run.jsonl has" in str(error.value)


def test_what_a_record_has_not_is_passed_and_what_was_equal_is_counted(recorded, chosen):
    for steps, end in ((3, 1), (5, 0), (2, 0)):  # another last step has other parameters
        against = record.Against(recorded, chosen)
        *head, (kind, side, digest) = made_up(steps)
        for event in [*head, (kind, side, digest if end else "00")]:
            against(*event)
        assert against.compared == 2 + min(steps, 3) * (5 + 2) + end


def test_a_record_of_other_options_is_refused(recorded, chosen):
    record.Against(recorded, dataclasses.replace(chosen, steps=9, **OTHERWISE))
    with pytest.raises(ValueError, match=r"recipe: seed: got 7, but .*run\.jsonl, .* has 0"):
        record.Against(recorded, dataclasses.replace(chosen, seed=7))


def test_a_record_that_was_cut_off_goes_on_where_the_run_does(recorded, chosen):
    whole = recorded.read_text()
    recorded.write_text(whole[:-30])  # in the middle of the last line
    assert max(step for _, step in record.read(recorded).steps) == 3
    write = record.Recorder(recorded, {"options": {}}, resumed={"aligned": 1})
    assert list(events(recorded)) == list(made_up(3))[:3]
    for event in list(made_up(3))[3:]:
        write(*event)
    assert recorded.read_text() == whole


def test_other_sides_of_a_record_stay_where_one_goes_on(recorded):
    write = record.Recorder(recorded, {}, resumed={})
    for kind, _, *values in made_up(3):
        write(kind, "stock", *values)
    record.Recorder(recorded, {}, resumed={"aligned": 1})
    assert list(events(recorded)) == [*made_up(3)][:3] + [(kind, "stock", *values) for kind, _, *values in made_up(3)]


def test_a_full_disk_leaves_the_record_that_is_gone_on_with(recorded, monkeypatch):
    whole, write = recorded.read_text(), record.Path.write_text

    def full(path, text, **options):
        write(path, text[:9], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record.Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        record.Recorder(recorded, {}, resumed={"aligned": 1})
    assert recorded.read_text() == whole


@pytest.mark.process
def test_a_record_of_another_run_is_not_gone_on_with(recorded, chosen, tmp_path, capsys):
    whole = recorded.read_text()
    more = ["--save", str(tmp_path / "run"), "--resume", "--record", str(recorded)]
    assert cli.main(argv(chosen, "--seed", "7", *more)) == 2
    assert "--seed: got 7, but " in capsys.readouterr().err and recorded.read_text() == whole


@pytest.mark.parametrize("text,said", [("", "is empty"), ("[]\n", "line 1"), ('{"options": {}}\n{"a": 1}\n', "line 2")])
def test_what_is_no_record_is_refused_and_stays(text, said, chosen, tmp_path):
    path = tmp_path / "other"
    path.write_text(text)
    for refused in (lambda: record.Against(path, chosen), lambda: record.Recorder(path, {}, resumed={})):
        with pytest.raises(ValueError, match=said):
            refused()
    assert path.read_text() == text


# Folders


def test_a_folder_that_is_in_use_or_of_another_run_is_refused(chosen, tmp_path):
    kept = Saving(str(tmp_path / "run"))
    kept.begin(chosen)
    with pytest.raises(FileExistsError, match="a run is kept here: expected --resume, or another folder"):
        kept.begin(chosen)
    again = dataclasses.replace(kept, resume=True)
    again.begin(dataclasses.replace(chosen, steps=99, **OTHERWISE))
    with pytest.raises(ValueError, match=r"recipe: clip: got 0\.1, but the run in .* has 0\.2"):
        again.begin(dataclasses.replace(chosen, clip=0.1))
    with pytest.raises(FileExistsError, match="has files, and no run"):
        Saving(str(tmp_path), resume=True).begin(chosen)
    for wrong in ({"every": 0}, {"keep": 0}):
        with pytest.raises(ValueError, match="expected an integer of 1 or more"):
            Saving("x", **wrong)
    (tmp_path / "run" / "aligned" / "step-00000007.part").mkdir(parents=True)  # a kill while it was written
    assert kept.newest("aligned") == 0


def test_options_that_need_a_folder_are_refused_without_one(capsys):
    assert cli.main(["recipe", "grpo", "--resume"]) == 2
    assert "--resume: expected --save with it" in capsys.readouterr().err


def test_questions_that_depend_on_their_number_are_of_as_many(chosen):
    one = dataclasses.replace(chosen, task="acre", epoch_steps=4)
    dataclasses.replace(one, steps=9).check_same(one.to_json(), "another run")  # of the first epoch
    for changes in ({"steps": 3}, {"epoch_steps": None, "steps": 9}):
        with pytest.raises(ValueError, match=r"recipe: (steps: got 3, but another run has 4: .* acre|epoch_steps: )"):
            dataclasses.replace(one, **changes).check_same(one.to_json(), "another run")


# Whole runs


def argv(options, *more):
    given = {name: getattr(options, name) for name in ("model", *SMALL)}
    return ["recipe", "grpo", *(str(a) for k, v in given.items() for a in (f"--{k.replace('_', '-')}", v)), *more]


@pytest.mark.process
def test_a_run_that_goes_on_with_other_engines_ends_with_the_same_parameters(chosen, tmp_path, capsys):
    paths = [str(tmp_path / name) for name in ("whole.jsonl", "run", "parts.jsonl")]
    assert cli.main(argv(chosen, "--record", paths[0])) == 0
    kept = ["--save", paths[1], "--save-every", "1", "--record", paths[2]]
    assert cli.main(argv(dataclasses.replace(chosen, steps=2), *kept)) == 0
    assert sorted(p.name for p in (tmp_path / "run" / "aligned").iterdir()) == ["step-00000001", "step-00000002"]
    shutil.rmtree(tmp_path / "run" / "aligned" / "step-00000002")  # as if killed before it
    otherwise = [
        "--replicas",
        "2",
        "--no-prefix-cache",
        "--max-num-seqs",
        "3",
        "--page-size",
        "4",
        "--check-every",
        "0",
    ]
    capsys.readouterr()
    assert cli.main(argv(chosen, *kept, "--resume", "--verify-against", paths[0], *otherwise)) == 0
    out = capsys.readouterr().out
    whole, parts = (record.read(path) for path in (paths[0], paths[2]))
    assert parts.ends == whole.ends and parts.parameters == whole.parameters
    assert len(whole.steps) == 4 and len(whole.parameters) == 5
    assert len(set(map(str, whole.parameters.values()))) == 5  # it trained at every step
    for place, step in whole.steps.items():
        free = ("seconds", "held", "compared", "expected", "differ_recomputed", "command")
        a, b = ({k: v for k, v in s.items() if k not in free} for s in (step, parts.steps[place]))
        assert a == b and step["held"]["rss_mib"] > 0 and step["held"]["descriptors"] > 0
    assert f"aligned: parameters have SHA-256 {whole.ends['aligned']}" in out and ", 0 differ" in out
    assert report.verdict("aligned", grpo.Run()) == "aligned: no step was left to run"


@pytest.mark.process
def test_what_compared_nothing_is_not_equal(chosen, tmp_path, capsys):
    """A stock side has nothing that could be equal, a record of another side nothing to be held against, and a run that
    goes on at its end does neither."""
    paths = [str(tmp_path / name) for name in ("stock.jsonl", "stock.json", "run", "run.json")]
    short = argv(dataclasses.replace(chosen, steps=1))
    assert cli.main([*short, "--sides", "stock", "--record", paths[0], "--json", paths[1]]) == 0
    assert json.loads((tmp_path / "stock.json").read_text())["equal"] is None
    kept = [*short, "--save", paths[2], "--json", paths[3]]
    capsys.readouterr()
    assert cli.main([*kept, "--verify-against", paths[0]]) == 1
    assert "0 figures and digests compared, 0 differ: it has nothing of what this run" in capsys.readouterr().out
    assert json.loads((tmp_path / "run.json").read_text())["equal"] is True
    assert cli.main([*kept, "--resume"]) == 0
    assert json.loads((tmp_path / "run.json").read_text())["equal"] is None


@pytest.mark.process
def test_what_cannot_be_kept_is_named(chosen, tmp_path, monkeypatch, capsys):
    """torch's own exception is no Exception."""
    write = filesystem._write_item

    def full(*args):
        write(*args)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(filesystem, "_write_item", full)
    path = tmp_path / "run"
    assert cli.main(argv(dataclasses.replace(chosen, steps=1), "--quiet", "--save", str(path))) == 2
    (said,) = capsys.readouterr().err.splitlines()
    part = path / "aligned" / "step-00000001.part"
    assert said == f"vexact recipe: {part}: could not be written: OSError: [Errno 28] No space left on device"
    part.rename(part.with_suffix(""))
    assert cli.main(argv(chosen, "--quiet", "--save", str(path), "--resume")) == 2
    assert f"{part.with_suffix('')}: could not be read: " in capsys.readouterr().err


@pytest.mark.process
def test_two_ranks_go_on_too(chosen, tmp_path):
    seen = []

    def note(kind, *values):
        if kind in ("parameters", "end"):
            seen.append((kind, *values))

    saving = Saving(str(tmp_path / "run"), every=1)
    two = dataclasses.replace(chosen, ranks=2, steps=2)
    assert launch(two, report=note, saving=saving, watch=True)["aligned"].equal
    whole, seen[:] = seen[:], []
    shutil.rmtree(tmp_path / "run" / "aligned" / "step-00000002")
    run = launch(two, report=note, saving=dataclasses.replace(saving, resume=True), watch=True)["aligned"]
    assert run.equal and [s["weight_version"] for s in run.steps] == [2]
    assert seen == whole[2:] and len(whole) == 4
