"""The report as a browser shows it: the script works, in light and dark, wide and on a phone, and fetches nothing.

Chromium without a window (Debian: apt-get install chromium); skipped where there is none.
"""

import math
import os

import browser
import pytest
import torch
from test_report import EVIL, side, verification

from vexact_engine.proof.report import write_report
from vexact_engine.proof.verify import Batches

pytestmark = pytest.mark.skipif(browser.find() is None, reason="no Chromium here: apt-get install chromium")
SHOWN = "[...document.querySelectorAll('details.sample')].filter(s => s.checkVisibility()).length"
ROWS = "[...document.querySelectorAll('.tokens[data-index=\"{}\"] tr')].map(r => [...r.cells].map(c => c.textContent))"


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    found = verification(side("aligned", "bfloat16", 0), [side("stock", "bfloat16", 0.1)])
    found.batches, found.warm = [Batches(1, 3, 120, 0, 0.5)], Batches(3, 3, 120, 0, 0.5, prefix_tokens=96)
    found.settings = {"engine": {"page_size": 16, "a_long_name": "x" * 300}}
    first, second, third = found.aligned.samples
    first.trainer = first.trainer.clone()
    first.trainer[1] = torch.nextafter(first.trainer[1], torch.tensor(0.0))
    first.trainer[2] = math.nan
    first.rollout[3] = first.trainer[3] = -math.inf
    second.prompt_text, third.prompt_text = "About lighthouses", "Über " + "very" * 80
    path = tmp_path_factory.mktemp("report") / "r.html"
    write_report(path, found)
    with browser.Browser() as page:
        page.open(path)
        yield page, path, found


def test_nothing_is_fetched_and_nothing_fails(shown):
    page, path, _ = shown
    page.open(path)
    assert [url for url in page.asked if not url.startswith("data:")] == [path.as_uri()] and page.errors == []
    assert page.run("[...document.images].every(i => i.complete && i.naturalWidth > 500)")
    assert EVIL in page.run("document.body.textContent")


def test_a_prompt_that_is_opened_shows_the_bits_of_every_token(shown):
    page, path, found = shown
    page.open(path)
    assert page.run(ROWS.format(0)) == [], "made when it is asked for"
    page.run("new Promise(r => { document.querySelector('.sample').open = true; setTimeout(r, 100) })")
    head, *rows = page.run(ROWS.format(0))
    sample = found.aligned.samples[0]
    assert len(rows) == len(sample.token_ids) and head[3:] == ["rollout log p", "trainer log p", "bits"]
    for row, a, b in zip(rows, sample.rollout, sample.trainer):
        hexes = [f"{x.view(torch.int32).item() & 0xFFFFFFFF:08x}" for x in (a, b)]
        if a.isnan() or b.isnan() or hexes[0] != hexes[1]:
            assert row[5].startswith(hexes[0] + " | ") and (b.isnan() or row[5].endswith(hexes[1])), row
        else:
            assert row[5] == f"{hexes[0]} equal" and torch.tensor(float(row[3])).equal(a)
    marked = page.run(
        "[...document.querySelectorAll('.tokens tr')].flatMap((r, i) => r.className === 'bad' ? [i] : [])"
    )
    assert marked == [2, 3], "one bit, and the NaN, behind the head; equal infinities are equal"
    assert rows[3][3:5] == ["-Infinity", "-Infinity"]


def test_all_that_was_checked_is_on_the_page(shown):
    page, path, found = shown
    page.open(path)
    text = " ".join(page.run("document.body.innerText").split())
    for said in (found.title, "from a warm prefix cache", "gradients", "all finite", "stock Hugging Face"):
        assert said.lower() in text.lower(), said
    assert found.date[:10] in text and f"{found.batches[0].batch_size}" in text and "96 of their tokens" in text
    for said in ("page_size", "contract", "<2.x>", "a_long_name"):  # settings, fingerprint, versions
        assert said in page.run("document.body.textContent"), said


def test_the_filter_finds_words_and_differences(shown):
    page, path, _ = shown
    page.open(path)
    assert page.run(SHOWN) == 3 and page.run("document.getElementById('count').textContent") == "3 of 3"
    put = "search.value = {!r}; search.dispatchEvent(new Event('input')); "
    assert page.run(put.format("LIGHThouse") + SHOWN) == 1
    assert page.run(put.format("no such word") + SHOWN) == 0
    assert page.run(put.format("") + "only.click(); " + SHOWN) == 1
    assert page.run("document.getElementById('count').textContent") == "1 of 3"


@pytest.mark.parametrize("width", [320, 390, 768, 1440])
def test_no_screen_is_too_narrow(shown, width, tmp_path):
    page, path, _ = shown
    page.open(path, width)
    page.run("new Promise(r => { for (const s of samples) s.open = true; setTimeout(r, 100) })")
    assert page.run("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('.card')].filter(c => c.getBoundingClientRect().right > innerWidth).length"
    assert page.run(wide) == 0
    if folder := os.environ.get("VEXACT_PICTURES"):
        page.picture(path.parent / folder / f"report-{width}.png")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_words_can_be_read_in_light_and_in_the_dark(shown, dark, tmp_path):
    page, path, _ = shown
    page.open(path, 1200, dark)
    contrast = """
    (() => {
      const rgb = text => text.match(/[\\d.]+/g).slice(0, 4).map(Number);
      const light = c => { const [r, g, b] = c.slice(0, 3).map(v => v / 255).map(
        v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const ground = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
        if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
      const least = [];
      const words = "h1, h2, p, td, th, summary, summary span, small, .text, pre, footer";
      for (const e of document.querySelectorAll(words)) {
        const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))];
        least.push((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
      }
      return [Math.min(...least), light(ground(document.body))];
    })()"""
    least, ground = page.run(contrast)
    assert least >= 4.5, "the contrast that WCAG asks for"
    assert (ground < 0.1) if dark else (ground > 0.8)
    if folder := os.environ.get("VEXACT_PICTURES"):
        page.picture(path.parent / folder / f"report-{'dark' if dark else 'light'}.png")
