"""Methods of training: reinforcement learning, meta learning, and techniques around an ordinary step."""

from __future__ import annotations

import copy
import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jacrev, stack_module_state, vmap
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, random_split

from tests.programs.program import Program, batches, labelled, mlp, train


class Pendulums:
    """Many pendulums at once, as tensors on one device."""

    def __init__(self, angles: torch.Tensor) -> None:
        self.state = torch.stack([angles, torch.zeros_like(angles)], -1)

    def step(self, action):
        angle, speed = self.state.unbind(-1)
        speed = (speed + 0.1 * (torch.sin(angle) + action.float() - 1)).clamp(-2, 2)
        self.state = torch.stack([angle + 0.1 * speed, speed], -1)
        return -self.state[:, 0].square()


def proximal_policy(device: str) -> Program:
    """PPO: a rollout, advantages by generalised estimation, and several updates with a clipped ratio."""
    policy, critic = mlp(2, 12, 3).to(device), mlp(2, 12, 1).to(device)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=1e-2, eps=1e-5)

    def rollout(angles, draws):
        game, rows = Pendulums(angles), []
        with torch.no_grad():
            for draw in draws.unbind(0):
                logits, value, state = policy(game.state), critic(game.state).squeeze(-1), game.state
                action = (logits.softmax(-1).cumsum(-1) < draw[:, None]).sum(-1).clamp(max=2)
                chance = torch.distributions.Categorical(logits=logits).log_prob(action)
                rows.append((state, action, chance, value, game.step(action)))
            last, advantage, advantages = critic(game.state).squeeze(-1), 0.0, []
            for _, _, _, value, reward in reversed(rows):
                advantage = reward + 0.9 * last - value + 0.8 * advantage
                last = value
                advantages.append(advantage)
        return [torch.stack(part).flatten(0, 1) for part in zip(*rows, strict=True)][:4], torch.cat(advantages[::-1])

    def step(angles, draws):
        (states, actions, before, values), advantages = rollout(angles, draws)
        targets, advantages = advantages + values, (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for part in torch.arange(len(states), device=states.device).chunk(2):
            chosen = torch.distributions.Categorical(logits=policy(states[part]))
            ratio = (chosen.log_prob(actions[part]) - before[part]).exp()
            gain = torch.min(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part]).mean()
            value = F.huber_loss(critic(states[part]).squeeze(-1), targets[part])
            loss = 0.5 * value - gain - 0.01 * chosen.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
        return loss.detach()

    return Program(step, batches(2, lambda g: (torch.randn(6, generator=g), torch.rand(4, 6, generator=g))), [policy, critic])


def deep_q_learning(device: str) -> Program:
    """A replay buffer on the device, a target network that follows slowly, and double Q learning."""
    net = mlp(2, 12, 3, activation=nn.ReLU).to(device)
    target = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    memory = [torch.zeros(32, 2), torch.zeros(32, dtype=torch.long), torch.zeros(32), torch.zeros(32, 2)]
    memory, size = [part.to(device) for part in memory], [0]

    def step(angles, explore, rows):
        game = Pendulums(angles)
        state = game.state
        with torch.no_grad():
            action = torch.where(explore < 0.3, (explore * 10).long(), net(state).argmax(-1))
        reward = game.step(action)
        place = torch.arange(size[0], size[0] + len(angles), device=angles.device) % 32
        for kept, new in zip(memory, (state, action, reward, game.state), strict=True):
            kept[place] = new
        size[0] += len(angles)
        state, action, reward, after = (kept[rows % min(size[0], 32)] for kept in memory)
        with torch.no_grad():
            best = target(after).gather(1, net(after).argmax(-1, keepdim=True)).squeeze(1)
        loss = F.smooth_l1_loss(net(state).gather(1, action[:, None]).squeeze(1), reward + 0.9 * best)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(net.parameters()), 0.05)
        return loss.detach()

    def draw(g):
        return torch.randn(6, generator=g), torch.rand(6, generator=g), torch.randint(64, (8,), generator=g)

    return Program(step, batches(4, draw), [net, target])


def policy_gradient(device: str) -> Program:
    """A Gaussian policy squashed by tanh, with its log probability from torch's transforms."""
    policy = mlp(2, 8, 2).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def step(angles, noise):
        state = torch.stack([angles, angles.cos()], -1)
        mean, scale = policy(state).unbind(-1)
        squash = [torch.distributions.transforms.TanhTransform(cache_size=1)]
        chosen = torch.distributions.TransformedDistribution(torch.distributions.Normal(mean, F.softplus(scale) + 0.1), squash)
        action = torch.tanh(mean + (F.softplus(scale) + 0.1) * noise)
        reward = -(angles + action.detach()).square()
        return train(-(chosen.log_prob(action.detach().clamp(-0.99, 0.99)) * (reward - reward.mean())).mean(), optimizer)

    return Program(step, batches(3, lambda g: (torch.randn(8, generator=g), torch.randn(8, generator=g))), [policy])


def meta_learning(device: str) -> Program:
    """MAML: gradients through two inner steps for each of two tasks."""
    model = mlp(12, 16, 5).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x, y):
        total = 0.0
        for rows in torch.arange(len(x), device=x.device).chunk(2):
            weights = dict(model.named_parameters())
            for _ in range(2):
                loss = F.cross_entropy(functional_call(model, weights, (x[rows[::2]],)), y[rows[::2]])
                slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes, strict=True)}
            total = total + F.cross_entropy(functional_call(model, weights, (x[rows[1::2]],)), y[rows[1::2]])
        return train(total, optimizer)

    return Program(step, labelled(3), [model])


def sharpness_aware(device: str) -> Program:
    """SAM: the gradient at a point uphill."""
    model = mlp(12, 16, 5, activation=nn.GELU).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([slope.norm() for slope in slopes]).norm() + 1e-12
        with torch.no_grad():
            moves = [0.05 * slope / norm for slope in slopes]
            torch._foreach_add_(list(model.parameters()), moves)
        train_loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        train_loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        return loss.detach()

    return Program(step, labelled(), [model])


def accumulation(device: str) -> Program:
    """Gradients of parts of a batch, frozen layers, groups with rates of their own, and gradients clipped by value."""
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Mish(), nn.Linear(16, 5)).to(device)
    model[1].requires_grad_(False)
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[3].parameters(), "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, maximize=False)

    def step(x, y):
        optimizer.zero_grad(set_to_none=False)
        total = torch.zeros((), device=x.device)
        for part, label in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.cross_entropy(model(part), label) / 4
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=torch.inf)
        optimizer.step()
        return total

    return Program(step, labelled(), [model])


def schedulers(device: str) -> Program:
    """A learning rate from many schedules in turn."""
    model = mlp(12, 16, 5).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    warm = lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    )
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    def step(x, y):
        loss = train(F.cross_entropy(model(x), y), optimizer)
        warm.step()
        plateau.step(loss.item())
        return loss

    return Program(step, labelled(6), [model], lambda: torch.tensor(optimizer.param_groups[0]["lr"]))


class Rounded(torch.autograd.Function):
    """Rounds, and passes gradients through inside a range."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return (x / scale).round().clamp(-8, 7) * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        inside = ((x / scale).abs() < 8).to(grad.dtype)
        return grad * inside, (grad * (1 - inside)).sum().expand_as(scale)


def custom_function(device: str) -> Program:
    """An autograd function of the user, hooks of modules and tensors, and activations that are computed again."""
    model = nn.ModuleList([nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 5)]).to(device)
    scale = nn.Parameter(torch.tensor(0.05, device=device))
    optimizer = torch.optim.Adam([*model.parameters(), scale], lr=1e-2)
    seen: list[torch.Tensor] = []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.detach().mean()))
    model[2].weight.register_hook(lambda g: g * 2)
    model[0].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].norm()))

    def step(x, y):
        h = F.linear(x.requires_grad_(), Rounded.apply(model[0].weight, scale), model[0].bias)
        h = checkpoint(lambda t: torch.tanh(model[1](t)), torch.tanh(h) + 0 * model[0](x).sum(), use_reentrant=False)
        return train(F.cross_entropy(model[2](h), y), optimizer)

    return Program(step, labelled(), [model], lambda: [scale, *seen])


def ensemble(device: str) -> Program:
    """Models trained as one by vmap, with a Jacobian of each at the end."""
    models = [mlp(12, 8, 5).to(device) for _ in range(3)]
    weights, buffers = stack_module_state(models)
    weights = {name: weight.detach() for name, weight in weights.items()}
    skeleton = copy.deepcopy(models[0]).to("meta")

    def loss(weights, buffers, x, y):
        return F.cross_entropy(functional_call(skeleton, (weights, buffers), (x,)), y)

    def step(x, y):
        slopes, losses = vmap(grad_and_value(loss), in_dims=(0, 0, None, None))(weights, buffers, x, y)
        for name in weights:
            weights[name] = weights[name] - 0.1 * slopes[name]
        return losses.mean()

    def jacobian():
        x = torch.linspace(-1, 1, 12, device=device)
        return vmap(lambda w, b: jacrev(lambda v: functional_call(skeleton, (w, b), (v,)))(x))(weights, buffers)

    return Program(step, labelled(), [], lambda: [*weights.values(), jacobian()])


def private_gradients(device: str) -> Program:
    """Gradients of each row, clipped one by one."""
    model = mlp(12, 8, 5).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss(weights, x, y):
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    def step(x, y):
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        slopes = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
        norms = torch.stack([slope.flatten(1).norm(dim=1) for slope in slopes.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, weight in model.named_parameters():
            weight.grad = torch.einsum("n,n...->...", factor, slopes[name]) / len(x)
        optimizer.step()
        return norms.mean()

    return Program(step, labelled(), [model])


def pruned_and_orthogonal(device: str) -> Program:
    """Parametrizations, a pruned layer and a dry run on the CPU before the module moves."""
    model = nn.Sequential(
        parametrizations.orthogonal(nn.Linear(12, 12)), nn.Tanh(), parametrizations.weight_norm(nn.Linear(12, 16)),
        nn.Softplus(), nn.Linear(16, 5),
    )  # fmt: skip
    prune.l1_unstructured(model[4], "weight", 0.3)
    dry = model(torch.ones(2, 12))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x, y):
        assert dry.shape == (2, 5)
        return train(F.cross_entropy(model(x), y), optimizer)

    return Program(step, labelled(), [model], lambda: model[0].weight @ model[0].weight.T)


def saved_and_resumed(device: str) -> Program:
    """Model and optimizer are saved after each step and loaded into new ones; the whole model too."""
    state = {"model": mlp(12, 8, 5).to(device)}
    state["optimizer"] = torch.optim.Adam(state["model"].parameters(), lr=1e-2)

    def step(x, y):
        loss = train(F.cross_entropy(state["model"](x), y), state["optimizer"])
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in state.items()}, file)
        file.seek(0)
        loaded = torch.load(file)
        fresh = mlp(12, 8, 5).to(device)
        fresh.load_state_dict(loaded["model"])
        optimizer = torch.optim.Adam(fresh.parameters(), lr=1.0)
        optimizer.load_state_dict(loaded["optimizer"])
        state.update(model=fresh, optimizer=optimizer)
        return loss

    def best():
        file = io.BytesIO()
        torch.save(state["model"], file)
        file.seek(0)
        return torch.load(file, weights_only=False)(torch.ones(2, 12, device=device))

    return Program(step, labelled(3), [], best)


def data_pipeline(device: str) -> Program:
    """A random split, shuffled loaders and weighted samples, all by generators; every epoch has a validation."""
    model = mlp(12, 8, 5).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x, y):
        data = TensorDataset(x.cpu(), y.cpu())
        training, validation = random_split(data, [0.75, 0.25], torch.Generator().manual_seed(1))
        for part, label in DataLoader(training, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2)):
            train(F.cross_entropy(model(part.to(device, non_blocking=True)), label.to(device)), optimizer)
        model.eval()
        with torch.inference_mode():
            losses = [F.cross_entropy(model(part.to(device)), label.to(device)) for part, label in DataLoader(validation, 2)]
        model.train()
        return torch.stack(losses).mean()

    return Program(step, labelled(2, 16), [model])


PROGRAMS = (
    proximal_policy, deep_q_learning, policy_gradient, meta_learning, sharpness_aware, accumulation, schedulers,
    custom_function, ensemble, private_gradients, pruned_and_orthogonal, saved_and_resumed, data_pipeline,
)  # fmt: skip
