"""fused_moe between ranks: what each computes between the two products goes to all of them while it is computed."""

import torch
from torch import Tensor

from .._core import check
from .._core.peers import Landing
from ..silu_mul.op import ACTIVATIONS
from .swiglu import ROOM


def fused_moe_send(
    landing: Landing, gate_up_weight: Tensor, top_k: int, *, activation: str = "silu", backend: str | None = None
) -> str:
    """From now on fused_moe(..., between=landing) sends each rank's columns, where there are many rows, instead of a
    gather of them. All ranks call it, outside of graphs; it is verified there before it is trusted.

    landing         peers.landing(bytes): (Tk, J) of the largest T, or what is larger is gathered
    gate_up_weight  (E, 2I, H): this rank's, which are as many on each
    returns         why nothing is sent, which is the same on every rank; else ""
    bits            those of the gather: bytes are moved
    order           between two calls with rows, all ranks gather what they made of the first: the landing is written
                    again by then
    raises          as fused_moe does
    """
    check.tensor("fused_moe_send", "gate_up_weight", gate_up_weight, check.FLOATS, ndim=3)
    check.choice("fused_moe_send", "activation", activation, ACTIVATIONS)
    if ROOM.resolve(gate_up_weight.device, backend) != "cuda":
        return landing.agree("it takes this library's CUDA kernels")
    room = ROOM.module("cuda")
    with torch.no_grad():
        return room.admit_sends(landing, gate_up_weight, top_k, activation == "gelu_tanh")
