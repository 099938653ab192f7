"""torch.Generator(device="remote"), in every function that takes a generator."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, random_split

pytestmark = [
    pytest.mark.usefixtures("one"),
    pytest.mark.filterwarnings("ignore:.*draws on this process's CPU:UserWarning"),
]
Draw = Callable[[torch.Generator], torch.Tensor]
DRAWS: dict[str, Draw] = {
    "randn": lambda g: torch.randn(8, generator=g, device="remote"),
    "rand": lambda g: torch.rand(8, generator=g, device="remote"),
    "randint": lambda g: torch.randint(100, (8,), generator=g, device="remote"),
    "randperm": lambda g: torch.randperm(20, generator=g, device="remote"),
    "normal": lambda g: torch.normal(torch.zeros(8, device="remote"), 1.0, generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((40,), 0.5, device="remote"), generator=g),
    "bernoulli_": lambda g: torch.empty(40, device="remote").bernoulli_(0.5, generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(20, device="remote"), 8, generator=g),
    "poisson": lambda g: torch.poisson(torch.full((8,), 9.0, device="remote"), generator=g),
    "normal_": lambda g: torch.empty(8, device="remote").normal_(generator=g),
    "uniform_": lambda g: torch.empty(8, device="remote").uniform_(-1, 1, generator=g),
    "random_": lambda g: torch.empty(8, device="remote").random_(100, generator=g),
    "exponential_": lambda g: torch.empty(8, device="remote").exponential_(generator=g),
    "init": lambda g: nn.init.kaiming_uniform_(torch.empty(4, 4, device="remote"), generator=g),
    "binomial": lambda g: torch.binomial(torch.full((8,), 9.0).to("remote"), torch.full((8,), 0.5).to("remote"), generator=g),
    "gamma": lambda g: torch._standard_gamma(torch.full((8,), 2.0, device="remote"), generator=g),
    "on the CPU": lambda g: torch.randn(8, generator=g),
}


def remote(seed: int = 0) -> torch.Generator:
    return torch.Generator(device="remote").manual_seed(seed)


@pytest.mark.parametrize("name", DRAWS)
def test_its_seed_decides_the_numbers(name: str) -> None:
    draw, generator = DRAWS[name], remote(3)
    first, second = draw(generator).cpu(), draw(generator).cpu()
    assert not torch.equal(first, second)
    generator.manual_seed(3)
    assert torch.equal(draw(generator).cpu(), first)
    assert not torch.equal(draw(remote(4)).cpu(), first)


def test_draws_of_distributions_follow_the_seed_and_have_gradients() -> None:
    """Those whose elements take several draws are drawn on the CPU."""
    D = torch.distributions
    rate = torch.tensor([0.5, 2.0, 9.0]).to("remote").requires_grad_()

    def drawn(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        made = [D.Gamma(rate, 1.0).rsample((2000,)), D.Beta(rate, 2.0).rsample((2000,)), D.Dirichlet(rate).rsample((2000,))]
        return [*made, D.Binomial(10, rate / 10).sample((2000,))]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in zip(first, again, other))
    assert all(sample.device.type == "remote" for sample in first)
    for sample, mean in zip(first, (rate, rate / (rate + 2), rate / rate.sum(), rate)):
        torch.testing.assert_close(sample.mean(0), mean, rtol=0.1, atol=0.02)
    first[0].mean().backward()
    torch.testing.assert_close(rate.grad.cpu(), torch.full((3,), 1 / 3), rtol=0.15, atol=0.0)  # a gamma's mean is its rate


def test_it_is_a_generator_of_the_device() -> None:
    generator = torch.Generator("remote:0")
    assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
    assert isinstance(torch.Generator(), torch.Generator) and torch.Generator().device.type == "cpu"
    assert generator.device == torch.device("remote", 0)
    assert generator.manual_seed(5) is generator and generator.initial_seed() == 5
    assert isinstance(generator.seed(), int)
    with pytest.raises(RuntimeError, match="there is no remote:1"):
        torch.Generator("remote:1")
    with pytest.raises(RuntimeError):
        torch.Generator("nowhere")


def test_its_state_is_kept_and_copied() -> None:
    generator = remote(1)
    state, draw = generator.get_state(), DRAWS["randn"]
    copies = [generator.clone_state(), pickle.loads(pickle.dumps(generator)), copy.deepcopy(generator)]
    want = draw(generator).cpu()
    generator.set_state(state)
    for one in (generator, *copies):
        assert one.device.type == "remote" and torch.equal(draw(one).cpu(), want)


def test_data_sets_take_it() -> None:
    data = TensorDataset(torch.arange(20))

    def order(seed: int) -> list[int]:
        parts = random_split(data, [12, 8], generator=remote(seed))
        loader = DataLoader(parts[0], batch_size=4, shuffle=True, generator=remote(seed))
        sampler = RandomSampler(data, replacement=True, num_samples=5, generator=remote(seed))
        return [int(x) for (batch,) in loader for x in batch] + list(sampler)

    assert order(1) == order(1) != order(2)
