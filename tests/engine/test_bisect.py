"""bisect: a difference that is planted is found where it was planted, down to the bit, and its cause is told."""

import copy
import json

import pytest
import torch
from engine_models import VOCAB, build
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

import vexact_ops as vx
from vexact_engine import cli
from vexact_engine.proof import bisect_causes as causes
from vexact_engine.proof import stacks
from vexact_engine.proof.bisect import bisect
from vexact_engine.proof.bisect_report import lines, render

LENGTHS = (9, 21, 5, 14)
SEQUENCES = [[(7 * i + j) % (VOCAB - 9) + 3 for j in range(n)] for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def model():
    return build("Qwen3").eval()


@pytest.fixture(scope="module")
def exact():
    """In float32, where another order of a sum shows."""
    return build("Qwen3", torch.float32).eval()


@pytest.fixture(scope="module")
def mixture():
    return build("Qwen3Moe").eval()


@pytest.fixture(scope="module")
def latent():
    """Latent attention, a dense layer, mixtures with shared experts."""
    return build("DeepseekV3").eval()


def perturb(tensor):
    """One bit of one element of one token, the fifth of the second sequence, in a batch of all or alone."""
    tensor, length = tensor.clone(), LENGTHS[1]
    places = {(4, length): (1, 4), (1, length): (0, 4), (4, 1, length): (1, 0, 4), (1, 1, length): (0, 0, 4)}
    flat = {4 * length: length + 4, length: 4}
    shapes = [tuple(tensor.shape[:n]) for n in (2, 3)]
    place = next((places[shape] for shape in shapes if shape in places), flat.get(tensor.shape[0]))
    if place is not None:
        element = tensor[place].reshape(-1)[2:3]
        element.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[element.element_size()]).add_(1)
    return tensor


def unseen(change):
    """What a test plants is no op of the model's."""

    def apart(tensor):
        with _disable_current_modes():
            return change(tensor)

    return apart


def planted(model, path, change, where="out"):
    """A copy of a model in which a module's output, or what it is given, is changed."""
    theirs = copy.deepcopy(model)
    module, change = theirs.get_submodule(path), unseen(change)

    def after(module, args, output):
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    def before(module, args, kwargs):
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, kwargs | {name: change(kwargs[name])}

    if where == "out":
        module.register_forward_hook(after)
    else:
        module.register_forward_pre_hook(before, with_kwargs=True)
    return theirs


LAYER = "model.layers.1"
PLACES = [
    ("model.embed_tokens", "out", "model.embed_tokens"),
    (f"{LAYER}.input_layernorm", "out", f"{LAYER}.input_layernorm"),
    (f"{LAYER}.self_attn.q_proj", "out", f"{LAYER}.self_attn.q_proj"),
    (f"{LAYER}.self_attn.q_norm", "out", f"{LAYER}.self_attn.q_norm"),
    (f"{LAYER}.self_attn.k_proj", "out", f"{LAYER}.self_attn.k_proj"),
    (f"{LAYER}.self_attn.k_norm", "out", f"{LAYER}.self_attn.k_norm"),
    (f"{LAYER}.self_attn.v_proj", "out", f"{LAYER}.self_attn.v_proj"),
    (f"{LAYER}.self_attn.o_proj", "in", f"{LAYER}.self_attn"),  # what attention gives
    (f"{LAYER}.self_attn.o_proj", "out", f"{LAYER}.self_attn.o_proj"),
    (f"{LAYER}.self_attn", "out", f"{LAYER}.self_attn"),
    (f"{LAYER}.post_attention_layernorm", "in", LAYER),  # the sum of the residual
    (f"{LAYER}.post_attention_layernorm", "out", f"{LAYER}.post_attention_layernorm"),
    (f"{LAYER}.mlp.gate_proj", "out", f"{LAYER}.mlp.gate_proj"),
    (f"{LAYER}.mlp.act_fn", "out", f"{LAYER}.mlp.act_fn"),
    (f"{LAYER}.mlp.up_proj", "out", f"{LAYER}.mlp.up_proj"),
    (f"{LAYER}.mlp.down_proj", "in", f"{LAYER}.mlp"),  # the gate's product
    (f"{LAYER}.mlp.down_proj", "out", f"{LAYER}.mlp.down_proj"),
    (f"{LAYER}.mlp", "out", f"{LAYER}.mlp"),
    (LAYER, "out", LAYER),
    ("model.norm", "out", "model.norm"),
    ("lm_head", "out", "lm_head"),
]
IDS = [f"{path.removeprefix('model.')}-{where}" for path, where, _ in PLACES]


@pytest.mark.parametrize("path,where,module", PLACES, ids=IDS)
def test_a_bit_planted_in_a_module_is_found_there(model, path, where, module):
    found = bisect(stacks.stock(model), stacks.own(planted(model, path, perturb, where)), SEQUENCES)
    assert not found.equal and found.module == module, found
    (element,) = found.first
    assert (element.sequence, element.position, found.tokens, found.elements) == (1, 4, 1, 1)
    assert int(element.b_bits, 16) - int(element.a_bits, 16) == 1 and element.feature % 16 == 2
    assert found.cls == type(model.get_submodule(module)).__name__ and found.cause.name == causes.UNKNOWN


@pytest.mark.parametrize("path", [f"{LAYER}.mlp.gate", f"{LAYER}.mlp.experts", f"{LAYER}.mlp", "model.rotary_emb"])
def test_a_bit_planted_in_a_mixture_or_in_the_angles_is_found(mixture, path):
    found = bisect(stacks.stock(mixture), stacks.own(planted(mixture, path, perturb)), SEQUENCES)
    assert found.module == path and found.tokens == 1 and found.first[0].position == 4, found


LATENT = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
MIXTURE = ["gate", "experts", "shared_experts.up_proj", "shared_experts.down_proj", "shared_experts"]


PARTS = ["self_attn", *(f"self_attn.{p}" for p in LATENT), "mlp", *(f"mlp.{p}" for p in MIXTURE)]


@pytest.mark.parametrize("path", PARTS)
def test_a_bit_planted_in_latent_attention_or_beside_shared_experts_is_found(latent, path):
    found = bisect(stacks.stock(latent), stacks.own(planted(latent, f"{LAYER}.{path}", perturb)), SEQUENCES)
    (element,) = found.first
    assert found.module == f"{LAYER}.{path}" and (element.sequence, element.position, found.tokens) == (1, 4, 1), found
    assert found.cause.name == causes.UNKNOWN


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("where", ["mlp.up_proj", "input_layernorm", "self_attn"])
def test_on_a_gpu_too(where):
    gpu = build("Qwen3", device="cuda").eval()
    found = bisect(stacks.patched(gpu), stacks.engine(gpu, chunk=3), SEQUENCES)
    assert found.equal and found.compared > 50, found
    found = bisect(stacks.stock(gpu), stacks.own(planted(gpu, f"{LAYER}.{where}", perturb)), SEQUENCES)
    assert found.module == f"{LAYER}.{where}" and (found.tokens, found.elements) == (1, 1), found


def test_nothing_is_found_where_nothing_is(model):
    for a, b in (
        (stacks.stock(model), stacks.own(copy.deepcopy(model))),
        (stacks.patched(model), stacks.engine(model, chunk=3)),
        (stacks.patched(model, pack=False, pad="left"), stacks.engine(model, chunk=1)),
        (stacks.patched(model, batch=1), stacks.patched(model)),
    ):
        found = bisect(a, b, SEQUENCES)
        assert found.equal and found.cause is None and found.compared > 50 and "no difference" in found.verdict()
    assert not hasattr(model, "_vexact") and not model._forward_hooks and not model.lm_head._forward_pre_hooks


def test_mixtures_and_biases_are_equal_in_the_engine_and_in_training(mixture):
    for made in (mixture, build("Qwen2").eval()):
        found = bisect(stacks.patched(made), stacks.engine(made, chunk=4), SEQUENCES)
        assert found.equal and found.compared > 50, found


@pytest.mark.parametrize("chunk", [5, 1])
def test_ranks_have_the_bits_of_one(chunk, model, mixture):
    for each in (model, mixture):
        found = bisect(stacks.patched(each), stacks.engine(each, chunk=chunk, tp=2), SEQUENCES)
        layers = each.config.num_hidden_layers
        assert found.equal and found.compared == 2 * layers + 3, found.verdict()  # what goes in, comes out; logits


def test_a_bit_planted_in_a_weight_of_ranks_is_found_in_its_layer(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[-1] *= 1 + 2**-7  # of the second rank
    found = bisect(stacks.patched(model), stacks.engine(other, tp=2), SEQUENCES)
    assert (found.module, found.cls) == ("model.layers.1", type(model.model.layers[1]).__name__)
    with pytest.raises(ValueError, match="tensor_parallel_size: got 5, which does not fit"):
        bisect(stacks.patched(model), stacks.engine(model, tp=5), SEQUENCES)


def test_logits_that_cannot_be_compared_are_not_said_to_be_equal(model):
    """All that is compared is equal: but for one model's logits, which are of the last tokens alone, or of others."""

    class Last(torch.nn.Module):
        def __init__(self, most):
            super().__init__()
            self.model, self.lm_head, self.most = model.model, model.lm_head, most

        def forward(self, **given):
            logits = model(**given).logits
            return logits[:, -1:] if self.most is None else logits[..., : self.most]

    for most, said in (
        (None, "those of b have a row for 0 of 49 tokens"),
        (99, f"of a have {VOCAB} columns, those of b 99"),
    ):
        found = bisect(stacks.stock(model), stacks.own(Last(most)), SEQUENCES)
        assert found.compared > 50 and found.module is None and not found.equal, found
        assert said in found.verdict() and "no difference" not in found.verdict()
        assert found.verdict() in lines(found) and not found.to_json()["equal"]


# Known causes

FIRST = "model.layers.0.input_layernorm"  # what comes after it may depend on the batch by itself, in a stock model


def with_forward(model, path, forward):
    theirs = copy.deepcopy(model)
    module = theirs.get_submodule(path)
    module.forward = forward.__get__(module)
    return theirs


def aligned(self, x):
    return vx.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("parts", [2, 4])
def test_split_k_is_told(exact, parts):
    def split(self, x):
        size = x.shape[-1] // parts
        pieces = [vx.linear_logits(p, w) for p, w in zip(x.split(size, -1), self.weight.split(size, -1))]
        return sum(pieces[1:], pieces[0]).to(x.dtype)

    path = f"{LAYER}.mlp.up_proj"
    found = bisect(
        stacks.own(with_forward(exact, path, aligned)), stacks.own(with_forward(exact, path, split)), SEQUENCES
    )
    assert (found.module, found.cause.name) == (path, causes.SPLIT_K)
    assert found.cause.why == f"K is summed in 1 part(s) in a and in {parts} in b"


def test_another_order_of_a_product_is_told(exact):
    def backwards(self, x):
        total = torch.zeros(*x.shape[:-1], self.out_features)
        for k in reversed(range(self.in_features)):
            total += x[..., k : k + 1].float() * self.weight[:, k].float()
        return total.to(x.dtype)

    path = f"{LAYER}.mlp.down_proj"
    a, b = (stacks.own(with_forward(exact, path, forward)) for forward in (aligned, backwards))
    found = bisect(a, b, SEQUENCES)
    assert (found.module, found.cause.name) == (path, causes.ORDER) and "a sums K ascending" in found.cause.why


def test_a_rounding_that_is_left_out_is_told(model):
    def fused(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * self.weight.float()).to(x.dtype)

    path = f"{LAYER}.input_layernorm"
    found = bisect(stacks.stock(model), stacks.own(with_forward(model, path, fused)), SEQUENCES)
    assert (found.module, found.cause.name) == (path, causes.ROUNDING) and "b rounds once" in found.cause.why


def test_roundings_of_elementwise_code_are_told(model):
    def fused(self, x):
        gate, up = self.gate_proj(x).float(), self.up_proj(x).float()
        return self.down_proj((functional.silu(gate) * up).to(x.dtype))

    found = bisect(stacks.stock(model), stacks.own(with_forward(model, f"{LAYER}.mlp", fused)), SEQUENCES)
    assert (found.module, found.cause.name) == (f"{LAYER}.mlp", causes.ROUNDING) and found.ops_b[-1].startswith("aten.")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_cast_is_told(model, dtype):
    path, change = f"{LAYER}.self_attn.v_proj", lambda x: x.to(dtype).to(x.dtype) if dtype.itemsize == 2 else x.float()
    if dtype == torch.float64:  # an output in another dtype, where nobody minds: the logits
        path = "lm_head"
    model = copy.deepcopy(model)
    with torch.no_grad():  # values that float16 does not hold
        model.get_submodule(path).weight[:4] *= 2.0**-20
    found = bisect(stacks.stock(model), stacks.own(planted(model, path, change)), SEQUENCES)
    assert (found.module, found.cause.name) == (path, causes.CAST), found.cause
    assert "float16 and back" in found.cause.why or "bfloat16 in a and float32 in b" in found.cause.why


def test_other_weights_are_told(model):
    theirs = copy.deepcopy(model)
    with torch.no_grad():
        theirs.get_submodule(f"{LAYER}.mlp.gate_proj").weight[3, 5] *= 1.5
    found = bisect(stacks.stock(model), stacks.own(theirs), SEQUENCES)
    assert (found.module, found.cause.name) == (f"{LAYER}.mlp.gate_proj", causes.WEIGHTS)
    assert found.cause.why.startswith("weight itself differs, in 1 of ")
    assert {e.feature for e in found.first} == {3}


def test_the_size_of_a_batch_is_told(model):
    few = lambda x: x if x.shape[0] < 3 else x * (1 + 2**-7)  # noqa: E731  rounds otherwise for three rows and more
    theirs = planted(model, FIRST, few)
    found = bisect(stacks.own(theirs, batch=1), stacks.own(theirs), SEQUENCES)
    assert (found.module, found.cause.name) == (FIRST, causes.BATCH)
    assert "b gives other bits to" in found.cause.why and "in a batch of 4 than alone" in found.cause.why


@pytest.mark.parametrize("pad", ["left", "right"])
def test_padding_is_told(model, pad):
    wide = lambda x: x if x.shape[1] < max(LENGTHS) else x * (1 + 2**-7)  # noqa: E731  a short one is so by padding alone
    theirs = planted(model, FIRST, wide)
    found = bisect(stacks.own(theirs, batch=1), stacks.own(theirs, pad=pad), SEQUENCES)
    assert (found.module, found.cause.name) == (FIRST, causes.PADDING), found.cause


@pytest.mark.parametrize("first", [16, 7])
def test_heads_of_as_many_numbers_as_there_are_tokens_are_no_scores(model, first):
    """What the first forward has no rows of stood behind what comes after it, and other ops' values were compared."""
    drawn = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, 160, (n,), generator=drawn).tolist() for n in (first, 40, 33, 30)]
    found = bisect(stacks.stock(model, batch=1), stacks.stock(model, pad="left"), sequences)
    assert found.module == "model.layers.0.self_attn" and found.part == "inside"
    assert "aten._scaled_dot_product" in found.ops_a[-1] and found.max_abs_diff < 2**-6
    assert found.first and found.elements < 64


def test_splits_of_attention_are_told(model):
    long = [[j % 90 + 3 for j in range(150)]]
    found = bisect(stacks.patched(model), stacks.patched(model, kv_segment=64), long)
    assert (found.module, found.cause.name) == ("model.layers.0.self_attn", causes.SPLITS)
    assert "kv_segment is None in a and 64 in b" in found.cause.why and found.first[0].position >= 64
    assert found.ops_a == ("vexact.attention_varlen",) == found.ops_b


def test_decoding_that_cuts_keys_otherwise_is_told(model):
    found = bisect(stacks.stock(model, batch=1), stacks.stock(model, batch=1, chunk=1), SEQUENCES)
    if found.equal:
        pytest.skip("this torch's attention decodes as it prefills")
    if found.module.endswith("_proj") and found.cause.name == causes.BATCH:
        product, differ = model.get_submodule(found.module), []

        def look(module, args, out):
            x = args[0]
            if x.shape[1] > 1:
                differ.extend(not torch.equal(module(x[:, i : i + 1])[:, 0], out[:, i]) for i in range(x.shape[1]))

        with torch.no_grad(), product.register_forward_hook(look):
            for ids in SEQUENCES:
                model(torch.tensor([ids]))
        assert any(differ), found
        pytest.skip("before attention, this machine's products of one row have other bits than of many")
    assert found.module.endswith("self_attn") and found.cause.name in (causes.SPLITS, causes.BATCH)


@pytest.mark.parametrize("path", ["lm_head", "model.norm", f"{LAYER}.mlp.act_fn", f"{LAYER}.self_attn"])
def test_what_is_no_matter_of_rounding_is_not_called_one(model, path):
    """A number that one side adds was said to be another order of the sum."""
    theirs = copy.deepcopy(model)
    module, plain = theirs.get_submodule(path), type(theirs.get_submodule(path)).forward

    def more(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        whole = out[0] if isinstance(out, tuple) else out
        whole = whole + (2.0 * (torch.arange(whole.shape[-1]) == 3)).to(whole.dtype)
        return (whole, *out[1:]) if isinstance(out, tuple) else whole

    module.forward = more.__get__(module)
    found = bisect(stacks.stock(model), stacks.own(theirs), SEQUENCES)
    assert found.module == path and {e.feature for e in found.first} == {3}
    assert found.cause.name == causes.OTHER and found.cause.why.startswith("they differ by 2")


def test_what_is_not_repeatable_is_told(model):
    counted = iter(range(1000))
    theirs = planted(model, f"{LAYER}.mlp.up_proj", lambda x: x * (1 + 2**-7 * (1 + next(counted) % 5)))
    found = bisect(stacks.stock(model), stacks.own(theirs), SEQUENCES)
    assert (found.module, found.cause.name) == (f"{LAYER}.mlp.up_proj", causes.REPEAT)


def test_a_difference_inside_code_of_other_ops_is_narrowed_to_the_op(model):
    """Stock rotates heads with roundings in between, the patched model without: neither attention nor the norms."""
    found = bisect(stacks.own(with_aligned_linears(model), batch=1), stacks.patched(model), SEQUENCES)
    assert found.module.startswith("model.layers.0"), found
    if found.module.endswith("self_attn"):
        assert found.ops_b == ("vexact.rope",) and found.cause.name == causes.ROUNDING, found


def with_aligned_linears(model):
    theirs = copy.deepcopy(model)
    for module in theirs.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = aligned.__get__(module)
    return theirs


# For people


def test_it_is_said_on_a_terminal_and_on_a_page(model):
    found = bisect(
        stacks.stock(model), stacks.own(planted(model, f"{LAYER}.mlp.up_proj", perturb), name="<mine>"), SEQUENCES
    )
    text = "\n".join(lines(found))
    assert lines(found)[-1] == found.verdict() == f"first difference in {LAYER}.mlp.up_proj (Linear): unknown"
    element = found.first[0]
    for what in (element.a_bits, element.b_bits, "aten.mm", "1 of 80 elements of 1 tokens"):
        assert what in text, what
    html = render(found)
    assert element.b_bits in html and "&lt;mine&gt;" in html and "<mine>" not in html and "verdict differ" in html
    assert "first difference in" in found._repr_html_() and repr(found).startswith("<Bisection of stock and <mine>:")
    equal = bisect(stacks.stock(model), stacks.stock(model), SEQUENCES)
    assert "verdict equal" in render(equal) and lines(equal)[-1].startswith("no difference: ")
    json.dumps(found.to_json(), allow_nan=False)


def test_the_command(capsys, tmp_path):
    build("Qwen3").save_pretrained(tmp_path / "m")
    capsys.readouterr()
    (tmp_path / "mine.py").write_text(
        "def twisted(model):\n"
        "    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda m, a, out: out * (1 + 2**-7))\n"
        "    return model\n"
        "def number(model):\n"
        "    return 3\n"
    )
    (tmp_path / "broken.py").write_text("def f(:\n")

    fixed = ["--model", str(tmp_path / "m"), "--num-prompts", "2"]

    def run(*argv):
        code = cli.main(["bisect", "--quiet", "--device", "cpu", *fixed, *map(str, argv)])
        return code, *capsys.readouterr()

    code, out, err = run("patched", "engine:chunk=5")
    assert (code, err) == (0, "") and out.splitlines()[-1].startswith("no difference: "), out
    code, out, _ = run("engine:chunk=1", "engine:tp=2")
    assert code == 0 and "no difference: " in out, out
    page = tmp_path / "b.html"
    code, out, _ = run("stock", f"{tmp_path}/mine.py:twisted", "--json", "-", "--html", page)
    record = json.loads(out)
    assert code == 1 and record["schema"] == "vexact.bisect" and record["module"] == "model.layers.1.mlp.up_proj"
    assert record["equal"] is False and record["command"].startswith("vexact bisect --quiet --device cpu --model")
    assert "model.layers.1.mlp.up_proj (Linear)" in page.read_text()
    for argv, message in (
        (["stokc"], "STACK_A: got 'stokc', expected stock, patched, engine or FILE.py:NAME"),
        (["stock", "stock:pad=top"], "STACK_B: pad: got 'top', expected left or right"),
        (["stock:batch=0"], "STACK_A: batch: got 0, expected a whole number of 1 or more"),
        (["patched:kv_segment=7"], "STACK_A: kv_segment: got 7, expected None or a multiple of 64"),
        (["engine:tp=0"], "STACK_A: tp: got 0, expected a whole number of 1 or more"),
        (["patched", "engine:tp=5"], "tensor_parallel_size: got 5, which does not fit"),
        (["stock:what=1"], "STACK_A: stock has no option 'what', expected batch, pad, chunk"),
        (["stock", f"{tmp_path}/broken.py:f"], "broken.py fails: SyntaxError"),
        (["stock", f"{tmp_path}/mine.py:number"], "STACK_B: got int, expected a torch.nn.Module"),
        (["stock", "nowhere.py:f"], "STACK_B: nowhere.py: No such file"),
        (["stock", f"{tmp_path}/mine.py:none"], "has no none"),
        (["--layers", "1"], "--layers: expected --config with it"),
    ):
        code, out, err = run(*argv)
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1, err
