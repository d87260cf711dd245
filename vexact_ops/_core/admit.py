"""Verify, then trust: which fast kernels may stand in for a room's canonical one, proven byte for byte on this machine.

One policy for all rooms. A room proposes: candidates for one (op, dtype, static sizes, bucket of row counts), its
canonical kernel, and cases to verify them on, which hold what decides bits in practice (cancelling sums, M = 1, odd
sizes, special values). A candidate is admitted once it has the canonical kernel's bytes in every case, and among the
admitted ones the fastest is chosen. One that fails in whatever way is refused, with the reason, and never used.

Verdicts live in memory, and on disk in one file for each proposal, named by a digest of everything that could change
them: GPU, driver, torch, Triton, and the sources of the canonical kernel and of each candidate. So nothing on disk is
ever out of date, and processes that write at the same time do not meet. A file that is damaged, or a folder that cannot
be read or written, costs time, and nothing else. VEXACT_ADMIT=0 leaves everything to the canonical kernels.
"""

import contextlib
import contextvars
import functools
import hashlib
import json
import logging
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from . import choices, gpu, graph
from .disk import folder, machine, store
from .proof.bitwise import count_different
from .race import race_on_gpu

__all__ = [
    "Candidate",
    "ContextLost",
    "Decision",
    "Proposal",
    "Verdict",
    "admitted",
    "canonical_by_rule",
    "decided",
    "decisions",
    "must_admit",
    "race_on_gpu",
    "without_races",
]


_LOG = logging.getLogger(__name__)
_LONG = 1.0  # seconds of one proposal that are worth a line at the level INFO


@dataclass(frozen=True)
class Candidate:
    """A kernel that computes a proposal's op: a candidate, or the canonical one.

    name    tells it from the others
    run     (*case) -> a tensor, or a nested tuple or list of tensors and None
    source  a digest of all that computes it: our files, the extension's, versions of third parties
    """

    name: str
    run: Callable[..., object]
    source: str | None = None


@dataclass(frozen=True)
class Proposal:
    """What a room asks to have verified.

    key         says what it is for: op, dtype, static sizes, bucket of row counts
    candidates  in the order of preference, for where none is timed. With the canonical one among them it may be chosen
                for its speed, and is not verified against itself
    cases       makes the arguments to verify on; the last ones are what is timed
    race        (admitted candidates, arguments) -> microseconds of each, or the exception that it raised when it was
                captured; None: the first admitted candidate wins
    margin      the share of the canonical kernel's time that another has to win where that one is raced too
    ahead       whether what Triton compiles of the canonical kernel may be compiled before it runs, by calls with
                tensors that have no memory. No kernel of another compiler's may be given those
    """

    key: str
    candidates: Sequence[Candidate]
    canonical: Candidate
    cases: Callable[[], Sequence[tuple]]
    race: Callable[[Sequence[Candidate], tuple], Sequence[float | Exception]] | None = None
    margin: float = 0.0
    ahead: bool = True


@dataclass
class Verdict:
    """What the check of one candidate gave: `different` elements (None: it raised, `error` says what), its time."""

    candidate: str
    different: int | None
    us: float | None = None
    error: str | None = None

    @property
    def admitted(self) -> bool:
        return self.different == 0 and self.error is None

    def __str__(self) -> str:
        if self.admitted:
            return self.candidate if self.us is None else f"{self.candidate}, {self.us:.1f} us"
        return f"{self.candidate}: {self.error or f'{self.different} elements differ'}"


@dataclass(frozen=True)
class Decision:
    """Which kernel computes a proposal, and why.

    chosen   the canonical kernel where no other may
    final    whether this holds for the rest of the process: inside a CUDA graph nothing is verified
    short    whether memory was too short to verify: then it holds unless somebody must know (`must_admit`)
    seconds  that verifying took just now; 0 where it was known
    """

    key: str
    chosen: Candidate
    why: str
    verdicts: tuple[Verdict, ...] = ()
    final: bool = True
    short: bool = False
    seconds: float = 0.0


@functools.cache
def canonical_by_rule(name: str, why: str) -> Decision:
    """The canonical kernel computes what no candidate is proposed for."""
    return Decision("", Candidate(name, _not_to_be_run), why)


def _not_to_be_run(*_):
    raise RuntimeError("this names a kernel, and does not run one")


class ContextLost(RuntimeError):
    """A kernel that was being verified has broken the GPU's context: this process cannot go on using it."""


# --- the policy -----------------------------------------------------------------------------------------------------

_settling = graph.alone  # one at a time: they would disturb each other's timing, and double the memory
_decisions: dict[tuple[torch.device, str], Decision] = {}
_in_progress: set[tuple[torch.device, str]] = set()
watchers: list[Callable[[Decision], None]] = []  # told of every proposal that has just been verified


_must: contextvars.ContextVar[bool] = contextvars.ContextVar("vexact_must_admit", default=False)
_races: contextvars.ContextVar[bool] = contextvars.ContextVar("vexact_races", default=True)


@contextlib.contextmanager
def must_admit() -> Iterator[None]:
    """In a with block, of this thread or asyncio task: where memory is too short to verify a fast kernel, an op raises
    torch.OutOfMemoryError. Else it warns, and the canonical kernel, which may take ten times as long, serves for the
    rest of the process. For a start, whose caller can lower something and start again; what was left to the canonical
    kernel before for want of memory is verified again.

    example
    >>> with vx.must_admit():
    ...     vx.linear(torch.ones(2, 8), torch.ones(4, 8)).shape
    torch.Size([2, 4])
    """
    token = _must.set(True)
    try:
        yield
    finally:
        _must.reset(token)


@contextlib.contextmanager
def without_races() -> Iterator[None]:
    """In a with block, of this thread: what would have to be timed is left to whoever asks next, for other work goes on
    beside. The canonical kernel serves until then.

    example
    >>> with vx.without_races():
    ...     vx.linear(torch.ones(2, 8), torch.ones(4, 8)).shape
    torch.Size([2, 4])
    """
    token = _races.set(False)
    try:
        yield
    finally:
        _races.reset(token)


def admitted(proposal: Proposal, device: torch.device | str) -> Decision:
    """The kernel that computes this proposal on this device: known, read from disk, or verified now.

    Raises RuntimeError where a candidate has broken the GPU's context, for nothing can go on from there, and inside
    `must_admit` torch.OutOfMemoryError; no other fault of a candidate, of a case, or of the disk is an error.
    """
    device = gpu.with_index(device)
    _check(proposal)
    if _compiling():
        return _canonical(proposal, "nothing runs while kernels are compiled ahead", final=False)
    choices.is_off("VEXACT_CHOICES")  # raises here: below, what is raised is a kernel's fault
    if choices.is_off("VEXACT_ADMIT"):
        return _canonical(proposal, "VEXACT_ADMIT=0: nothing is verified")
    if not proposal.candidates:
        return _canonical(proposal, "there are no candidates")
    name = _digest(proposal)
    known = _known(proposal, device, name)
    if known is not None:
        return known
    with _undisturbed(device):
        if graph.settles_nothing(device):
            return _canonical(proposal, "nothing can be verified inside a CUDA graph", final=False)
        with _settling:
            known = _known(proposal, device, name)
            if known is not None:  # another thread was faster
                return known
            if (device, name) in _in_progress:
                return _canonical(proposal, "it is being verified", final=False)
            _in_progress.add((device, name))
            try:
                decision = _settle(proposal, device, name)
            finally:
                _in_progress.discard((device, name))
            if decision.final:  # what the kernels hold on to is not kept alive with it
                _decisions[device, name] = replace(decision, chosen=_named(decision.chosen), seconds=0.0)
    if proposal.race and decision.verdicts:
        choices.record(choices.KERNELS, decision.key, decision.chosen.name)
    for watcher in watchers if decision.seconds else ():
        watcher(decision)
    return decision


def decided(propose: Callable[..., Proposal]) -> Callable[..., Decision]:
    """Of a function (device, *hashable) -> Proposal, one that gives the decision, and asks once for each arguments."""
    known: dict[tuple, Decision] = {}

    @functools.wraps(propose)
    def decide(device: torch.device, *of) -> Decision:
        decision = known.get((device, of))
        if decision is None or (decision.short and _must.get()):
            decision = admitted(propose(device, *of), device)
            if decision.final:
                known[device, of] = decision
        return decision

    decide.known = known
    return decide


def decisions() -> list[Decision]:
    """All that was decided in this process."""
    return list(_decisions.values())


def _check(proposal: Proposal) -> None:
    for kernel in (proposal.canonical, *proposal.candidates):
        if kernel.source is None:
            raise ValueError(f"{proposal.key}: kernel {kernel.name!r} comes without a digest of its source")
    others = [kernel.name for kernel in proposal.candidates if kernel is not proposal.canonical]
    if len({*others, proposal.canonical.name}) <= len(others):
        raise ValueError(f"{proposal.key}: two kernels have one name: {sorted(others)}")


def _known(proposal: Proposal, device: torch.device, name: str) -> Decision | None:
    known = _decisions.get((device, name))
    if known is None or (known.short and _must.get()):
        return None
    kernels = (proposal.canonical, *proposal.candidates)
    return replace(known, chosen=next(kernel for kernel in kernels if kernel.name == known.chosen.name))


def _named(kernel: Candidate) -> Candidate:
    return Candidate(kernel.name, _not_to_be_run, kernel.source)


def _canonical(proposal: Proposal, why: str, **more) -> Decision:
    return Decision(proposal.key, proposal.canonical, why, **more)


def _settle(proposal: Proposal, device: torch.device, name: str) -> Decision:
    base = folder()
    path = base / machine(device) / f"{name}.json" if base else None
    verdicts = _read(proposal, path)
    if verdicts is not None:
        return _choose(proposal, verdicts, 0.0)
    begin = time.perf_counter()
    try:
        named = _verify_named(proposal, device)
        if named is None and proposal.race and len(proposal.candidates) > 1 and not _races.get():
            return _canonical(proposal, "it is to be timed", final=False)
        verdicts, lasting = named or _verify(proposal, device)
    except ContextLost:
        raise
    except Exception as failure:  # of the canonical kernel, of the cases, or of the memory
        _survived(proposal, proposal.canonical, device, failure)
        short = isinstance(failure, torch.OutOfMemoryError)
        if _must.get() and _no_memory(failure):
            raise torch.OutOfMemoryError(
                f"{proposal.key}: no memory to verify faster kernels than the canonical one ({_reason(failure)}); "
                "`vexact doctor --admit` verifies them ahead of time, and with VEXACT_ADMIT=0 canonical ones serve"
            ) from failure
        why = "no memory to verify faster kernels" if short else f"its cases could not be made: {_reason(failure)}"
        hint = ", and may take ten times as long (`vexact doctor --admit` verifies ahead of time)" if short else ""
        warnings.warn(f"{proposal.key}: {why}: the canonical kernel serves it in this process{hint}", stacklevel=4)
        return _canonical(proposal, why, short=short, seconds=time.perf_counter() - begin)
    if lasting:
        _write(proposal, path, verdicts)
    decision = _choose(proposal, verdicts, time.perf_counter() - begin)
    level = logging.INFO if decision.seconds >= _LONG else logging.DEBUG
    told = decision.key, decision.seconds, len(verdicts), decision.chosen.name
    _LOG.log(level, "%s: verified in %.1f s, of %d kernels chosen: %s", *told)
    return decision


def _choose(proposal: Proposal, verdicts: Sequence[Verdict], seconds: float) -> Decision:
    best = fastest(verdicts, proposal.canonical.name, proposal.margin)
    if best is None:
        refused = "; ".join(str(v) for v in verdicts)
        return Decision(proposal.key, proposal.canonical, f"all refused: {refused}", tuple(verdicts), seconds=seconds)
    chosen = next(c for c in proposal.candidates if c.name == best)
    if proposal.race and len(verdicts) < len(proposal.candidates):
        why = "the fastest where this kind of GPU was timed; here it has the canonical kernel's bytes"
        return Decision(proposal.key, chosen, why, tuple(verdicts), seconds=seconds)
    among = sum(v.admitted for v in verdicts)
    timed = next(v.us for v in verdicts if v.candidate == best) is not None
    if best != fastest(verdicts):
        why = f"none of {among} that have its bytes is faster by more than {proposal.margin:.0%}"
    elif timed:
        why = f"the fastest of {among} that have the canonical kernel's bytes"
    elif among == len(verdicts) == 1:
        why = "it has the canonical kernel's bytes"
    else:
        why = f"the first of {among} that have the canonical kernel's bytes"
    return Decision(proposal.key, chosen, why, tuple(verdicts), seconds=seconds)


def fastest(verdicts: Sequence[Verdict], favourite: str | None = None, margin: float = 0.0) -> str | None:
    """The name of the fastest admitted candidate (the first one where none was timed), None where none is admitted; of
    the favourite one where no other's time is shorter by more than the margin."""
    admitted = [v for v in verdicts if v.admitted]
    if not admitted:
        return None

    def time_of(v: Verdict) -> float:
        us = v.us if v.us is not None else 0.0
        return us * (1 - margin) if v.candidate == favourite else us

    return min(admitted, key=time_of).candidate


def _verify_named(proposal: Proposal, device: torch.device) -> tuple[list[Verdict], bool] | None:
    """The verdict on the one candidate that was the fastest where this kind of GPU was timed, which needs no race; None
    where none is known or it is refused: then all are verified."""
    name = choices.kernel(proposal.key, device) if proposal.race else None
    named = [candidate for candidate in proposal.candidates if candidate.name == name]
    if not named or len(proposal.candidates) == 1:
        return None
    if named[0] is proposal.canonical:
        return [Verdict(name, 0)], True
    verdicts, lasting = _verify(replace(proposal, candidates=named, race=None), device)
    return (verdicts, lasting) if verdicts[0].admitted else None


def _verify(proposal: Proposal, device: torch.device) -> tuple[list[Verdict], bool]:
    """The verdicts, and whether they may be kept: what CUDA, the memory or the file system says is of this moment."""
    lasting = True

    def prepared():
        cases = list(proposal.cases())
        _compile(proposal, cases, device)
        return cases, [proposal.canonical.run(*case) for case in cases], _sums(cases)

    cases, expected, before = prepared()
    verdicts = []
    for candidate in proposal.candidates:
        if candidate is proposal.canonical:
            verdicts.append(Verdict(candidate.name, 0))
            continue
        different, error = 0, None
        try:
            for case, want in zip(cases, expected):
                different = _count(candidate.run(*case), want)
                if different:
                    break
        except torch.OutOfMemoryError:  # says nothing about the candidate
            raise
        except Exception as failure:
            if _must.get() and _no_memory(failure):
                raise
            _survived(proposal, candidate, device, failure)
            different, error = None, _reason(failure)
            lasting &= not _of_this_moment(failure)
        if before != _sums(cases):
            different, error = None, error or "it changes its operands"
            cases, expected, before = prepared()
        verdicts.append(Verdict(candidate.name, different, error=error))
    del expected
    racing = [(c, v) for c, v in zip(proposal.candidates, verdicts) if v.admitted]
    if proposal.race and len(racing) > 1:
        times = proposal.race([c for c, _ in racing], cases[-1])
        for (candidate, verdict), us in zip(racing, times):
            if isinstance(us, Exception):
                if _must.get() and _no_memory(us):
                    raise us
                _survived(proposal, candidate, device, us)
                verdict.different, verdict.error = None, f"in a CUDA graph: {_reason(us)}"
                lasting &= not _of_this_moment(us)
            else:
                verdict.us = us
    return verdicts, lasting


_compiled: set[tuple] = set()


def _compile(proposal: Proposal, cases: Sequence[tuple], device: torch.device) -> None:
    """What Triton compiles of the canonical kernel, side by side and before anything runs: one by one it is most of a
    first start's time. It decides nothing: what fails here is met again where it runs. Candidates are mostly other
    compilers'.

    Once for proposals that differ in numbers alone, for these have mostly the same kernels, and looking for others
    takes some milliseconds each time."""
    kind = device, re.sub(r"\d+", "", proposal.key)
    if not proposal.ahead or device.type != "cuda" or kind in _compiled:
        return
    if kernels := sys.modules.get(f"{__package__}.triton"):
        _compiled.add(kind)
        with contextlib.suppress(Exception):
            kernels.compile_calls(proposal.canonical.run, cases, device)


def _compiling() -> bool:
    kernels = sys.modules.get(f"{__package__}.triton")
    return kernels is not None and kernels.compiling()


def tensors_of(value) -> Iterator[Tensor]:
    """The tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_of(one)


def _sums(cases: list[tuple]) -> list[int]:
    """A sum over the bits of every operand, to see whether a candidate has changed one. The host waits once for all."""
    once = {(t.data_ptr(), t.shape, t.stride(), t.dtype): t for t in tensors_of(cases)}  # cases share operands
    sums = [_sum_of_bits(t) for t in once.values()]
    return torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []


def _sum_of_bits(t: Tensor) -> Tensor:
    """() int64, of integers as wide as the layout allows. torch makes an int64 copy of narrower ones: so of a part at a
    time."""
    for kind in (torch.int64, torch.int32, torch.int16, torch.uint8):
        if kind.itemsize >= t.element_size():
            with contextlib.suppress(RuntimeError):
                bits = t.view(kind)
                break
    if bits.dtype == torch.int64 or bits.numel() <= 1 << 24:
        return bits.sum()
    rows = max(1, (1 << 24) // bits[0].numel())
    return torch.stack([part.sum() for part in bits.split(rows)]).sum()


def _count(actual, expected) -> int:
    """How many elements differ in their bits (NaN are alike). Raises AssertionError where the structure differs."""
    if isinstance(expected, tuple | list):
        if not isinstance(actual, tuple | list) or len(actual) != len(expected):
            raise AssertionError(f"differs in kind: {type(actual).__name__} against {len(expected)} results")
        return sum(_count(a, e) for a, e in zip(actual, expected))
    if expected is None or actual is None:
        if actual is not expected:
            raise AssertionError(f"differs in kind: {type(actual).__name__} against {type(expected).__name__}")
        return 0
    if not isinstance(actual, Tensor):
        raise AssertionError(f"differs in kind: {type(actual).__name__} against a tensor")
    bits = {2: torch.int16, 4: torch.int32}.get(expected.element_size())
    alike = bits and actual.shape == expected.shape and actual.dtype == expected.dtype
    # a fraction of count_different's time and memory where nothing differs
    if alike and torch.equal(actual.contiguous().view(bits), expected.contiguous().view(bits)):
        return 0
    return count_different(actual, expected)


def _reason(failure: Exception) -> str:
    lines = str(failure).splitlines()
    text = lines[0].strip() if lines else ""
    if isinstance(failure, RuntimeError | AssertionError) and text:
        return text
    return f"{type(failure).__name__}: {text}".rstrip(": ")


def _no_memory(failure: Exception) -> bool:
    """Of the device or the host; other libraries than torch say so in words."""
    kinds = torch.OutOfMemoryError | MemoryError
    return isinstance(failure, kinds) or re.search("out of memory", str(failure), re.I) is not None


def _of_this_moment(failure: Exception) -> bool:
    """Whether the same kernel may well succeed in another process: then its failure is not kept on disk."""
    kinds = (OSError, MemoryError, ImportError, getattr(torch, "AcceleratorError", MemoryError))
    text = f"{type(failure).__name__}: {failure}"
    return isinstance(failure, kinds) or re.search(r"cuda|cublas|cudnn|driver|out of memory", text, re.I) is not None


def _survived(proposal: Proposal, candidate: Candidate, device: torch.device, failure: Exception) -> None:
    """Raises where the GPU's context did not outlive a candidate's failure."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as gone:
        raise ContextLost(
            f"{proposal.key}: the check of kernel {candidate.name!r} broke the context of {device}, and this process "
            f"cannot go on using it ({_reason(failure)}). Nothing was kept on disk. Start again with VEXACT_ADMIT=0 to "
            "leave everything to the canonical kernels, and please report this"
        ) from gone


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """What the caller has switched on must not reach the kernels that are compared."""
    default = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for kind in {"cpu", device.type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch._C.DisableTorchFunction())  # a default device, and modes of the caller
        if default != torch.float32:  # of the whole process, so it is only touched where it has to be
            stack.callback(torch.set_default_dtype, default)
            torch.set_default_dtype(torch.float32)
        yield


# --- on disk --------------------------------------------------------------------------------------------------------


def _digest(proposal: Proposal) -> str:
    """What the verdicts hold for, but for the machine. With other candidates it is another proposal."""
    kernels = sorted((kernel.name, kernel.source) for kernel in proposal.candidates)
    of = [proposal.key, proposal.canonical.name, proposal.canonical.source, kernels]
    return hashlib.sha256(json.dumps(of).encode()).hexdigest()[:32]


def _read(proposal: Proposal, path: Path | None) -> list[Verdict] | None:
    """The stored verdicts, or None where there are none that can be read."""
    try:
        stored = json.loads(path.read_text()) if path else None
        verdicts = [Verdict(**v) for v in stored["verdicts"]]
        same = stored["key"] == proposal.key and all(_sound(v) for v in verdicts)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if not same:
        return None
    names, proposed = [v.candidate for v in verdicts], [c.name for c in proposal.candidates]
    one = proposal.race and len(names) == 1 and names[0] in proposed and verdicts[0].admitted  # as _verify_named has it
    return verdicts if one or sorted(names) == sorted(proposed) else None


def _sound(v: Verdict) -> bool:
    return (
        isinstance(v.candidate, str)
        and (v.different is None or type(v.different) is int)
        and (v.us is None or (isinstance(v.us, int | float) and math.isfinite(v.us)))
        and (v.error is None or isinstance(v.error, str))
    )


def _write(proposal: Proposal, path: Path | None, verdicts: Sequence[Verdict]) -> None:
    store(path, json.dumps({"key": proposal.key, "verdicts": [asdict(v) for v in verdicts]}))
