"""What a run is known by: digests of parameters, which shards of them add up to."""

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_BITS = 20  # of the table of factors: 8 MiB
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.lru_cache(2)
def _factors(device: torch.device) -> Tensor:
    """(2^20,) odd int64: what an element's bits are multiplied by, by its place."""
    made = torch.randint(-(2**62), 2**62, (1 << _BITS,), generator=torch.Generator().manual_seed(0))
    return (2 * made + 1).to(device)


def bits_sum(values: Tensor, start: int = 0) -> Tensor:
    """() int64 on the values' device: the sum, modulo 2^64, of each element's bits times an odd factor of its place.

    values   contiguous, any dtype of 1 to 8 bytes, any shape
    start    the place of its first element in the whole tensor, flattened: sums of parts add up to the whole's
    """
    flat = values.detach().reshape(-1).view(_INTEGERS[values.element_size()])
    factors, total = _factors(flat.device), flat.new_zeros((), dtype=torch.int64)
    done = 0
    while done < len(flat):
        block, first = divmod(start + done, 1 << _BITS)
        part = flat[done : done + (1 << _BITS) - first]
        part = part ^ (part >> 16)  # values that bf16 holds have nothing in the lower half of fp32
        total += (part.long() * factors[first : first + len(part)]).sum() * (2 * block + 1)
        done += len(part)
    return total


def of_parameters(parameters: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """name -> 16 hexadecimal digits, equal on every rank: of whole parameters, however FSDP2 has cut them by rows.

    Every rank has to call. A difference of one bit changes a digest; two that differ in more are equal by chance once
    in 2^64. It guards against accidents, not against anybody: for that there is `sha256`.
    """
    first = group is None or dist.get_rank(group) == 0
    parts = [_local(t) if first or hasattr(t, "to_local") else (t[:0], 0) for t in parameters.values()]
    total = torch.stack([bits_sum(*part) for part in parts])
    if group is not None:
        dist.all_reduce(total, group=group)
    return {name: f"{value % 2**64:016x}" for name, value in zip(parameters, total.tolist())}


def _local(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's elements and the place of the first."""
    if not hasattr(tensor, "to_local"):
        return tensor, 0
    local, rows = tensor.to_local(), -(-tensor.shape[0] // tensor.device_mesh.size())  # as torch.chunk cuts
    before = min(tensor.device_mesh.get_local_rank() * rows, tensor.shape[0])
    return local, before * (tensor.numel() // max(tensor.shape[0], 1))


def sha256(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """64 hexadecimal digits of all parameters: names, dtypes, shapes and bytes, in the order of names.

    Every rank has to call: each is gathered whole, one at a time.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(parameters, key=lambda pair: pair[0]):
        whole = tensor.detach()
        whole = (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).cpu().contiguous()
        digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def of_answers(answers: Iterable[tuple[Sequence[int], Tensor, float]]) -> str:
    """16 hexadecimal digits of (token ids, fp32 log-probabilities, reward) of a step's answers, in their order."""
    digest = hashlib.sha256()
    for token_ids, logprobs, reward in answers:
        digest.update(repr((list(token_ids), logprobs.tolist(), reward)).encode())
    return digest.hexdigest()[:16]
