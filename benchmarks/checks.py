"""What is asked of a provider before it is timed: our bits, whether its rows depend on their neighbours, and, with
--refcheck, how far it is from float64."""

import importlib
import math
from collections.abc import Callable

from torch import Tensor

from vexact_ops.testing import count_different

from .peers import first_line, say_once


def as_tuple(value) -> tuple[Tensor, ...]:
    """Some libraries give None in the place of what was not asked for."""
    return tuple(v for v in value if v is not None) if isinstance(value, tuple | list) else (value,)


def assert_same_bits(case, args: tuple) -> None:
    actual, expected = case.bits(*args)
    different = sum(count_different(a, e) for a, e in zip(as_tuple(actual), as_tuple(expected), strict=True))
    if different:
        raise AssertionError(f"{case.room} {case.name}: {different} elements differ; nothing was timed")


def row_alone(*batched: int, results: int | None = None) -> Callable[..., tuple]:
    """What Case.alone may be where rows are rows: the first, the middle and the last row alone and in their batch.

    batched   places of the inputs that have a row for each row
    results   so many of the results have one too; None: all
    """

    def alone(fn, *args):
        count = args[batched[0]].shape[0]
        rows = sorted({0, count // 2, count - 1}) if count > 1 else []
        whole = as_tuple(fn(*_copies(args)))[:results] if rows else ()
        ones = []
        for row in rows:
            some = [a[row : row + 1].contiguous() if i in batched else a for i, a in enumerate(_copies(args))]
            ones += as_tuple(fn(*some))[:results]
        return tuple(ones), tuple(t[row : row + 1] for row in rows for t in whole)

    return alone


def _copies(args: tuple) -> list:
    """Some libraries write into their inputs."""
    return [a.clone() if isinstance(a, Tensor) else a for a in args]


def rows_alone(case, name: str, fn: Callable) -> dict[str, int] | None:
    """{"differ": elements, "of": elements}: rows alone against the same rows in their batch. None where there is
    nothing to compare: a single row, or a provider that raises, which is said."""
    if case.alone is None:
        return None
    try:
        actual, expected = (as_tuple(t) for t in case.alone(fn, *case.make()))
        different = sum(count_different(a, e) for a, e in zip(actual, expected, strict=True))
    except Exception as error:
        if name.startswith("vexact"):
            raise
        say_once(f"{case.room}: peer {name}: {first_line(error)}")
        return None
    found = {"differ": different, "of": sum(t.numel() for t in expected)}
    if name.startswith("vexact") and found["differ"]:
        raise AssertionError(f"{case.room} {case.name}: {found['differ']} elements differ; nothing was timed")
    return found if found["of"] else None


def verdict(name: str, alone: dict[str, int] | None) -> bool | None:
    """Ours was compared already, with more than its rows alone."""
    if name.startswith("vexact"):
        return True
    return None if alone is None else alone["differ"] == 0


def reference(room: str, name: str) -> Callable:
    """A room's meaning in plain PyTorch, in the precision of what it is called with."""
    return getattr(importlib.import_module(f"vexact_ops.{room}.reference"), name)


def errors(case, providers: dict[str, Callable]) -> dict[str, dict]:
    """Name -> {"rms": of the error over that of the exact values, "max": the largest over the largest exact one}; ours
    also {"most": what it may be, "accurate": whether it is}: twice the stock op's in the same dtype, one rounding of
    the exact values, or what the roundings of one accumulator come to."""
    if case.reference is None:
        return {}
    args = case.make()
    exact = as_tuple(case.reference(*(a.double() if a.is_floating_point() else a for a in args)))
    found, least = {}, 0.0
    for name, fn in providers.items():
        try:
            pairs = list(zip(as_tuple(fn(*_copies(args))), exact))
            for got, expected in pairs:
                if got.shape != expected.shape:
                    raise ValueError(f"gives {tuple(got.shape)}, expected {tuple(expected.shape)}")
            found[name] = {"rms": _rms(pairs), "max": _largest(pairs)}
        except Exception as error:
            if name.startswith("vexact"):
                raise
            say_once(f"{case.room}: peer {name}: {first_line(error)}")
            continue
        if name == "vexact":
            least = _rms([(e.to(g.dtype), e) for g, e in pairs])
    accumulated = 0.4 * 2.0**-24 * math.sqrt(case.terms)
    for name, error in found.items():
        if name.startswith("vexact"):
            most = max(2 * found.get(case.stock, {"rms": 0.0})["rms"], least, accumulated)
            error |= {"most": float(f"{most:.4g}"), "accurate": error["rms"] <= most}
    return found


def _rms(pairs: list[tuple[Tensor, Tensor]]) -> float:
    wrong = sum(float((g.double() - e).square().sum()) for g, e in pairs)
    whole = sum(float(e.square().sum()) for _, e in pairs)
    return float(f"{math.sqrt(wrong / whole) if whole else math.sqrt(wrong):.4g}")


def _largest(pairs: list[tuple[Tensor, Tensor]]) -> float:
    wrong = max(float((g.double() - e).abs().max()) for g, e in pairs)
    whole = max(float(e.abs().max()) for _, e in pairs)
    return float(f"{wrong / whole if whole else wrong:.4g}")


# Of a program's record: numbers of ours that have other bits than they should, or what has.
_OTHER_BITS = ("differ", "again_differ", "verify_mismatched")


def failures(record: dict) -> list[str]:
    """What a program's record of ours says is not as it should be; of a peer's nothing is."""
    if not record["backend"].startswith("vexact"):
        return []
    found = [*record.get("failures", ()), *(f"{name}: {record[name]}" for name in _OTHER_BITS if record.get(name))]
    found += [f"after a sleep: differ: {one['differ']}" for one in record.get("sleep", ()) if one.get("differ")]
    return [f"{record['room']} {record['case']}: {text}" for text in found]


def said(error: dict | None) -> str:
    """The end of a line: how far from float64."""
    if error is None:
        return ""
    verdict = (
        {True: "", False: f" EXPECTED AT MOST {error.get('most'):.2g}"}[error["accurate"]] if "most" in error else ""
    )
    return f"  {error['rms']:.2g} from float64{verdict}"
