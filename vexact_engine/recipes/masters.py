"""fp32 masters of one process, whose model computes in roundings of them."""

import functools

import torch
from torch import Tensor, nn


class Masters(nn.Module):
    """A model's parameters in fp32, under the model's names, for an optimizer to move and a checkpoint to keep. What
    FSDP2 under MixedPrecisionPolicy does on one rank, with its bits and without its hooks, whose Python took as long as
    that of the layers.

    model   in fp32. Its parameters become roundings of the masters, to `dtype`; gradients go to the masters in fp32 as
            each is through, and are gone from the model. In fp32 they are the masters themselves
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self._rounded: dict[nn.Parameter, nn.Parameter] = {}  # master -> the model's
        masters: dict[Tensor, nn.Parameter] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():  # names of tied ones as well
            *path, leaf = name.split(".")
            holder = functools.reduce(_child, path, self)
            if not isinstance(tensor, nn.Parameter):
                holder.register_buffer(leaf, tensor)
                continue
            if tensor not in masters:
                masters[tensor] = self._master(tensor, dtype)
            holder.register_parameter(leaf, masters[tensor])

    def _master(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        if parameter.dtype == dtype:
            return parameter
        master = nn.Parameter(parameter.data)
        parameter.data = master.data.to(dtype)
        parameter.register_post_accumulate_grad_hook(functools.partial(_hand_up, master))
        self._rounded[master] = parameter
        return master

    def rounded(self) -> list[Tensor]:
        """Of each parameter, in their order, what the model computes with."""
        return [self._rounded.get(master, master) for master in self.parameters()]

    @torch.no_grad()
    def round(self) -> None:
        """After masters have moved: the model follows."""
        if self._rounded:
            torch._foreach_copy_(list(self._rounded.values()), list(self._rounded))


def _child(module: nn.Module, name: str) -> nn.Module:
    if name not in module._modules:
        module.add_module(name, nn.Module())
    return module._modules[name]


def _hand_up(master: nn.Parameter, parameter: nn.Parameter) -> None:
    gradient, parameter.grad = parameter.grad, None
    master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
