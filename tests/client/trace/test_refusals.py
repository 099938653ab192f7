"""Refused ops have the text that torch has on the CPU, and torch's own ways to compile and to go parallel say what to use."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import gt
from gt.errors import UnsupportedOp

Make = Callable[..., torch.Tensor]
MISTAKES: dict[str, Callable[[Make], object]] = {
    "a matrix product": lambda t: t(2, 3) @ t(4, 5),
    "a linear layer": lambda t: F.linear(t(2, 3), t(5, 4), t(5)),
    "a linear layer of three dims": lambda t: F.linear(t(2, 6, 3), t(5, 4)),
    "a large product": lambda t: t(4096, 3072) @ t(4096, 5),
    "a bias": lambda t: F.linear(t(2, 4), t(5, 4), t(6)),
    "a vector": lambda t: t(2, 3) @ t(4),
    "a dot product": lambda t: t(3) @ t(4),
    "a sum that does not broadcast": lambda t: t(2, 3) + t(4, 3),
    "a large sum": lambda t: t(2048, 1024) + t(4, 1024),
    "a sum in place": lambda t: t(3).add_(t(2, 3)),
    "channels": lambda t: F.conv2d(t(1, 3, 8, 8), t(4, 2, 3, 3)),
    "no stride": lambda t: F.conv2d(t(1, 2, 3, 3), t(2, 2, 2, 2), stride=0),
    "a bias of a convolution": lambda t: F.conv2d(t(1, 4, 3, 3), t(4, 4, 2, 2), t(3)),
    "groups of a convolution": lambda t: F.conv2d(t(1, 4, 3, 3), t(3, 2, 2, 2), groups=2),
    "padding of three dims": lambda t: F.conv2d(t(1, 2, 3, 3), t(2, 2, 2, 2), padding=(1, 2, 3)),
    "channels of a transposed convolution": lambda t: F.conv_transpose2d(t(1, 2, 3, 3), t(3, 2, 2, 2)),
    "channels of a large transposed convolution": lambda t: F.conv_transpose2d(t(32, 2, 99, 99), t(4, 2, 3, 3), t(2)),
    "padding of a transposed convolution": lambda t: F.conv_transpose2d(t(1, 2, 3, 3), t(2, 2, 2, 2), output_padding=2),
    "classes of other pixels": lambda t: F.cross_entropy(t(1, 2, 3, 5), t(1, 2, 5).long()),
    "classes of many other pixels": lambda t: F.cross_entropy(t(4, 2, 99, 5), t(4, 98, 5).long()),
    "labels of another width": lambda t: F.multi_margin_loss(t(2, 3), t(2).int()),
    "samples of another dtype": lambda t: F.fractional_max_pool2d(
        t(1, 1, 4, 4), 2, output_size=2, _random_samples=t(1, 1, 2).double()
    ),
    "labels that are integers": lambda t: F.binary_cross_entropy(t(2), t(2).long()),
    "a grid of another dtype": lambda t: F.grid_sample(t(1, 1, 2, 2), t(1, 2, 2, 2).double(), align_corners=False),
    "distances of two dtypes": lambda t: torch.cdist(t(2, 3), t(2, 3).double()),
    "a cross product of two dtypes": lambda t: torch.cross(t(2, 3), t(2, 3).double(), dim=1),
    "a product of two dtypes": lambda t: t(2, 3) @ t(3, 2).long(),
    "a norm's weight of another dtype": lambda t: F.layer_norm(t(2, 3), (3,), t(3).double()),
    "statistics of another dtype": lambda t: F.batch_norm(t(2, 3), t(3).double(), t(3).double()),
    "an attention mask of integers": lambda t: F.scaled_dot_product_attention(*[t(1, 2, 3)] * 3, attn_mask=t(2, 2).long()),
    "a loss of integers and numbers": lambda t: F.huber_loss(t(3).long(), t(3)),
    "counts of two dims": lambda t: t(3, 4).long().bincount(),
    "counts of a negative number": lambda t: t(3).long().bincount(minlength=-1),
    "distinct rows of a missing dim": lambda t: t(3).unique(dim=3),
    "too many values to put": lambda t: t(3).put_(t(2).long(), t(3)),
    "least squares of other rows": lambda t: torch.linalg.lstsq(t(2, 3), t(3, 3)),
    "repeats that are numbers": lambda t: torch.repeat_interleave(t(2), t(2)),
    "a list of other dims": lambda t: torch.cat([t(2, 3), t(2)]),
    "a stack": lambda t: torch.stack([t(2, 3), t(2, 4)]),
    "a layer norm": lambda t: F.layer_norm(t(2, 3), (4,)),
    "a target of two dims": lambda t: F.cross_entropy(t(4, 3), t(4, 1).long()),
    "a table of one dim": lambda t: F.embedding(t(3).long(), t(5)),
    "an index of floats": lambda t: t(3, 4)[t(2)],
    "too many of the largest": lambda t: t(3).topk(5),
    "a view": lambda t: t(2, 3).view(4, 2),
    "a flat view of columns": lambda t: t(2, 3).t().view(6),
    "a view of columns by another dtype": lambda t: t(2, 4).t().view(torch.float64),
    "complex numbers of columns": lambda t: torch.view_as_complex(t(2, 3).t()),
    "integers in place": lambda t: t(3).long().div_(2),
    "integers times others in place": lambda t: t(3).long().mul_(t(3)),
    "a power of integers in place": lambda t: t(3).long().pow_(0.5),
    "an out= that is an input": lambda t: torch.take(x := t(4), t(4).long(), out=x),
    "an out= that is part of an input": lambda t: torch.take(x := t(4).long(), x[1:], out=x[:-1]),
    "an out= that is a detached input": lambda t: torch.take((x := t(4)).detach(), t(4).long(), out=x.detach()),
    "an out= that is part of a detached input": lambda t: torch.take(
        (x := t(4).long()).detach(), x[1:].detach(), out=x.detach()[:-1].detach()
    ),
    "a comparison in place with more dims": lambda t: t(3).eq_(t(2, 3)),
    "a remainder in place with more dims": lambda t: t(3).fmod_(t(2, 3)),
    "a number in place with a vector": lambda t: t().logical_xor_(t(3)),
    "a shifted part of itself in place": lambda t: (x := t(6))[1:].sub_(x[:-1]),
    "its own columns in place": lambda t: (x := t(3, 3)).add_(x.t()),
    "a copy of a shifted part": lambda t: (x := t(6))[1:].copy_(x[:-1]),
    "an expanded tensor in place": lambda t: t(1).expand(3).add_(1),
    "part of an expanded tensor in place": lambda t: t(3, 1).expand(3, 4)[1:].copy_(t(2, 4)),
    "an expanded tensor with an activation": lambda t: F.relu(t(1).expand(3), inplace=True),
    "a scatter into an expanded tensor": lambda t: t(1).expand(3).scatter_(0, t(1).long(), 2),
    "one less a mask": lambda t: 1 - t(3).bool(),
    "a mask less a mask": lambda t: t(3).bool() - t(3).bool(),
    "integers less a mask": lambda t: t(3).long().sub_(t(3).bool()),
    "integers less True": lambda t: t(3).long() - True,
    "a negative mask": lambda t: -t(3).bool(),
    "the deviation of integers": lambda t: t(3).long().std(),
    "the variance of a mask": lambda t: torch.var_mean(t(3).bool(), 0),
    "an out= of another dtype": lambda t: torch.take(t(4), t(2).long(), out=t(2).double()),
    "an out= of another complex dtype": lambda t: torch.complex(t(2), t(2), out=t(2).to(torch.complex128)),
    "an empty mean": lambda t: t(3).long().mean(),
    "a mask of another shape": lambda t: t(2, 3)[t(3).bool()],
    "a mask of another shape in an assignment": lambda t: t(2, 3).__setitem__(t(3).bool(), 1.0),
    "a mask of a later dim": lambda t: t(2, 3, 4)[:, t(4).bool()],
    "a large tensor's mask": lambda t: t(2000, 3)[t(3000).bool()],
    "a selection by a mask": lambda t: torch.masked_select(t(2, 3), t(4).bool()),
    "the largest of nothing": lambda t: t(0, 3).max(),
    "the largest of an empty dim": lambda t: t(0, 3).min(0),
    "the place of the largest of nothing": lambda t: t(0, 3).argmax(),
    "the largest truth values": lambda t: t(3).bool().topk(1),
    "a softmax over a missing dim": lambda t: t(3).softmax(1),
    "a softmax of many over a missing dim": lambda t: t(300, 30).softmax(-3),
    "many to sort by a missing dim": lambda t: t(300, 30).sort(2),
    "a place in the order of a missing dim": lambda t: t(300, 30).argsort(-3),
    "many to tell apart by a missing dim": lambda t: t(300, 30).unique_consecutive(dim=2),
    "a slice of a missing dim to replace": lambda t: t(300, 30).slice_scatter(t(300, 30), 2),
    "a softmax of integers": lambda t: t(2, 3).long().softmax(1),
    "a softmax of many integers": lambda t: t(300, 300).long().softmax(1),
    "a logarithm of probabilities of truth values": lambda t: t(2, 3).bool().log_softmax(1),
    "a loss of integers": lambda t: F.nll_loss(t(2, 3).long(), t(2).long()),
    "bits of numbers": lambda t: t(2, 3) & 1,
    "counts of numbers": lambda t: torch.bincount(t(3)),
    "a clamp of complex numbers": lambda t: t(3).to(torch.complex64).clamp(t(3), t(3)),
    "a singular value of half precision": lambda t: torch.linalg.svdvals(t(3, 3).half()),
    "a determinant of a number": lambda t: torch.linalg.det(t()),
    "eigenvalues of integers": lambda t: torch.linalg.eigvals(t(3, 3).long()),
    "rows by a matrix": lambda t: t(2, 3).index_select(0, t(1, 1).long()),
    "boundaries of two dims": lambda t: torch.bucketize(t(3), t(2, 3)),
    "no dilation": lambda t: F.conv1d(t(1, 1, 4), t(1, 1, 2), dilation=-1),
    "negative padding": lambda t: F.conv2d(t(1, 1, 4, 4), t(1, 1, 2, 2), padding=-1),
    "a negative power of integers": lambda t: t(3).long() ** -1,
    "integers by zero": lambda t: t(3).long() // 0,
    "rounded quotients by zero": lambda t: torch.div(t(3).long(), 0, rounding_mode="floor"),
    "the remainder by zero": lambda t: t(3).long() % 0,
    "too large a number for a byte": lambda t: t(3).to(torch.uint8).fill_(300),
    "bytes of too large a number": lambda t: torch.full_like(t(3), 300, dtype=torch.uint8),
    "too large a number for half precision": lambda t: t(3).half().masked_fill(t(3).bool(), -1e9),
    "no range of integers": lambda t: t(3).long().random_(5, 5),
    "a range beyond the dtype": lambda t: t(3).to(torch.uint8).random_(0, 300),
    "no range": lambda t: t(3).uniform_(2, 1),
    "a negative deviation": lambda t: t(3).normal_(0, -1),
    "no probability": lambda t: t(3).bernoulli_(3.0),
    "normal integers": lambda t: t(3).long().normal_(),
    "more samples than categories": lambda t: torch.multinomial(t(3) + 1, 9),
    "samples of integers": lambda t: torch.multinomial(t(3).long() + 1, 1),
    "no probability of a dropout": lambda t: torch.native_dropout(t(3), 2.0, True),
    "an order of more numbers than a byte has": lambda t: torch.randperm(129, dtype=torch.int8, device=t(1).device),
    "an order of more numbers than half precision has": lambda t: torch.randperm(2050, dtype=torch.half, device=t(1).device),
    "an order of truth values": lambda t: torch.randperm(2, dtype=torch.bool, device=t(1).device),
    "too large a number to scatter": lambda t: t(3).to(torch.int8).scatter(0, t(1).long(), 300),
    "a list whose memory repeats": lambda t: torch._foreach_add_([t(1).expand(3)], 1.0),
    "a list of copies to memory that repeats": lambda t: torch._foreach_copy_([t(1).expand(3)], [t(3)]),
    "a draw into memory that repeats": lambda t: t(1).expand(3).normal_(),
    "chances into memory that repeats": lambda t: t(1).expand(3).bernoulli_(0.5),
    "counted truth values": lambda t: torch.arange(3, dtype=torch.bool, device=t(1).device),
    "truth values of a range": lambda t: torch.linspace(0, 1, 3, dtype=torch.bool, device=t(1).device),
    "a sum as truth values": lambda t: t(3).cumsum(0, dtype=torch.bool),
    "rates that are integers": lambda t: torch.poisson(t(3).long()),
    "chances that are integers": lambda t: torch.bernoulli(t(3).long()),
    "a median of nothing": lambda t: t(0, 4).median(0),
    "a mode of nothing": lambda t: t(0, 4).mode(0),
    "a negative beta": lambda t: F.smooth_l1_loss(t(3), t(3), beta=-1.0),
    "an alpha of zero": lambda t: (F.celu(t(3)), F.celu(t(3), 0.0)),
    "a list times half in place": lambda t: torch._foreach_mul_([t(3).long()], 0.5),
    "a list of copies of other shapes": lambda t: torch._foreach_copy_([t(3)], [t(4)]),
    "lists of other lengths": lambda t: torch._foreach_copy_([t(3)], [t(3), t(3)]),
    "norms of integers": lambda t: torch._foreach_norm([t(3).long()]),
    "half of truth values to add": lambda t: t(3).bool().add(t(3).bool(), alpha=0.5),
    "a complex number for real elements": lambda t: t(3).fill_(1j),
    "a complex deviation": lambda t: torch.normal(t(3), t(3).to(torch.complex64)),
    "a matrix of other rows to add": lambda t: torch.addmm(t(2, 3), t(1, 4), t(4, 3)),
    "a vector of two dims to add": lambda t: torch.addmv(t(1, 2), t(2, 3), t(3)),
    "inverted bits into numbers": lambda t: torch.bitwise_not(t(3).long(), out=t(3).double()),
    "negatives into another dtype": lambda t: torch.neg(t(3), out=t(3).double()),
    "a triangle into another dtype": lambda t: torch.tril(t(3, 3), out=t(3, 3).double()),
    "places as numbers": lambda t: torch.nonzero(t(3), out=t(3, 1)),
    "a truth as a number": lambda t: torch.all(t(3), out=t()),
    "the largest into another dtype": lambda t: torch.amax(t(3), 0, out=t().double()),
    "sorted into another dtype": lambda t: torch.sort(t(3), out=(t(3).double(), t(3).long())),
    "a cross product into another dtype": lambda t: torch.linalg.cross(t(3), t(3), out=t(3).double()),
    "a conjugate into another dtype": lambda t: torch.conj_physical(t(3), out=t(3).double()),
    "membership as numbers": lambda t: torch.isin(t(3), t(3), out=t(3).double()),
    "attention that drops more than all": lambda t: F.scaled_dot_product_attention(*[t(1, 2, 3)] * 3, dropout_p=2.0),
}


def raised(work: Callable[[], object]) -> tuple[type, str]:
    with pytest.raises(Exception) as found:
        work()
    return found.type, str(found.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_the_text_that_it_has_on_the_cpu(name: str, session: Callable) -> None:
    session()

    def make(device: str) -> Make:
        return lambda *shape: torch.zeros(shape, device=device)

    here, remote = (raised(lambda device=device: MISTAKES[name](make(device))) for device in ("cpu", "remote"))
    assert remote == here


ACCEPTED: dict[
    str, Callable[[Make], torch.Tensor]
] = {  # though torch's meta kernels refuse it, give it other strides, or other values would fail
    "a shift of truth values": lambda t: t(3).bool() << 1,
    "an empty logarithm of probabilities": lambda t: t(0, 3).bool().log_softmax(1),
    "an interpolation of nothing": lambda t: F.interpolate(t(0, 2, 3), 4, mode="nearest-exact"),
    "sorted truth values": lambda t: t(3).bool().sort().indices,
    "quotients of integers": lambda t: t(3).long() // (t(3).long() + 2),
    "a number by integers": lambda t: 7 // (t(3).long() + 2),
    "a number's remainder by integers": lambda t: 7 % (t(3).long() + 2),
    "a number's rounded quotient by integers": lambda t: torch.div(7, t(3).long() + 2, rounding_mode="trunc"),
    "a target of a wider dtype": lambda t: F.huber_loss(t(3), t(3).double() + 1),
    "a margin to a wider dtype": lambda t: F.soft_margin_loss(t(3), t(3).double() + 1),
    "a loss with weights of a wider dtype": lambda t: F.binary_cross_entropy(t(3) + 0.5, t(3), t(3).double() + 2),
    "a norm of half precision with weights": lambda t: F.group_norm(t(2, 4).bfloat16(), 2, t(4) + 1),
    "itself in place": lambda t: (x := t(3) + 2).mul_(x),
    "another part of itself in place": lambda t: (x := t(6) + 2)[3:].mul_(x[:3]),
    "every other element in place": lambda t: (x := t(6) + 2)[::2].mul_(x[1::2]),
    "a repetition": lambda t: torch.repeat_interleave(t(2), t(2).long() + 2, output_size=4),
    "places of a known number": lambda t: torch.nonzero_static(t(3, 2) + 1, size=4),
    "eigenvectors": lambda t: torch.linalg.eig(t(2, 3, 3)).eigenvectors,
    "a sum into another dtype": lambda t: torch.add(t(3), 1, out=t(3).double()),
    "a root into complex numbers": lambda t: torch.sqrt(t(3) + 4, out=t(3).to(torch.complex64)),
    "a product into another dtype": lambda t: torch.prod(t(3) + 2, 0, out=t()),
    "a range of one number": lambda t: t().uniform_(2, 2),
    "a root of half precision": lambda t: (t(3).half() + 1).masked_fill(t(3).bool(), -1e4).sqrt(),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_the_cpu_accepts_works(name: str, session: Callable) -> None:
    session()
    here, remote = (ACCEPTED[name](lambda *shape, on=device: torch.zeros(shape, device=on)) for device in ("cpu", "remote"))
    assert (remote.dtype, remote.stride()) == (here.dtype, here.stride())
    assert torch.equal(remote.cpu(), here)


def test_each_number_of_a_known_call_is_checked(session: Callable) -> None:
    session()
    x = (torch.zeros(2, device="remote").long() + 3) ** 2
    assert (x // 2).tolist() == [4, 4]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        x // 0
    with pytest.raises(RuntimeError, match="negative integer powers"):
        x**-1
    assert torch.zeros(2, device="remote").uniform_(1, 1).tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="from=2 > to=1"):
        torch.zeros(2, device="remote").uniform_(2, 1)
    assert (x**2).tolist() == [81, 81]


def test_out_may_be_another_part_of_an_inputs_memory(session: Callable) -> None:
    session()
    x = torch.arange(6.0).to("remote")
    assert torch.take(x[:3], torch.tensor([2, 0, 1]).to("remote"), out=x[3:]).tolist() == [2, 0, 1]
    assert x.tolist() == [0, 1, 2, 2, 0, 1]


def test_a_mistake_leaves_the_random_numbers_of_the_host_alone(session: Callable) -> None:
    session()
    before = torch.get_rng_state()
    torch.ones(3, device="remote").half().multinomial(2)
    torch.zeros(3, device="remote").normal_().uniform_(1, 2)
    with pytest.raises(RuntimeError):
        torch.zeros(3, device="remote").multinomial(2).add_(torch.zeros(2, 5, device="remote"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_first_dropout_leaves_the_random_numbers_of_the_host_alone(session: Callable) -> None:
    """Its chance is tried on the CPU, whose kernel takes no generator."""
    x = torch.ones(4, 5).to("remote")
    state = torch.random.get_rng_state()
    for chance in (0.125, 0.25):
        torch.native_dropout(x, chance, True)
        F.dropout(x, chance)
    assert torch.random.get_rng_state().equal(state)



def test_torch_compile_is_refused_with_what_to_use(session: Callable) -> None:
    session()
    told = re.escape("use gt.compile(model, backend='inductor')")
    with pytest.raises(UnsupportedOp, match=told):
        torch.compile(torch.nn.Linear(3, 3).to("remote"))
    moved, plain = torch.nn.Linear(3, 3), torch.compile(lambda x: x + 1, backend="eager")
    late = torch.compile(moved, backend="eager")
    moved.to("remote")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in (lambda: late(gt.ones(2, 3)), lambda: plain(gt.ones(3))):
            with pytest.raises(UnsupportedOp, match=told):
                call()
        assert plain(torch.ones(2)).tolist() == [2.0, 2.0]  # what is on the CPU compiles as before
    torch._dynamo.reset()


def test_data_parallel_says_that_a_config_does_it(session: Callable) -> None:
    session()
    for wrap in (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel):
        with pytest.raises(UnsupportedOp, match=rf"{wrap.__name__} is not for the remote device.*config=.*gt\.signal\.context"):
            wrap(torch.nn.Linear(3, 3).to("remote"))


def test_fully_sharded_data_parallel_says_that_a_config_does_it(session: Callable) -> None:
    from torch.distributed import fsdp

    session()
    for name in ("FullyShardedDataParallel", "fully_shard"):
        with pytest.raises(UnsupportedOp, match=rf"{name} is not for the remote device.*zero: 3.*config="):
            getattr(fsdp, name)(torch.nn.Linear(3, 3).to("remote"))
    with pytest.raises(ValueError, match=r"process group|rendezvous"):
        fsdp.fully_shard(torch.nn.Linear(3, 3))  # torch's own error


def test_an_argument_that_is_no_tensor_is_named(session: Callable) -> None:
    session()
    for work in (gt.inspect, gt.signal.move):
        with pytest.raises(TypeError, match="takes a remote tensor, got int"):
            work(3)
    with pytest.raises(RuntimeError, match=r"cannot pin 'torch.remote.FloatTensor': only dense CPU tensors"):
        gt.ones(2).pin_memory()


def test_out_of_another_shape_keeps_its_memory_if_that_is_large_enough(session: Callable) -> None:
    session()
    values = []
    for device in ("cpu", "remote"):
        x = torch.arange(6.0).to(device)
        out = x[1:5]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that it resizes
            torch.add(torch.ones(2, device=device), 8, out=out)
        values.append((x.tolist(), out.tolist(), out.storage_offset()))
    assert values[0] == values[1]


WRONG_KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "index_put_": lambda x, at: x.index_put_((at,), at),
    "index_copy_": lambda x, at: x.index_copy_(0, at, at),
    "index_add": lambda x, at: x.index_add(0, at, at),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_values_of_another_dtype_are_refused_at_once_and_nothing_is_lost(name: str, session: Callable) -> None:
    session()
    x, at = torch.ones(3, device="remote"), torch.zeros(3, dtype=torch.int64, device="remote")
    with pytest.raises(RuntimeError, match=r"dtypes match|same dtype|same scalar type"):
        WRONG_KINDS[name](x, at)
    assert x.tolist() == [1, 1, 1]


def test_weights_of_samples_have_the_tables_dtype(session: Callable) -> None:
    session()
    table, places = torch.ones(3, 3, device="remote"), torch.zeros(1, 2, dtype=torch.int64, device="remote")
    with pytest.raises(RuntimeError, match="weight and per_sample_weights to have the same dtype"):
        F.embedding_bag(places, table, per_sample_weights=torch.ones(1, 2, device="remote").double(), mode="sum")


def test_one_number_for_a_mask_may_have_another_dtype(session: Callable) -> None:
    session()
    x = torch.ones(3, device="remote")
    x[x > 0] = torch.tensor(2)
    assert x.tolist() == [2, 2, 2]


def test_shapes_that_no_worker_takes_are_refused_in_the_program(one):
    """The dispatcher ends a session for them, since a client has checked them before."""
    x = torch.randn(4, 4).to("remote")
    with pytest.raises(RuntimeError, match=r"aten._pdist_backward.default of .* is refused: want gradient"):
        torch.ops.aten._pdist_backward(x, x, 2.0, x)
    assert (x - x).sum().item() == 0


@pytest.mark.skipif(not hasattr(torch._higher_order_ops.utils, "_hop_compile_and_call"), reason="torch 2.13 has it")
@pytest.mark.usefixtures("one")
def test_control_flow_by_functions_is_decided_by_python():
    from torch._higher_order_ops import scan, while_loop

    def program(device: str) -> list[torch.Tensor]:
        x = torch.tensor([0.5, -2.0, 1.0], device=device, requires_grad=True)
        branches = [torch.cond(choice, torch.sin, lambda x: x * 2, (x,)) for choice in (x.sum() > 0, x.sum() < 0)]
        (branches[0].sum() * branches[1].sum()).backward()
        count, value = while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, x * 2), (torch.tensor(0, device=device), x.detach()))
        return [*branches, x.grad, count, value]

    for got, want in zip(program("remote"), program("cpu"), strict=True):
        assert torch.equal(got.cpu(), want)
    with pytest.raises(UnsupportedOp, match="torch's scan compiles its functions"):
        scan(lambda c, x: (c + x, c * x), torch.zeros(2, device="remote"), torch.ones(3, 2, device="remote"))


@pytest.mark.parametrize("value", [(1.0,), (0.0,), (1.0, 2.0), ()])
def test_an_assertion_of_a_value_is_torchs(value: tuple[float, ...], one: object) -> None:
    """kornia, torch.export and others write assertions so; on a GPU they would end the worker."""
    told = []
    for device in ("cpu", "remote"):
        x = torch.tensor(value, device=device)
        for more in ((), ("the matrix is singular",)):
            try:
                told.append(torch._assert_async(x, *more))
            except RuntimeError as failure:
                told.append(str(failure))
    assert told[:2] == told[2:]


def test_an_assertion_in_a_captured_step_is_made_at_each_call(one: object) -> None:
    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x.sum() > 0, "not positive")
        return x * 2

    assert [step(torch.ones(2)).tolist() for _ in range(6)] == [[2.0, 2.0]] * 6
    with pytest.raises(RuntimeError, match="not positive"):
        step(-torch.ones(2))
    assert step(torch.ones(2)).tolist() == [2.0, 2.0]
