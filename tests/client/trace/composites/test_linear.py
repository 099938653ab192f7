"""linear as one call: the bits, strides and errors of torch's own, forward, backward and twice."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.functional import linear

from gt.client.current_session import Current
from gt.client.trace import recorder as recorder_module
from gt.client.trace.composites.linear import prepare
from tests.helpers.serving import settled

pytestmark = pytest.mark.usefixtures("one", "kernel")
INPUTS, OUTPUTS = 3, 5


@pytest.fixture
def kernel() -> None:
    """The kernel, also after a test that has ended it."""
    prepare()


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "one dim": torch.randn(INPUTS),
        "two": torch.randn(4, INPUTS),
        "two, by columns": torch.randn(INPUTS, 4).t(),
        "three": torch.randn(2, 4, INPUTS),
        "three, no view of rows": torch.randn(4, 2, INPUTS).transpose(0, 1),
        "three, a slice of rows": torch.randn(2, 4, 8)[:, :, :INPUTS],
        "three, by columns": torch.randn(2, INPUTS, 4).transpose(1, 2),
        "four": torch.randn(2, 2, 4, INPUTS),
        "four, no view of rows": torch.randn(2, 4, 2, INPUTS).transpose(1, 2),
        "no rows": torch.randn(0, 4, INPUTS),
        "large": torch.randn(7, 33, INPUTS),
    }


def on(device: str, x: torch.Tensor) -> torch.Tensor:
    """The tensor on a device, with its strides."""
    return torch.empty_strided(x.size(), x.stride(), device=device).copy_(x)


def results(device: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, frozen: bool, twice: bool) -> list:
    """The result and its gradients, (value, strides) each; the gradients of gradients too."""
    x, weight = on(device, x).requires_grad_(), on(device, weight).requires_grad_(not frozen)
    bias = bias if bias is None else on(device, bias).requires_grad_()
    y = linear(x, weight, bias)
    learned = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    towards = on(device, torch.arange(y.numel(), dtype=torch.float32).cos().reshape(y.shape))
    tensors = [y, *torch.autograd.grad(y, learned, towards, retain_graph=twice)]
    if twice:
        first = torch.autograd.grad((y * y).sum(), learned, create_graph=True)
        tensors += first + torch.autograd.grad(sum((g * g).sum() for g in first), learned)
    return [(t.detach().cpu(), t.stride()) for t in tensors]


@pytest.mark.parametrize("name", inputs())
@pytest.mark.parametrize("twice", [False, True])
def test_bits_and_strides_are_those_of_torch(name, twice):
    torch.manual_seed(2)
    weights = torch.randn(OUTPUTS, INPUTS), torch.randn(INPUTS, OUTPUTS).t(), torch.randn(INPUTS)
    for weight, biased, frozen in itertools.product(weights, (False, True), (False, True)):
        if biased and weight.dim() == 1:  # torch refuses most of these
            continue
        bias = torch.randn(weight.shape[:-1]) if biased else None
        want = results("cpu", inputs()[name], weight, bias, frozen, twice)
        for (a, strides), (b, remote_strides) in zip(
            want, results("remote", inputs()[name], weight, bias, frozen, twice), strict=True
        ):
            assert torch.equal(a, b)
            assert strides == remote_strides or not a.numel()


def test_a_linear_is_one_node_and_the_ops_of_torch():
    x, weight = torch.randn(2, 4, INPUTS, device="remote"), torch.randn(OUTPUTS, INPUTS, device="remote", requires_grad=True)
    linear(x, weight)
    before = Current.recorder.ops
    y = linear(x, weight)
    assert Current.recorder.ops - before == 4  # t, view, mm, _unsafe_view
    assert type(y.grad_fn).__name__ == "LinearBackward0"
    assert y.grad_fn.next_functions[1][0].variable is weight


def test_tensors_between_the_ops_are_freed():
    x, weight = torch.randn(2, 4, INPUTS, device="remote"), torch.randn(OUTPUTS, INPUTS, device="remote")

    def alive() -> int:
        return sum(worker["live_tensors"] for worker in settled()["workers"])

    linear(x, weight)
    alive()
    before = alive()
    for _ in range(10):
        linear(x, weight)
    assert alive() <= before + 1  # a sum of `alive` itself may still be there; ten calls have thirty tensors between their ops


def test_a_cleared_table_of_templates_begins_anew(monkeypatch):
    monkeypatch.setattr(recorder_module, "MAX_TEMPLATES", 11)
    weight = torch.randn(OUTPUTS, INPUTS, requires_grad=True)
    remote = weight.detach().to("remote").requires_grad_()
    for rows in (*range(1, 12), *range(1, 12)):
        x = torch.randn(2, rows, INPUTS)
        linear(x, weight).sum().backward()
        linear(x.to("remote"), remote).sum().backward()
    assert torch.equal(weight.grad, remote.grad.cpu())


def test_errors_are_those_of_the_matmul():
    weight = torch.randn(OUTPUTS, INPUTS, device="remote")
    for x, words in (
        (torch.randn(2, 4), "mat1 and mat2 shapes cannot be multiplied"),
        (torch.randn(2, 4, INPUTS).double(), "to have the same dtype"),
        (torch.tensor(1.0), "both arguments to linear need to be at least 1D"),
    ):
        with pytest.raises(RuntimeError, match=words):
            linear(x.to("remote"), weight)
    with pytest.raises(RuntimeError, match="same device"):
        linear(weight, torch.randn(2, INPUTS))


def test_forward_mode_takes_torchs_own_formula():
    def squared(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear(a, w).pow(2).sum()

    x, weight = torch.randn(4, INPUTS), torch.randn(OUTPUTS, INPUTS)
    far = x.to("remote"), weight.to("remote")
    for transform, function in ((torch.func.jacfwd, linear), (torch.func.jacrev, linear), (torch.func.hessian, squared)):
        assert torch.equal(transform(function)(x, weight), transform(function)(*far).cpu())
    far[1].requires_grad_()
    with forward_ad.dual_level(), torch.no_grad():
        assert forward_ad.unpack_dual(linear(forward_ad.make_dual(far[0], far[0]), far[1])).tangent is not None
    assert type(linear(*far).grad_fn).__name__ == "LinearBackward0"
