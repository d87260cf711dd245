"""What our HTML pages share: their frame, their style, and how a verdict looks. Nothing is loaded from anywhere."""

from html import escape

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f8; --card: #fff; --line: #e3e5e9; --ink: #24292f; --soft: #5c6370;
  --good: #0b7a60; --bad: #b3263a; --tint: #fdecee; }
@media (prefers-color-scheme: dark) {
  :root { --page: #101318; --card: #181c23; --line: #2c323c; --ink: #e3e6ea; --soft: #9aa3af; --good: #3fc9a3;
    --bad: #ff7b8a; --tint: #3a1f26; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; margin: 0 0 4px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 20px; margin: 40px 0 12px; }
h3 { font-size: 16px; margin: 0 0 8px; }
p { margin: 8px 0; }
.lead { color: var(--soft); margin-bottom: 24px; overflow-wrap: anywhere; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 20px 24px;
  margin: 16px 0; }
.verdict { border-left: 6px solid; font-size: 18px; font-weight: 600; overflow-wrap: anywhere; }
.equal { border-left-color: var(--good); } .differ { border-left-color: var(--bad); }
.verdict small { display: block; font-weight: 400; font-size: 14px; color: var(--soft); margin-top: 4px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 14px; }
th, td { padding: 8px 12px 8px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; overflow-wrap: normal; white-space: nowrap; }
.good { color: var(--good); } .bad, tr.bad td { color: var(--bad); } tr.bad td { background: var(--tint); }
img { width: 100%; height: auto; display: block; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 8px; }
details { border-bottom: 1px solid var(--line); padding: 10px 0; }
details:last-of-type { border-bottom: 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
summary span, .note { color: var(--soft); font-size: 14px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--page); border-radius: 8px; padding: 12px 16px;
  margin: 8px 0; }
.tokens { max-height: 420px; overflow: auto; font-size: 13px; }
.tokens th { position: sticky; top: 0; background: var(--card); }
.tokens td { padding: 2px 12px 2px 0; }
.code, pre { font-family: ui-monospace, Menlo, Consolas, monospace; }
.code { white-space: pre; }
.error { color: var(--bad); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; line-height: 1.5; margin: 0; }
#tools { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: center; font-size: 14px; color: var(--soft); }
#tools[hidden] { display: none; }
#search { flex: 1 1 220px; min-width: 0; font: inherit; color: var(--ink); background: var(--page); padding: 6px 10px;
  border: 1px solid var(--line); border-radius: 8px; }
footer { color: var(--soft); font-size: 14px; margin-top: 40px; }
@media (max-width: 640px) {
  main { padding: 20px 12px 40px; } .card { padding: 14px; } h1 { font-size: 23px; } th, td { font-size: 13px; }
}
"""


def whole(title: str, parts: list[str]) -> str:
    """A page of these parts, which are HTML."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    foot = "<footer>Written by vexact. Equal means equal bits: no tolerance is involved.</footer>"
    body = f"<main>{''.join(parts)}{foot}</main>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def verdict(equal: bool, text: str, more: str) -> str:
    kind = "equal" if equal else "differ"
    return f'<div class="card verdict {kind}">{escape(text)}<small>{escape(more)}</small></div>'


def cell(parts: list[str]) -> str:
    """The parts as they look in a notebook, whose own style has the rest of its page."""
    colour = "border-left: 6px solid; padding: 8px 12px; font-weight: 600"
    body = "".join(parts)
    for kind, of in (("equal", "#0f8a6d"), ("differ", "#d1495b")):
        body = body.replace(f'class="card verdict {kind}"', f'style="{colour}; border-color: {of}"')
    return f"<div>{body}</div>"
