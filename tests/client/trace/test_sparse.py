"""Sparse tensors on remote: gradients of embeddings and their optimizers, matrices of graphs, conversions."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch

import gt
from gt.client.device.sparse_tensor import RemoteSparse

pytestmark = [  # torch's own, of tensors on the CPU too
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]
DENSE = torch.tensor([[0.0, 2.0, 0.0, 1.0], [3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 5.0, 4.0, 0.0]])
Result = list[torch.Tensor]


def compare(program: Callable[[str], Result], exact: bool = True) -> None:
    """A program's results on remote are the CPU's; not exact: within rounding, where sums run in another order."""
    for got, want in zip(program("remote"), program("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6)


# ---- sparse gradients


def train(device: str, make: Callable[[], torch.nn.Module], optimizer: Callable, twice: bool = False) -> Result:
    torch.manual_seed(0)
    embedding, head = make().to(device), torch.nn.Linear(4, 1).to(device)
    optimizers = [optimizer(list(embedding.parameters())), torch.optim.SGD(head.parameters(), 0.1)]
    losses = []
    for _ in range(3):
        index = torch.randint(10, (3, 5)).to(device)
        rows = embedding(index) + embedding(index.flip(0)) if twice else embedding(index)
        loss = head(rows).square().mean()
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        for each in optimizers:
            each.step()
        losses.append(loss.detach())
    grad = embedding.weight.grad
    assert grad.is_sparse and grad.layout is torch.sparse_coo and grad.device.type == device
    assert not twice or not grad.is_coalesced()
    return [*losses, embedding.weight.detach(), grad.to_dense(), grad.coalesce().indices(), grad.coalesce().values()]


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, 0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
}
EMBEDDINGS = {
    "embedding": lambda: torch.nn.Embedding(10, 4, sparse=True),
    "padding": lambda: torch.nn.Embedding(10, 4, sparse=True, padding_idx=3),
    "bag": lambda: torch.nn.EmbeddingBag(10, 4, sparse=True, mode="sum"),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_an_embedding_with_sparse_gradients_trains_as_on_the_cpu(
    one: None, plain_threads: None, embedding: str, optimizer: str
):
    compare(lambda device: train(device, EMBEDDINGS[embedding], OPTIMIZERS[optimizer]))


def test_gradients_of_two_uses_add_up(one: None, plain_threads: None):
    compare(lambda device: train(device, EMBEDDINGS["embedding"], OPTIMIZERS["SparseAdam"], twice=True), exact=False)


def test_gradients_accumulate_over_two_backwards(one: None, plain_threads: None):
    def program(device: str) -> Result:
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(6, 2, sparse=True).to(device)
        for index in ([1, 2, 2], [2, 5, 0]):
            embedding(torch.tensor(index).to(device)).square().sum().backward()
        return [embedding.weight.grad.to_dense(), embedding.weight.grad.norm()]

    compare(program)


def test_a_split_table_trains_as_a_whole_one(session: Callable[..., None], plain_threads: None):
    session("data: {workers: [0, 1]}\n")

    def program(device: str) -> Result:
        with gt.signal.context("data"):
            return train(device, EMBEDDINGS["embedding"], OPTIMIZERS["SGD"])

    compare(program, exact=False)


# ---- matrices of graphs


def csr_of_parts(device: str) -> torch.Tensor:
    host = DENSE.to_sparse_csr()
    parts = (part.to(device) for part in (host.crow_indices(), host.col_indices(), host.values()))
    return torch.sparse_csr_tensor(*parts, (4, 4))


MATRICES: dict[str, Callable[[str], torch.Tensor]] = {
    "coo moved": lambda device: DENSE.to_sparse().to(device),
    "csr moved": lambda device: DENSE.to_sparse_csr().to(device),
    "coo of dense": lambda device: DENSE.to(device).to_sparse(),
    "csr of dense": lambda device: DENSE.to(device).to_sparse_csr(),
    "coo of parts": lambda device: torch.sparse_coo_tensor(
        DENSE.nonzero().t().to(device), DENSE[DENSE != 0].to(device), (4, 4)
    ),
    "coo of lists": lambda device: torch.sparse_coo_tensor([[0, 1, 1], [1, 0, 0]], [2.0, 1.0, 4.0], (4, 4), device=device),
    "csr of parts": csr_of_parts,
}


@pytest.mark.parametrize("matrix", MATRICES)
def test_a_graph_convolution_and_its_backward(one: None, plain_threads: None, matrix: str):
    def program(device: str) -> Result:
        torch.manual_seed(0)
        adjacency = MATRICES[matrix](device)
        linear, x = torch.nn.Linear(3, 2).to(device), torch.randn(4, 3).to(device).requires_grad_()
        hidden = torch.sparse.mm(adjacency, linear(x))
        out = adjacency @ torch.relu(hidden) + torch.spmm(adjacency, hidden)
        loss = out.square().mean()
        loss.backward()
        assert adjacency.device.type == device and adjacency.shape == (4, 4)
        return [loss.detach(), x.grad, linear.weight.grad, adjacency.to_dense()]

    compare(program, exact=False)


def test_values_of_a_matrix_have_gradients(one: None, plain_threads: None):
    def program(device: str) -> Result:
        index = torch.tensor([[0, 1, 2], [1, 2, 0]]).to(device)
        values = torch.tensor([1.0, 2.0, 3.0]).to(device).requires_grad_()
        out = torch.sparse.mm(torch.sparse_coo_tensor(index, values, (3, 3)), torch.arange(9.0).view(3, 3).to(device))
        out.square().sum().backward()
        return [out.detach(), values.grad]

    compare(program)


def test_a_matrix_is_a_buffer_of_a_module_and_its_step_is_captured(one: None):
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.register_buffer("adjacency", DENSE.to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.adjacency, self.linear(x))

    layer = Layer().to("remote")
    assert layer.state_dict()["adjacency"].layout is torch.sparse_coo
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(torch.ones(4, 3, device="remote")).item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and "1 program" in step.explain()


def test_a_step_that_makes_a_sparse_gradient_runs_eagerly_and_says_why(one: None):
    embedding = torch.nn.Embedding(5, 2, sparse=True).to("remote")
    optimizer = torch.optim.SGD(embedding.parameters(), 0.1)

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = embedding(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(torch.tensor([1, 2]).to("remote")).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True) and "sparse=False" in step.explain()
    assert embedding.weight.grad.is_sparse and embedding.weight.grad.shape == (5, 2)


# ---- parts, arithmetic and conversion


def test_arithmetic_of_sparse_tensors(one: None, plain_threads: None):
    def program(device: str) -> Result:
        a, b = DENSE.to(device).to_sparse(), DENSE.t().contiguous().to(device).to_sparse()
        both = (a + b) * 2
        merged = both.coalesce()
        assert (merged.sparse_dim(), merged.dense_dim(), merged._nnz(), merged.is_coalesced()) == (2, 0, 8, True)
        ones = torch.full((4, 4), 3.0).to(device)
        sparse = [both, merged, a - b, -a, a / 2, a.t(), a.to(torch.float64), a * ones, a.clone().zero_(), b.abs(), a.pow(2)]
        inplace = a.clone()
        inplace.add_(b, alpha=2)
        inplace.mul_(3)
        dense = [merged.indices(), merged.values(), a.sum(), a.norm(), torch.mv(a, ones[0]), ones + a]
        dense += [ones.sparse_mask(a).to_dense(), torch.addmm(ones, a, ones), ones.add(a, alpha=2)]
        return [x.to_dense() for x in [*sparse, inplace]] + dense

    compare(program)


def test_dims_of_values_are_dense(one: None, plain_threads: None):
    def program(device: str) -> Result:
        x = torch.arange(24.0).view(3, 4, 2).to(device)
        sparse = (x * (x > 9)).to_sparse(1)
        assert (sparse.sparse_dim(), sparse.dense_dim()) == (1, 2)
        return [sparse.indices(), sparse.values(), sparse.to_dense()]

    compare(program)


def test_a_sparse_tensor_is_copied_saved_printed_and_fetched(one: None):
    for sparse in (DENSE.to("remote").to_sparse(), DENSE.to("remote").to_sparse_csr()):
        assert isinstance(sparse, RemoteSparse) and torch.equal(sparse.cpu().to_dense(), DENSE)
        assert sparse.cpu().layout is sparse.layout and torch.equal(copy.deepcopy(sparse).to_dense().cpu(), DENSE)
        assert "device='remote:0'" in repr(sparse) and "layout=" in repr(sparse)
        file = io.BytesIO()
        torch.save(sparse, file)
        file.seek(0)
        assert torch.load(file).to_dense().tolist() == DENSE.tolist()


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (lambda x: torch.sparse.softmax(x, 1), r"_sparse_softmax.* no sparse form on remote: use x\.to_dense\(\)"),
        (lambda x: x @ x, "product of two sparse tensors"),
        (lambda x: x.to_dense().to_sparse_bsr((2, 2)), "aten._to_sparse_bsr"),
        (lambda x: DENSE.to_sparse_bsr((2, 2)).to("remote"), "want COO, or CSR of numbers"),
    ],
)
def test_other_ops_and_layouts_are_refused_with_advice(one: None, use: Callable, match: str):
    with pytest.raises(gt.UnsupportedOp, match=match):
        use(DENSE.to("remote").to_sparse())


# ---- nested tensors


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.nested_tensor([DENSE, DENSE], layout=torch.jagged).to("remote"),
        lambda: torch.nested.nested_tensor([DENSE, DENSE], layout=torch.jagged, device="remote"),
        lambda: torch.nested.as_nested_tensor([DENSE.to("remote")], layout=torch.jagged),
        lambda: torch.nested.nested_tensor_from_jagged(DENSE.to("remote"), torch.tensor([0, 1, 4]).to("remote")),
        lambda: torch.nested.nested_tensor([DENSE, DENSE]).to("remote"),
    ],
)
def test_nested_tensors_are_refused_with_advice(one: None, make: Callable):
    with pytest.raises(gt.UnsupportedOp, match=r"no nested tensors: .*pad_sequence"):
        make()


def test_dtypes_of_dense_and_sparse_operands_are_promoted_or_refused_as_on_the_cpu(one: None):
    entries = torch.sparse_coo_tensor([[0], [1]], [0.5], (2, 2))
    whole = torch.ones(2, 2, dtype=torch.int64)
    found = whole.to("remote") + entries.to("remote")
    assert found.dtype == torch.float32 and torch.equal(found.cpu(), whole + entries)
    for sparse, dense in ((entries, whole), (entries.to("remote"), whole.to("remote"))):
        with pytest.raises(RuntimeError, match="Can't convert result type"):
            dense.add_(sparse)
        for divisor in (sparse, dense):
            with pytest.raises(RuntimeError, match=r"Sparse division requires a scalar .*got shape \[2, 2\]"):
                (dense if divisor is sparse else sparse) / divisor
