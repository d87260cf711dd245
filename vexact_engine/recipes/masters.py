"""fp32 masters of one process, whose model computes in roundings of them."""

import functools

import torch
from torch import Tensor, nn

_LARGE = 1 << 22  # numbers for which a launch of its own is worth it
_BOUNDARY = 128  # numbers: each tensor's first stands where one of its own would


class Masters(nn.Module):
    """A model's parameters in fp32, under the model's names, for an optimizer to move and a checkpoint to keep. What
    FSDP2 under MixedPrecisionPolicy does on one rank, with its bits and without its hooks, whose Python took as long as
    that of the layers.

    model   in fp32. Its parameters become roundings of the masters, to `dtype`; gradients go to the masters in fp32 as
            each is through, and are gone from the model. In fp32 they are the masters themselves. All masters lie in
            one piece of memory and all roundings in another: a step rounds them at once
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self._rounded: dict[nn.Parameter, nn.Parameter] = {}  # master -> the model's
        self._flat: tuple[Tensor, Tensor] | None = None
        tensors = model.state_dict(keep_vars=True)
        masters = self._masters({t: None for t in tensors.values() if isinstance(t, nn.Parameter)}, dtype)
        for name, tensor in tensors.items():  # names of tied ones as well
            *path, leaf = name.split(".")
            holder = functools.reduce(_child, path, self)
            if isinstance(tensor, nn.Parameter):
                holder.register_parameter(leaf, masters[tensor])
            else:
                holder.register_buffer(leaf, tensor)

    def _masters(self, parameters: dict[nn.Parameter, None], dtype: torch.dtype) -> dict[nn.Parameter, nn.Parameter]:
        others = [p for p in parameters if p.dtype != dtype]
        if not others:
            return {p: p for p in parameters}
        starts, size = [], 0
        for parameter in others:
            starts.append(size)
            size += -(-parameter.numel() // _BOUNDARY) * _BOUNDARY
        kind = {"device": others[0].device}
        self._flat = torch.zeros(size, dtype=torch.float32, **kind), torch.zeros(size, dtype=dtype, **kind)
        found = {}
        for parameter, start in zip(others, starts):
            master, rounded = (flat[start : start + parameter.numel()].view(parameter.shape) for flat in self._flat)
            master.copy_(parameter.data)
            parameter.data = rounded.copy_(master)
            found[parameter] = nn.Parameter(master)
            parameter.register_post_accumulate_grad_hook(functools.partial(_hand_up, found[parameter]))
            self._rounded[found[parameter]] = parameter
        return {p: found.get(p, p) for p in parameters}

    def rounded(self) -> list[Tensor]:
        """Of each parameter, in their order, what the model computes with."""
        return [self._rounded.get(master, master) for master in self.parameters()]

    @property
    def counts(self) -> bool:
        """Whether `round` knows how many have moved."""
        return self._flat is not None and len(self._rounded) == len(list(self.parameters()))

    @torch.no_grad()
    def round(self) -> Tensor | None:
        """After masters have moved: the model follows. -> () int64: how many of its weights are other numbers than
        before; None where they are the masters"""
        if self._flat is None:
            return None
        masters, rounded = self._flat
        if rounded.is_cuda:
            from . import triton

            return triton.round_into(rounded, masters)
        before = rounded.clone()
        return (rounded.copy_(masters) != before).sum()


def _child(module: nn.Module, name: str) -> nn.Module:
    if name not in module._modules:
        module.add_module(name, nn.Module())
    return module._modules[name]


def _hand_up(master: nn.Parameter, parameter: nn.Parameter) -> None:
    gradient, parameter.grad = parameter.grad, None
    if master.grad is None:
        master.grad = torch.empty_like(master)
        torch._foreach_copy_([master.grad], [gradient])  # a lone copy_ that widens takes twice as long on a GPU
    elif gradient.is_cuda and gradient.numel() >= _LARGE and gradient.is_contiguous():
        from . import triton

        triton.add_into(master.grad, gradient)
    else:
        master.grad.add_(gradient)
