"""The HTML report: whole in itself, escaped, with the figures that were found."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest
import torch

from vexact_engine.proof.compare import Sample, Side
from vexact_engine.proof.report import SCRIPT, fragment, render, write_plot, write_report
from vexact_engine.proof.verify import Batches, Gradients, Verification

EVIL = '<script>alert("x")</script> & <img src=http://example.org/x.png>'


def side(name, dtype, noise, tokens=40):
    g = torch.Generator().manual_seed(3)
    samples = []
    for i in range(3):
        rollout = -torch.rand(tokens, generator=g) * 6
        trainer = rollout + noise * torch.randn(tokens, generator=g)
        samples.append(
            Sample(
                f"p:{i}",
                f"{EVIL} {i}",
                [1, 2],
                [3] * tokens,
                rollout,
                trainer,
                text=EVIL,
                finish_reason="length",
                pieces=[EVIL] * tokens,
            )
        )
    return Side(name, dtype, samples, {"rollout": 1.25, "rescore": 0.5})


def verification(aligned, stock=()):
    return Verification(
        title="Title & more",
        model="tiny",
        dtype="bfloat16",
        device="cpu",
        aligned=aligned,
        stock=list(stock),
        statistics={"steps": 12, "preemptions": 3},
        gradients=Gradients(2, 50, 1.5, 9, (), (), 0.25),
        settings={},
        numerics={"class": "cpu", "contract": 1},
        environment={"torch": "<2.x>"},
        seconds=4.5,
    )


class Elements(HTMLParser):
    VOID = ("meta", "img", "input")

    def __init__(self, text):
        super().__init__()
        self.images, self.links, self.open, self.names, self.text = [], [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.names.add(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]
        if tag == "img":
            self.images.append(dict(attributes)["src"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def html():
    return render(
        verification(side("aligned", "bfloat16", 0), [side("stock", "bfloat16", 0.1), side("stock", "float32", 1e-6)])
    )


def test_it_is_well_formed_and_loads_nothing(html):
    page = Elements(html)
    assert not page.open and "link" not in page.names and "onclick" not in html
    assert html.count("<script") == 2 and f"<script>{SCRIPT}</script>" in html, "our own and its data, no other"
    assert len(page.images) == 2
    for source in page.images:
        assert base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True)[:4] == b"\x89PNG"
    assert page.links == page.images and not re.search(r"@import|url\(", html)


def test_text_is_escaped_and_shown_as_it_is(html):
    text = "".join(Elements(html).text)
    assert EVIL in text and EVIL not in html and "<script>alert" not in html and "</script> & <img" not in html
    assert "Title & more" in text and "<2.x>" in text


def test_it_holds_the_figures(html):
    text = "".join(Elements(html).text)
    assert "0 of 120 log-probabilities differ (max |diff| 0.0, KL 0.0)" in text
    assert "stock Hugging Face, float32" in text and "preemptions" in text and "2 packed sequences, 50 tokens" in text
    assert 'class="card verdict equal"' in html


def test_a_difference_is_not_dressed_up():
    found = verification(side("aligned", "bfloat16", 1e-3))
    html = render(found)
    assert (
        not found.equal
        and 'class="card verdict differ"' in html
        and found.comparison.verdict() in html.replace("&amp;", "&")
    )


def test_nan_and_infinity_and_nothing_are_drawn_too(tmp_path):
    broken = side("aligned", "bfloat16", 1e-3)
    broken.samples[0].trainer[:2] = torch.tensor([float("nan"), float("-inf")])
    empty = Side("aligned", "bfloat16", [Sample("p", "q", [1], [], torch.empty(0), error="too <long>")])
    write_report(tmp_path / "r.html", verification(broken))
    assert "nan" in (tmp_path / "r.html").read_text(encoding="utf-8")
    html = render(verification(empty))
    assert "too &lt;long&gt;" in html and "<img" not in html


def test_everything_that_the_verdict_rests_on_is_in_it():
    found = verification(side("aligned", "bfloat16", 0))
    found.batches = [Batches(1, 3, 120, 0, 0.5), Batches(8, 3, 120, 7, 0.25)]
    found.warm, found.command = Batches(3, 3, 120, 0, 0.5, prefix_tokens=96), "vexact verify --model <m>"
    found.settings = {"sampling": {"temperature": 0.625}}
    html = render(found)
    text = "".join(Elements(html).text)
    assert not found.equal and 'class="card verdict differ"' in html and 'verdict equal"' not in html
    assert "NOT EQUAL: rollout with 8 prompts at a time: 7 of 120 tokens differ" in text
    assert "3 prompts again, 1 at a timeholds0 of 120 tokens differ" in text
    assert "3 prompts again, 8 at a timeFAILS7 of 120 tokens differ" in text
    assert "from a warm prefix cacheholds" in text and "96 of their tokens in the cache" in text
    assert "gradientsholdsall finite" in text and found.date in text and "vexact verify --model <m>" in text
    assert '"temperature": 0.625' in text


def test_a_notebook_shows_the_verdict():
    found = verification(side("aligned", "bfloat16", 0))
    assert "0 of 120 log-probabilities differ" in found._repr_html_() and found._repr_html_() == fragment(found)
    assert Elements(fragment(found)).open == []
    assert repr(found) == "<Verification of tiny, bfloat16 on cpu: " + found.verdict() + ">"


def test_the_figures_of_single_tokens_have_their_bits_and_an_end(monkeypatch):
    found = verification(side("aligned", "bfloat16", 0))
    found.aligned.samples[2].trainer[5] += 1e-6

    def data():
        return json.loads(re.search(r'id="data">(.*?)</script>', render(found), re.S)[1])

    whole = data()
    assert set(whole) == {"0", "1", "2"} and whole["1"]["text"][0] == EVIL
    for i, sample in enumerate(found.aligned.samples):
        for told, held in zip(whole[str(i)]["logp"], (sample.rollout, sample.trainer)):
            assert torch.equal(torch.tensor(told, dtype=torch.float32), held)
    monkeypatch.setattr("vexact_engine.proof.report.DETAILED", 80)
    assert set(data()) == {"0", "2"}, "what differs comes first"
    assert "in the file that --json writes" in render(found)


@pytest.mark.parametrize("suffix,begins", [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_the_plot_as_a_picture_is_the_same_every_time(tmp_path, suffix, begins):
    found = verification(side("aligned", "bfloat16", 0), [side("stock", "bfloat16", 0.1)])
    files = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for file in files:
        write_plot(file, found)
    assert files[0].read_bytes() == files[1].read_bytes() and files[0].read_bytes().startswith(begins)
    write_plot(files[1], verification(side("aligned", "bfloat16", 0.1), [side("stock", "bfloat16", 0.1)]))
    assert files[0].read_bytes() != files[1].read_bytes()
