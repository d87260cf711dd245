"""The server under attack, for some seconds; `python tests/server_attack.py` goes on for as long as you like."""

import json

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (extra serve)")
pytest.importorskip("httpx", reason="httpx is not installed (extra test)")


def test_a_short_attack(capsys):
    import server_attack

    for minutes in (0.15, 0.6, 2.4):  # on a machine that does other things too, little happens in nine seconds
        assert server_attack.main(["--minutes", str(minutes), "--seed", "7"]) == 0, capsys.readouterr().out
        counts = json.loads(capsys.readouterr().out.splitlines()[-1])["counts"]
        if counts["honest"] >= 5 and counts.get("status_400", 0) >= 10 and counts.get("sockets", 0) >= 40:
            break
    assert counts["honest"] >= 5 and counts["status_400"] >= 10 and counts["sockets"] >= 40
