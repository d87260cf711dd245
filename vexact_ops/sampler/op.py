"""One draw per row of logits, with its log-probabilities: a function of that row, its seed and its position alone."""

import torch
from torch import Tensor

from .._core import check, native
from .._core.backend import Room
from .._core.operator import Operator

ROOM = Room("sampler", cpu=("cpu",), cuda=("triton",))
MIN_TEMPERATURE = 1e-30  # below it, ordinary logits overflow fp32


def sample(
    logits: Tensor,
    seeds: Tensor | int,
    positions: Tensor | int,
    *,
    temperature: Tensor | float = 1.0,
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
    min_p: Tensor | float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature) over the tokens that top_k, min_p and top_p allow.

    logits       (R, V) fp32, rows of any stride; -inf masks a token
    seeds        (R,) int64, or an int of 64 bits for all rows: the request's
    positions    (R,) int64, or an int: the position of the drawn token in its sequence
    temperature  (R,) fp32, or a number: 0 takes the largest logit (lower id on a tie), else at least 1e-30
    top_k        (R,) int64 | int32, or an int: keep the k largest; 0 keeps all
    min_p        (R,) fp32, or a number from 0 to 1: keep what is at least min_p times as probable as the likeliest
    top_p        (R,) fp32, or a number above 0 up to 1: of what top_k and min_p leave, renormalised, keep the shortest
                 prefix whose probability reaches top_p
                 All three keep a prefix of one order: logit descending, then id ascending.
    returns      ids (R,) int64; logprobs (R,) fp32, at that temperature (at 1 where it is 0) over the whole vocabulary;
                 raw logprobs (R,) fp32, at temperature 1. A row without a finite log-sum-exp (NaN or inf among its
                 logits, or -inf alone) gives id -1 and NaN: the caller fails that request and no other
    bits         of a row depend on its logits, seed, position and parameters. Of its blocks of 128 tokens the one with
                 the largest log-sum-exp + Gumbel number wins, as a sum of real numbers, the lower one on a tie, and one
                 more random number draws a token of it by its share. The numbers are functions of (seed, position,
                 block) and of (seed, position) by Philox4x32-10; a log-sum-exp over allowed tokens is summed in one
                 order, shares and the mass of a prefix in whole units of 2^-40. The ids are the same in every class for
                 the same logits, but where a draw falls within a rounding of a boundary (1 in about 10^6).
                 logprobs are those of log_softmax(logits / temperature) and of linear_logprobs, bit for bit
    raises       TypeError on dtype, ValueError on shape or parameters, BackendUnavailable. On a GPU, where to look at
                 values would make the host wait, a tensor's parameter out of range is not refused; a row that it
                 leaves no token gives id -1 and NaN
    source       Maddison, Tarlow, Minka, A* Sampling (2014): the largest of logit + Gumbel number over some tokens is
                 distributed as their log-sum-exp + one Gumbel number, whichever of them it is; Salmon et al., Parallel
                 random numbers: as easy as 1, 2, 3 (2011); Holtzman et al., arXiv 1904.09751; Nguyen et al., arXiv
                 2407.01082
    example
    >>> logits, seeds, positions = torch.randn(3, 50), torch.tensor([1, 2, 3]), torch.tensor([10, 4, 7])
    >>> ids, logprobs, raw_logprobs = vx.sample(logits, seeds, positions, temperature=0.7, top_p=0.9)
    >>> alone = vx.sample(logits[1:2], 2, 4, temperature=0.7, top_p=0.9)  # another slot of another batch
    >>> vx.same_bits(alone[0], ids[1:2]), vx.same_bits(alone[1], logprobs[1:2])
    (True, True)
    """
    check.tensor("sample", "logits", logits, (torch.float32,), ndim=2)
    if logits.shape[1] == 0:
        raise ValueError(f"sample: logits: got shape {tuple(logits.shape)}, expected (R, V) with V of at least 1")
    params = columns("sample", logits, seeds, positions, temperature, top_k, top_p, min_p)
    return _sample(logits.detach(), *params, ROOM.resolve(logits.device, backend))


# What a parameter must be, in words and as a test of its smallest and largest value (NaN fails every comparison).
_RULES = {
    "temperature": (f"0 or a finite number of at least {MIN_TEMPERATURE:g}", lambda low, high: 0 <= low <= high < 3e38),
    "top_k": ("at least 0", lambda low, high: low >= 0),
    "top_p": ("above 0 and at most 1", lambda low, high: 0 < low <= high <= 1),
    "min_p": ("from 0 to 1", lambda low, high: 0 <= low <= high <= 1),
}
_COLUMNS = {
    "seeds": torch.int64,
    "positions": torch.int64,
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
}


def columns(op: str, x: Tensor, *values: Tensor | float) -> tuple[Tensor, ...]:
    """seeds, positions, temperature, top_k, top_p and min_p, or the first ones of them, as (R,) on x's device."""
    return tuple(_column(op, x, name, value, dtype) for (name, dtype), value in zip(_COLUMNS.items(), values))


def check_columns(op: str, *params: Tensor) -> None:
    """The values of columns, on a CPU: elsewhere a look at them would make the host wait."""
    if params[0].device.type != "cpu" or not params[0].shape[0]:
        return
    for name, value in zip(_COLUMNS, params):
        if name in _RULES:
            low, high = value.aminmax()
            _rule(op, name, low.item(), high.item())
    temperature = params[2]
    if bool(((temperature > 0) & (temperature < MIN_TEMPERATURE)).any()):
        raise ValueError(f"{op}: temperature: got {temperature.tolist()}, expected {_RULES['temperature'][0]}")


def _rule(op: str, name: str, low, high) -> None:
    if name in _RULES and not _RULES[name][1](low, high):
        got = low if low == high or low != low else f"values from {low} to {high}"
        raise ValueError(f"{op}: {name}: got {got}, expected {_RULES[name][0]}")


def _column(op: str, x: Tensor, name: str, value, dtype: torch.dtype) -> Tensor:
    """The values of a tensor are checked where the op runs."""
    rows, whole = x.shape[0], dtype is torch.int64
    if isinstance(value, Tensor):
        check.tensor(op, name, value, (torch.int64, torch.int32) if whole else (torch.float32,))
        check.shape(op, name, value, (rows,))
        check.same_device(op, **{"logits" if op == "sample" else "hidden": x, name: value})
        return value.to(dtype)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        expected = f"({rows},) tensor or {'an int' if whole else 'a number'}"
        raise TypeError(f"{op}: {name}: got {type(value).__name__}, expected a {expected}")
    _rule(op, name, value, value)
    if name == "temperature" and 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"{op}: temperature: got {value}, expected {_RULES[name][0]}")
    if whole:
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"{op}: {name}: got {value}, expected an integer of 64 bits")
        value = value - 2**64 if value >= 2**63 else value
    return native.full(rows, value, dtype, x.device)


def _fwd(logits: Tensor, *args):
    params, backend = args[:-1], args[-1]
    check_columns("sample", *params)
    logits = logits if logits.shape[1] == 1 or logits.stride(1) == 1 else logits.contiguous()
    return ROOM.module(backend).sample(logits, *(p.contiguous() for p in params))


def _fwd_fake(logits, *args):
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.float32),
    )


_sample = Operator(
    "sample(Tensor logits, Tensor seeds, Tensor positions, Tensor temperature, Tensor top_k, Tensor top_p, "
    "Tensor min_p, str backend) -> (Tensor, Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)
