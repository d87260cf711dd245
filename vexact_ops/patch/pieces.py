"""The pieces of a decoder that have an aligned form: how each is recognised, and what its forward becomes.

Nothing is recognised by its name alone. A piece is tried: the module's own code runs on small random float64 inputs
with small random weights (a twin; the model's tensors are neither read nor changed) and must agree with the plain
meaning of the op that replaces it. So a class that changes in another version of transformers, or that looks like
another one but scales, shifts or rounds differently, is refused instead of silently replaced.
"""

import functools
import inspect
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import vexact_ops as vx

from ..layer_norm.reference import layer_norm_ref
from ..rmsnorm.op import STYLES
from ..rmsnorm.reference import rmsnorm_ref
from ..rope.reference import rope_ref
from ..silu_mul.gelu import FORMS as GELUS
from ..silu_mul.op import ACTIVATIONS
from ..silu_mul.reference import gelu_ref, silu_mul_ref
from .batch import attend
from .forwards import CACHES, LAYERS_CACHE
from .gates import with_sigmoid
from .slots import without_slots


class NotCovered(Exception):
    """Why a module cannot be replaced."""


def class_of(module: nn.Module) -> type:
    """Its class, or the one that FSDP2 made another of."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


PLAIN = frozenset({Tensor, nn.Parameter, DTensor})  # FSDP2 makes the last one plain in a forward


def computes_itself(kind: type) -> bool:
    """Whether a class of tensors has an arithmetic of its own, as quantised ones have. Those that torch traces with
    stand for plain ones."""
    if kind in PLAIN or any(base.__module__.startswith("torch._subclasses.") for base in kind.__mro__):
        return False
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    known = Tensor.__torch_function__.__func__, nn.Parameter.__torch_function__
    return function not in known or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def check_plain(module: nn.Module) -> None:
    """Ops read the memory of a weight, and know no arithmetic of its own."""
    for name, value in module._parameters.items():
        if value is not None and computes_itself(type(value)):
            raise NotCovered(
                f"its {name} is a {type(value).__name__}, not a plain tensor: put the one in that it means"
            )


def random(*shape: int, seed: int = 0) -> Tensor:
    """Float64, from a generator of its own: patching leaves the global random state alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def twin(module: nn.Module, modules: dict[str, nn.Module] | None = None, parameters: dict[str, Tensor] | None = None):
    """The same object with other children and parameters; the original is not touched."""
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    other.__dict__.pop("forward", None)
    other.__dict__["_modules"] = {**module._modules, **(modules or {})}
    other.__dict__["_parameters"] = {
        **module._parameters,
        **{name: nn.Parameter(value) for name, value in (parameters or {}).items()},
    }
    return other


def small_linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    layer = torch.nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False, dtype=torch.float64)
    layer.weight.data.copy_(random(outputs, inputs, seed=seed) / inputs**0.5)
    return layer


def agree(got, expected, tolerance: float = 1e-4) -> bool:
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return False
    error = (got.double() - expected).abs().max()
    return bool(error <= tolerance * expected.abs().max())


def stock(module: nn.Module) -> Callable:
    """The forward that the module's class defines, on this module."""
    return without_slots(type(module).forward).__get__(module)


def run_stock(module: nn.Module, *args, forward: Callable | None = None, **kwargs):
    """As stock(module)(...), or that forward's, without gradients. What it raises is a reason not to cover it: said in
    words of the module's, not of the trial's, whose exception is the cause."""
    forward = forward or stock(module)
    takes = inspect.signature(forward)
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(p.name for p in takes.parameters.values() if p.kind is not p.VAR_KEYWORD)
        raise NotCovered(f"its forward takes other arguments ({names}) than what an aligned op replaces") from error
    try:
        with torch.no_grad():
            return forward(*args, **kwargs)
    except Exception as error:
        raise NotCovered(
            "its forward does something else than what it looks like: it raises on small tensors"
        ) from error


# linear


def linear_forward(self, input):
    return vx.linear(input, self.weight, self.bias)


def head_forward(self, input, then=None):
    """`then(input, weight)` instead of logits: in the output layer's own call its weight is whole, even if sharded."""
    size, weight = input.shape[:-1], self.weight
    if self.bias is not None:
        input, weight = _with_bias(input, weight, self.bias)
    if then is not None:
        return then(input, weight)
    logits = vx.linear_logits(input.reshape(-1, input.shape[-1]), weight)
    return logits.view(*size, -1)


def _with_bias(input: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A bias is one more column of the weight, of an input that is 1: what a logit's sum ends with, in fp32. With zeros
    behind it, up to a width at which rows stay aligned to 16 bytes."""
    more = _with_column(weight.shape[1]) - weight.shape[1] - 1
    ones = nn.functional.pad(input.new_ones(1), (0, more)).expand(*input.shape[:-1], 1 + more)
    return torch.cat((input, ones), -1), torch.cat((weight, nn.functional.pad(bias[:, None], (0, more))), -1)


def _with_column(width: int) -> int:
    return -(-(width + 1) // 8) * 8


def head_shape(head: nn.Module) -> tuple[int, int]:
    """Of the matrix by which the ops compute its logits."""
    tokens, width = head.weight.shape
    return tokens, width if getattr(head, "bias", None) is None else _with_column(width)


def is_linear(module: nn.Module) -> bool:
    """A linear layer, or one that PEFT wraps, which is judged on its own."""
    return isinstance(module, nn.Linear) or isinstance(module._modules.get("base_layer"), nn.Linear)


def check_linear(module: nn.Linear) -> None:
    if type(module).forward is not nn.Linear.forward or torch.nn.utils.parametrize.is_parametrized(module):
        raise NotCovered("a linear layer with a forward or a parametrization of its own")
    for name, value in module._parameters.items():
        if value is not None and type(value) not in PLAIN:
            raise NotCovered(f"its {name} is a {type(value).__name__}, not a plain tensor")


def score_head(model: nn.Module) -> nn.Linear | None:
    """What makes a sequence's scores, of a model of a decoder and a linear layer named score, as transformers'
    classifiers of sequences are; None of others."""
    children = dict(model.named_children())
    score = children.get("score")
    base = getattr(model, "base_model", None)
    if base is model or len(children) != 2 or not isinstance(score, nn.Linear):
        return None
    return score if any(child is base for child in children.values()) else None


# norms


def is_layer_norm(module: nn.Module) -> bool:
    """torch's, one derived from it, or one of transformers that says what it normalises, with parameters or without."""
    return not module._modules and len(getattr(module, "normalized_shape", ())) == 1


def _eps_name(module: nn.Module) -> str | None:
    names = ("variance_epsilon", "eps", "epsilon")
    return next((name for name in names if isinstance(getattr(module, name, None), float)), None)


_EPS = 1e-5  # of torch's layer_norm, where a module names none; the trial tells


def _eps(module: nn.Module, name: str) -> float:
    eps = getattr(module, name)
    if isinstance(eps, int | float) and not 0 < eps < float("inf"):
        raise NotCovered(f"its {name} is {eps}, expected a number above 0")
    return eps


def layer_norm_forward(module: nn.Module) -> tuple[Callable, str]:
    """The aligned forward of a layer norm, and what it multiplies by and adds."""
    held = {name: p for name, p in module._parameters.items() if p is not None}
    if set(held) - {"weight", "bias"} or any(p.dim() != 1 for p in held.values()):
        raise NotCovered("it holds parameters that no aligned op covers")
    shape = next((p.shape for p in held.values()), getattr(module, "normalized_shape", None))
    if shape is None:
        raise NotCovered("not a layer norm: it does not say what it normalises")
    n, eps_name = shape[0], _eps_name(module)
    eps = _EPS if eps_name is None else _eps(module, eps_name)
    parameters = {name: random(n, seed=i) for i, name in enumerate(held, 3)}
    x = random(3, n, seed=2) + 1
    x[0] = (x[0] - x[0].mean()) * eps**0.5  # so small that epsilon shows
    got = run_stock(twin(module, parameters=parameters), x)
    weight, bias = parameters.get("weight"), parameters.get("bias")
    for plus in (0, 1)[: 1 + (weight is not None)]:
        if agree(got, layer_norm_ref(x, weight + plus if plus else weight, bias, eps)):
            words = [("1 + weight" if plus else "weight")] * (weight is not None) + ["bias"] * (bias is not None)
            return _layer_norm_forward(eps_name, bool(plus)), ", ".join(words) or "no parameters"
    raise NotCovered("not a layer norm that an aligned op computes")


@functools.cache
def _layer_norm_forward(eps_name: str | None, plus: bool) -> Callable:
    def layer_norm_forward(self, x):
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        eps = _EPS if eps_name is None else getattr(self, eps_name)
        return vx.layer_norm(x, weight + 1 if plus else weight, bias, eps)

    return layer_norm_forward


def head_norm_forward(module: nn.Module) -> tuple[Callable, str]:
    """The aligned forward of a layer norm of heads, each of which has a weight of its own; rounded once, as it is."""
    weight = module._parameters.get("weight")
    if set(module._parameters) != {"weight"} or weight is None or weight.dim() != 2:
        raise NotCovered("not a layer norm of heads: it has no weight for each")
    eps_name = _eps_name(module)
    if eps_name is None:
        raise NotCovered("not a layer norm of heads: it has no epsilon")
    heads, n = weight.shape
    eps, weight, x = _eps(module, eps_name), random(heads, n, seed=1), random(8, heads, n, seed=2) + 1
    x[0] = (x[0] - x[0].mean(-1, keepdim=True)) * eps**0.5  # so small that epsilon shows
    for dtype, share in ((torch.float64, 1.0), (torch.bfloat16, 0.9)):
        w, rows = weight.to(dtype), x.to(dtype)
        got = run_stock(twin(module, parameters={"weight": w}), rows)
        expected = layer_norm_ref(rows.double(), None, None, eps) * w.double()
        if not agree(got, expected, 1e-2 if share < 1 else 1e-4):
            raise NotCovered("not a layer norm of heads that an aligned op computes")
        if share < 1 and (got == expected.to(dtype)).double().mean() < share:
            raise NotCovered("a layer norm of heads that rounds before it multiplies, which no aligned op does")
    return _head_norm_forward(eps_name), "a weight for each head"


@functools.cache
def _head_norm_forward(eps_name: str) -> Callable:
    def head_norm_forward(self, x):
        eps, heads = getattr(self, eps_name), zip(x.unbind(-2), self.weight.unbind(0), strict=True)
        return torch.stack([vx.layer_norm(one, weight, None, eps) for one, weight in heads], -2)

    return head_norm_forward


def norm_forward(module: nn.Module) -> tuple[Callable, str]:
    """The aligned forward of a root-mean-square norm, and its style."""
    if set(module._parameters) != {"weight"} or module._parameters["weight"] is None or module.weight.dim() != 1:
        raise NotCovered("it holds parameters that no aligned op covers")
    eps_name = _eps_name(module)
    if eps_name is None:
        raise NotCovered("not a root-mean-square norm: it has no epsilon")
    n, eps = module.weight.shape[0], _eps(module, eps_name)
    weight, x = random(n, seed=1), random(3, n, seed=2)
    x[0] *= eps**0.5  # so small that epsilon shows
    got = run_stock(twin(module, parameters={"weight": weight}), x)
    for style in STYLES:
        if agree(got, rmsnorm_ref(x, weight, eps, style=style)):
            return _norm_forward(eps_name, style), style
    raise NotCovered("not a root-mean-square norm that an aligned op computes")


@functools.cache
def _norm_forward(eps_name: str, style: str) -> Callable:
    def norm_forward(self, x):
        return vx.rmsnorm(x, self.weight, getattr(self, eps_name), style=style)

    return norm_forward


# gated feed-forward


# What classes call the projections: gate, up and down; or gate and up as one, and down.
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"), ("input_linear", "output_linear")


def _projections(module: nn.Module) -> tuple[str, ...] | None:
    return next((names for names in _PROJECTIONS if set(names) <= set(module._modules)), None)


def is_mlp(module: nn.Module) -> bool:
    return _projections(module) is not None


def strangers(module: nn.Module) -> list[str]:
    """Children that the forward of the module's class does not know: somebody has put them in."""
    known = inspect.unwrap(type(module).forward).__code__.co_names
    return [name for name in module._modules if name not in known]


def mlp_forward(module: nn.Module) -> tuple[Callable, str]:
    """The aligned forward of down(activation(gate(x)) * up(x)), and the activation."""
    children, projections = dict(module._modules), _projections(module)
    linears, fused = [children.pop(name) for name in projections], len(projections) == 2
    if module._parameters or len(children) > 1 or not all(is_linear(m) for m in linears):
        raise NotCovered("a feed-forward block of another form")
    n, inner, x = 8, 12, 3 * random(2, 5, 8, seed=1)
    small = {name: small_linear(n, inner * (2 if fused else 1), i + 2) for i, name in enumerate(projections[:-1])}
    down = small_linear(inner, n, 9)
    got = run_stock(twin(module, {**small, projections[-1]: down}), x)
    halves = [layer.weight for layer in small.values()]
    gate, up = halves[0].chunk(2) if fused else halves
    for activation in ACTIVATIONS:
        y = silu_mul_ref(x @ gate.detach().t(), x @ up.detach().t(), activation=activation) @ down.weight.detach().t()
        if agree(got, y, 1e-6):
            return _mlp_forward(projections, activation), activation
    raise NotCovered(f"a feed-forward block whose {activation_of(module)} or form no aligned op computes")


def activation_of(module: nn.Module) -> str:
    """In words, of a gated block."""
    found = [type(child).__name__ for child in module.children() if not is_linear(child)]
    return f"activation ({', '.join(found)})" if found else "activation"


@functools.cache
def _mlp_forward(projections: tuple[str, ...], activation: str) -> Callable:
    *read, down = projections

    def fused_forward(self, x):
        return self._modules[down](vx.silu_mul(self._modules[read[0]](x), activation=activation))

    def mlp_forward(self, x):
        gate, up = self._modules[read[0]](x), self._modules[read[1]](x)
        return self._modules[down](vx.silu_mul(gate, up, activation=activation))

    return mlp_forward if len(read) == 2 else fused_forward


# activations without a gate


SILU = "silu"


def ungated_form(module: nn.Module) -> str | None:
    """Of a module that holds nothing and computes silu or one of gelu's forms, which."""
    x = torch.linspace(-6, 6, 60, dtype=torch.float64).view(3, 20)
    try:
        near_and_far = [(x, run_stock(twin(module), x)) for x in (x, 64 * x)]  # far away gelu_10 has its bound
    except NotCovered:
        return None

    def is_form(form: str) -> bool:
        return all(agree(y, ungated_ref(x, form), 1e-6) for x, y in near_and_far)

    return next(filter(is_form, (*GELUS, SILU)), None)


def ungated_ref(x: Tensor, form: str) -> Tensor:
    return silu_mul_ref(x, torch.ones_like(x)) if form == SILU else gelu_ref(x, approximate=form)


def silu_forward(self, input):
    return vx.silu_mul(input, torch.ones_like(input))  # a product with 1 rounds nothing


@functools.cache
def gelu_forward(form: str) -> Callable:
    def gelu_forward(self, input):
        return vx.gelu(input, approximate=form)

    return gelu_forward


# linear layers whose matrix stands the other way round


def is_transposed_linear(module: nn.Module) -> bool:
    """GPT-2's Conv1D: x @ weight + bias."""
    held = module._parameters
    return set(held) == {"weight", "bias"} and hasattr(module, "nf") and all(p is not None for p in held.values())


def transposed_linear_forward(module: nn.Module) -> Callable:
    x, weight, bias = random(2, 3, 5, seed=1), random(5, 4, seed=2), random(4, seed=3)
    tried = twin(module, parameters={"weight": weight, "bias": bias})
    tried.__dict__.update(nx=5, nf=4)
    if not agree(run_stock(tried, x), x @ weight + bias, 1e-9):
        raise NotCovered("a linear layer that computes something else than x @ weight + bias")
    return _transposed_linear_forward


def _transposed_linear_forward(self, x):
    return vx.linear(x, self.weight.t().contiguous(), self.bias)


# attention: the module's own code, with two of the globals that it calls replaced


TURNS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")


def is_attention(module: nn.Module) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names


_PLAIN = "transformers", "veomni", "vexact_ops", "kernels"  # whose implementations compute what ours do


def check_implementation(module: nn.Module, kind: str, registry) -> None:
    """That what the module's config chooses ("attention" or "experts") is no function of the caller's own: it may
    compute anything, and ours would stand in its place. A name with a slash is a kernel's of the Hub."""
    of_config = f"_{'attn' if kind == 'attention' else kind}_implementation"
    name = getattr(getattr(module, "config", None), of_config, None)
    function = None if registry is None or name is None or "/" in name else registry.get(name)
    while isinstance(function, functools.partial):
        function = function.func
    where = getattr(function, "__module__", None) or type(function).__module__
    if function is not None and where.partition(".")[0] not in _PLAIN:
        called = getattr(function, "__qualname__", type(function).__qualname__)
        raise NotCovered(
            f"its implementation of {kind} is {where}.{called}, registered as {name!r}: an aligned op would stand in "
            f"its place, whatever it computes: set {of_config} of the config to 'eager' if that is plain {kind}"
        )


class Interface:
    """Stands where transformers' registry of attention functions stands, in the patched module's code alone."""

    def get_interface(self, name, default=None):
        return attend

    def __getitem__(self, name):
        return attend


def cache_names(module: nn.Module) -> list[str]:
    """By which names its class's own forward takes a cache."""
    takes = inspect.signature(inspect.unwrap(class_of(module).forward)).parameters
    found = [name for name in (*CACHES, LAYERS_CACHE) if name in takes]
    if not found:
        raise NotCovered(f"its forward takes a cache by none of the names that are known here: {', '.join(CACHES)}")
    return found


def attention_forward(module: nn.Module) -> tuple[Callable, str]:
    """The module's own forward with attention, and where it is the known one, the rotation of heads, replaced."""
    return _attention_forward(type(module))


@functools.cache
def _attention_forward(cls: type) -> tuple[Callable, str]:
    original = inspect.unwrap(cls.forward)
    scope = {**original.__globals__, "ALL_ATTENTION_FUNCTIONS": Interface()}
    # torch.compile looks a function's globals up through its module's name, and would find the stock ones there.
    scope.pop("__name__", None)
    label = "attention_varlen, attention_paged"
    scope = with_sigmoid(original, scope)
    turns = [name for name in TURNS if name in original.__code__.co_names]
    for name in turns:
        scope[name] = rope_function(scope[name])
    if turns:
        label += ", rope"
    forward = types.FunctionType(
        original.__code__, scope, original.__name__, original.__defaults__, original.__closure__
    )
    forward.__kwdefaults__ = original.__kwdefaults__
    forward.__qualname__, forward.__module__ = original.__qualname__, "vexact_ops.patch"
    return forward, label


PAIRS = "tables in pairs"  # each angle twice in turn, where others have all of them and then all again
ONCE = "tables of each angle once"


def rope_function(apply: Callable) -> Callable:
    """The aligned form of a module's apply_rotary_pos_emb."""
    return rotation(*_turned_how(apply))


def tables_of(module: nn.Module) -> str:
    """In which layout an attention module takes its tables: PAIRS, ONCE or the usual one, ""."""
    original = inspect.unwrap(type(module).forward)
    names = [name for name in TURNS if name in original.__code__.co_names]
    forms = {_turned_how(original.__globals__[name])[0] for name in names}
    return next((layout for layout in (PAIRS, ONCE) if forms == {layout}), "")


@functools.cache
def _turned_how(apply: Callable) -> tuple[str, bool]:
    """By which form of _FORMS it rotates, and whether it can rotate a part of a head."""
    apply = without_slots(apply)
    known = {"q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"}
    if not set(inspect.signature(apply).parameters) <= known:
        raise NotCovered(f"apply_rotary_pos_emb takes other arguments than {', '.join(sorted(known))}")
    q, k = random(1, 2, 5, 16, seed=1), random(1, 1, 5, 16, seed=2)
    forms, part = set(_FORMS), True  # whether it can rotate a part of a head
    for rotary in (16, 8):
        angle = random(5, rotary // 2, seed=3)
        cos, sin = (torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
        laid = {form: tuple(laid_out(t, form)[None] for t in (cos, sin)) for form in forms}
        results, reason = {}, None
        for form in forms:
            try:
                results[form] = apply(q, k, *laid[form])
            except Exception as error:
                reason = error
        if not results:
            if rotary < 16:
                part = False
                continue
            raise NotCovered("apply_rotary_pos_emb raises on tables as wide as a head, and half as wide") from reason
        forms = set(results)
        inputs = q[0].transpose(0, 1), k[0].transpose(0, 1)
        expected = {f: rope_ref(*map(_FORMS[f][0], inputs), cos, sin, interleaved=_FORMS[f][1]) for f in forms}
        forms = {
            form
            for form in forms
            if all(agree(g, e.transpose(0, 1)[None], 1e-6) for g, e in zip(results[form], expected[form]))
        }
    if len(forms) != 1:
        raise NotCovered("apply_rotary_pos_emb rotates in a way that no aligned op computes")
    return forms.pop(), part


def laid_out(table: Tensor, layout: str) -> Tensor:
    """Of a table of all angles and then all again."""
    if layout == PAIRS:
        return table.chunk(2, -1)[0].repeat_interleave(2, -1)
    return table.chunk(2, -1)[0] if layout == ONCE else table


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _pairs_apart(x: Tensor) -> Tensor:
    """x0, x1, x2, x3 becomes x0, x2, x1, x3."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


# What is done to the heads first, and whether pairs are neighbours: halves, pairs that stay, pairs that become halves.
_FORMS = {
    "halves": (_as_it_is, False),
    "pairs": (_as_it_is, True),
    PAIRS: (_as_it_is, True),
    ONCE: (_as_it_is, False),
    "pairs to halves": (_pairs_apart, False),
}


@functools.cache
def rotation(form: str, part: bool) -> Callable:
    arrange, interleaved = _FORMS[form]

    def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        if not part and not q.shape[-1] == k.shape[-1] == cos.shape[-1]:
            raise NotCovered(
                f"its apply_rotary_pos_emb rotates whole heads alone, but gets tables of {cos.shape[-1]} for heads of "
                f"{q.shape[-1]}, which no aligned op does: "
                + ("heads of one number have no pairs" if q.shape[-1] == 1 else "without the patch it raises")
                + ": head_dim (qk_rope_head_dim of latent attention) is to be even, and the width of its tables"
            )
        if unsqueeze_dim == 1:  # (B, heads, S, D)
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        batch, length = q.shape[:2]
        cos, sin = (t.expand(batch, length, -1).reshape(batch * length, -1) for t in (cos, sin))
        turned = vx.rope(arrange(q.flatten(0, 1)), arrange(k.flatten(0, 1)), cos, sin, interleaved=interleaved)
        q, k = (t.view(batch, length, *t.shape[1:]) for t in turned)
        return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 1 else (q, k)

    return apply_rotary_pos_emb


def identity_forward(self, input):
    if self.training and self.p > 0 and not self._vexact.trains:
        refuse_training(self, "p", self.p)
    return input


def refuse_training(module: nn.Module, name: str, value: float) -> None:
    """What a patch for an engine has passed over, in a model that is trained after all."""
    raise ValueError(
        f"{type(module).__name__}: {name}: got {value} in training, expected 0: the model was patched with "
        "training=False, as an engine does; a dropped value is not aligned"
    )
