"""Both halves of a block, in float64, against the same formulas written out and left to autograd."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F

from oelm.config import resolve
from oelm.model import by_hand, halves
from oelm.model.dropout import keep_mask
from oelm.model.gpt import Block

SHAPE = dict(preset="tiny", d_model=48, num_heads=3, d_ff=80, seq_len=70, vocab_size=101)


def block(seed=0, **settings):
    torch.manual_seed(seed)
    made = Block(resolve({**SHAPE, **settings}), 0).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def stream(seed=1, length=70):
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, 48, dtype=torch.float64, generator=chance, requires_grad=True)


def written_out(block, x, attention_keep=None, keeps=(1.0, 1.0)):
    """attention_keep: what multiplies the weights; keeps: what multiplies the results of the two halves."""
    a, (B, T, _) = block.attention, x.shape
    h = F.layer_norm(x, (48,), block.attention_norm.weight, block.attention_norm.bias)
    matrices = (getattr(getattr(a, role), "weight", torch.eye(48, dtype=x.dtype)) for role in "qkv")
    q, k, v = ((h @ matrix.T).view(B, T, a.num_heads, -1).transpose(1, 2) for matrix in matrices)
    scores = (q @ k.mT / math.sqrt(48 / a.num_heads)).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    weights = scores.softmax(-1) * (1.0 if attention_keep is None else attention_keep)
    x = x + keeps[0] * ((weights @ v).transpose(1, 2).reshape(B, T, 48) @ a.o.weight.T)
    h = F.layer_norm(x, (48,), block.ffn_norm.weight, block.ffn_norm.bias)
    up = h @ block.ffn.up.weight.T + block.ffn.up.bias
    gelu = up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))
    return x + keeps[1] * (gelu @ block.ffn.down.weight.T + block.ffn.down.bias)


def gradients(output, block, x):
    inputs = [x, *(p for p in block.parameters() if p.requires_grad)]
    return torch.autograd.grad(output.cos().sum(), [tensor for tensor in inputs if tensor.requires_grad])


@pytest.mark.parametrize("small", [0, 10**6], ids=["large", "small"])
@pytest.mark.parametrize(
    "frozen",
    ["", "attention.q", "attention.k", "attention.q attention.k", "attention.v", "attention", "norm", "ffn", "x",
     "x norm", "attention.o", "x norm attention.q attention.k attention.v", "ffn.up attention_norm.bias",
     "x norm attention.q attention.k ffn.up"],
)  # fmt: skip
@pytest.mark.parametrize("arm", ["baseline", "oelm_sliced"])
def test_result_and_gradients_are_those_of_the_formulas(arm, frozen, small, monkeypatch):
    """Whatever is frozen, and whether tensors are small enough to be kept or not."""
    for module in (halves, by_hand):
        monkeypatch.setattr(module, "KEPT_FLOATS", small)
    monkeypatch.setattr(by_hand, "_HELD", by_hand._Held())
    ours, x = block(model_type=arm), stream()
    assert ours.attention.plain
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(not any(word in name for word in frozen.split() if word != "x"))
    x.requires_grad_("x" not in frozen.split())
    found, expected = ours(x), written_out(ours, x)
    torch.testing.assert_close(found, expected)
    for a, b in zip(gradients(found, ours, x), gradients(expected, ours, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("frozen", "spared"),
    [("q", 1), ("k", 1), ("v", 1), ("qk", 2), ("qkv", 3), ("o", 1), ("qkvo", 4)],
)
def test_a_frozen_matrix_spares_its_product_in_the_backward_pass(frozen, spared):
    """2 x 70 x 48 x 48 multiplications and additions each; what only it would have needed is not kept."""
    from torch.utils.flop_counter import FlopCounterMode

    def backward(frozen):
        ours, x = block(), stream()
        for role in frozen:
            getattr(ours.attention, role).weight.requires_grad_(False)
        kept = 0

        def count(tensor):
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            out = ours(x)
        with FlopCounterMode(display=False) as counted:
            out.sum().backward()
        return counted.get_total_flops(), kept

    (everything, kept_for_all), (rest, kept_for_rest) = backward(""), backward(frozen)
    assert everything - rest == spared * 2 * 140 * 48 * 48
    unneeded = ("qkv" in frozen) + ("o" in frozen)
    assert kept_for_all - kept_for_rest == unneeded * 140 * 48


def test_a_frame_for_queries_and_keys_has_the_gradients_of_both():
    ours, x = block(model_type="orthogonal", tie_qk=True), stream()
    assert ours.attention.plain
    assert ours.attention.q is ours.attention.k
    for a, b in zip(gradients(ours(x), ours, x), gradients(written_out(ours, x), ours, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["attention.q", "attention.k", "attention.v", "attention.o", "ffn.up", "ffn.down"])
def test_a_module_put_in_the_place_of_a_matrix_is_called(name):
    """As adapters do, which wrap a layer and add to it."""
    ours, x = block(), stream()
    parent, _, role = name.partition(".")
    before, inner = ours(x), getattr(getattr(ours, parent), role)
    setattr(getattr(ours, parent), role, torch.nn.Sequential(inner))
    torch.testing.assert_close(ours(x), before)
    setattr(getattr(ours, parent), role, torch.nn.Sequential(inner, torch.nn.Tanh()))
    assert not torch.allclose(ours(x), before)


NAMES = [name for name, module in block().named_modules() if name]


@pytest.mark.parametrize("hang", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
@pytest.mark.parametrize("name", NAMES)
def test_a_hook_on_any_module_within_is_called_and_changes_nothing(name, hang):
    """For whoever looks at queries, or at what a layer makes."""
    ours, x = block(), stream()
    before, called = ours(x), []
    getattr(ours.get_submodule(name), hang)(lambda *given: called.append(name))
    after = ours(x)
    torch.testing.assert_close(after, before)
    after.sum().backward()
    assert called


class Doubled(torch.nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def another_forward(module):
    inner = module.forward
    module.forward = lambda *given: 2 * inner(*given)


CHANGES = {
    "v with a bias": lambda b: setattr(b.attention, "v", torch.nn.Linear(48, 48).double()),
    "o with a bias": lambda b: setattr(b.attention, "o", torch.nn.Linear(48, 48).double()),
    "q with a bias": lambda b: setattr(b.attention.q, "bias", torch.nn.Parameter(torch.randn(48).double())),
    "a gain": lambda b: setattr(b.attention, "mixing", block(qk_gain=True).attention.mixing),
    "another norm": lambda b: setattr(b, "attention_norm", Doubled(48).double()),
    "no norm": lambda b: setattr(b, "ffn_norm", torch.nn.Identity()),
    "rms norm": lambda b: setattr(b, "attention_norm", torch.nn.RMSNorm(48).double()),
    "up without bias": lambda b: setattr(b.ffn, "up", torch.nn.Linear(48, 80, bias=False).double()),
    "another ffn": lambda b: setattr(b, "ffn", torch.nn.Sequential(torch.nn.Linear(48, 48).double(), torch.nn.ReLU())),
    "no attention": lambda b: setattr(b, "attention", torch.nn.Identity()),
    "no dropout": lambda b: setattr(b, "dropout", torch.nn.Identity()),
    **{f"forward of {name}": lambda b, name=name: another_forward(b.get_submodule(name)) for name in NAMES},
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_was_put_into_a_block_does_what_it_does_alone(change):
    ours, x = block(), stream()
    CHANGES[change](ours)
    h = x + ours.dropout(ours.attention(ours.attention_norm(x)))
    torch.testing.assert_close(ours(x), h + ours.dropout(ours.ffn(ours.ffn_norm(h))))


@pytest.mark.parametrize(("on_weights", "on_results"), [(0.5, 0.0), (0.0, 0.5)])
def test_dropout_on_weights_and_on_results_may_differ(monkeypatch, on_weights, on_results):
    drawn = []
    monkeypatch.setattr("oelm.model.attention.keep_mask", lambda like, p: drawn.append(p) or keep_mask(like, p))
    ours, x = block(dropout=0.3), stream()
    ours.attention.dropout, ours.dropout.p = on_weights, on_results
    torch.nn.init.zeros_(ours.ffn.down.weight)
    assert not torch.equal(ours(x), ours(x))
    assert set(drawn) == ({on_weights} if on_weights else set())


def test_a_matrix_that_has_changed_since_the_forward_pass_is_refused():
    for role in "qkvo":
        ours, x = block(), stream()
        out = ours(x)
        with torch.no_grad():
            getattr(ours.attention, role).weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("silent", ["attention.o", "ffn.down"])
def test_dropout_is_that_of_its_own_module(silent):
    """Switched on alone, as for several opinions of a trained model, it is on in the other half, too; attention keeps
    all its weights."""
    ours, x = block(dropout=0.5).eval(), stream()
    for parameter in ours.get_submodule(silent).parameters():
        torch.nn.init.zeros_(parameter)
    assert torch.equal(ours(x), ours(x))
    ours.dropout.train()
    assert not torch.equal(ours(x), ours(x))
    ours.dropout.p = 0.0
    torch.testing.assert_close(ours(x), written_out(ours, x))


def test_under_autocast_matrix_products_are_in_its_precision():
    ours, x = block().float(), stream().detach().float()
    found = []
    ours.ffn.down.register_forward_hook(lambda module, given, result: found.append(result.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = ours(x)
    assert found == [torch.bfloat16]
    torch.testing.assert_close(rounded, ours(x), rtol=0.1, atol=0.5)
    assert not torch.equal(rounded, ours(x))


@pytest.mark.parametrize("arm", ["baseline", "oelm_sliced"])
def test_second_derivatives_are_refused(arm):
    """Left to torch they would lack the share of these operations, and nobody would know."""
    ours, x = block(model_type=arm), stream()
    (first,) = torch.autograd.grad(ours(x).sum(), x)
    assert first.abs().max() > 0
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(ours(x).sum(), x, create_graph=True)


def test_dropout_multiplies_weights_and_both_results_with_what_it_keeps(monkeypatch):
    masks = []

    def recorded(like, p):
        masks.append(torch.rand(like.shape, generator=torch.Generator().manual_seed(len(masks))) >= p)
        return masks[-1], 1 / (1 - p)

    for module in ("attention", "dropout"):
        monkeypatch.setattr(f"oelm.model.{module}.keep_mask", recorded)
    ours, x = block(dropout=0.3), stream()
    found = ours(x)
    first, second, *results = masks
    attention_keep = torch.zeros(6, 70, 70, dtype=torch.float64)
    attention_keep[:, :64, :64], attention_keep[:, 64:, :70] = first, second
    results = [mask.view(2, 70, 48).double() / 0.7 for mask in results]
    expected = written_out(ours, x, attention_keep.view(2, 3, 70, 70) / 0.7, results)
    torch.testing.assert_close(found, expected)
    for a, b in zip(gradients(found, ours, x), gradients(expected, ours, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("arm", ["baseline", "oelm_sliced"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("length", [1, 33, 70])
def test_several_passes_under_way_at_once_do_not_share_what_they_keep(heads, length, arm):
    """Two models, forward, forward, backward, backward: no buffer of one serves the other, nor is one of them kept."""
    blocks = [block(seed, num_heads=heads, model_type=arm) for seed in (0, 1)]
    streams = [stream(1, length), stream(2, length)]
    outputs = [b(x) for b, x in zip(blocks, streams, strict=True)]
    for b, x, output in reversed(list(zip(blocks, streams, outputs, strict=True))):
        expected = written_out(b, x)
        for found, right in zip(gradients(output, b, x), gradients(expected, b, x), strict=True):
            torch.testing.assert_close(found, right)


def test_what_evaluation_leaves_behind_serves_training(monkeypatch):
    monkeypatch.setattr(by_hand, "_HELD", by_hand._Held())
    ours, x = block(), stream(length=51)
    with torch.inference_mode():
        evaluated = ours(x.detach())
    trained = ours(x)
    assert torch.equal(evaluated, trained)
    trained.sum().backward()


def test_threads_have_buffers_of_their_own():
    like, found = torch.empty(1), {}
    worker = threading.Thread(target=lambda: found.update(there=by_hand.scratch("x", like, 8).data_ptr()))
    worker.start()
    here = by_hand.scratch("x", like, 8)
    worker.join()
    assert found["there"] != here.data_ptr() == by_hand.scratch("x", like, 2, 4).data_ptr()
