"""Each program computes on `remote` what it computes on the CPU: on one worker, and data parallel on two."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gt
from tests.programs import (
    architectures,
    generation,
    language,
    methods,
    networks,
    science,
    sequences,
    structures,
    updates,
    vision,
)
from tests.programs.program import Program

Make = Callable[[str], Program]
ROOMS = (language, vision, generation, science, methods, sequences, updates, structures, architectures, networks)
ALL: tuple[Make, ...] = tuple(make for room in ROOMS for make in room.PROGRAMS)
# Recurrent layers run cell by cell, where the CPU has kernels for whole layers
RECURRENT = frozenset({"translation", "sentence_tagger", "speech_recognition"})
# Gradients of gradients: where a layer is called several times, linear's terms are added in another order than torch's
SECOND_ORDER = frozenset({"gradient_penalty", "physics_informed", "meta_learning"})
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
# Steps that are captured. The others read values, count in Python or have shapes that depend on values
CAPTURED = frozenset(
    ["masked_language_model", "sentence_tagger", "padded_sequences", "mixture_of_experts", "low_rank_adaptation",
     "distillation", "residual_network", "diffusion",
     "siamese", "two_views", "variational_autoencoder", "adversarial", "gradient_penalty",
     "energy", "mixture_density", "transducer", "gaussian_process", "neural_ode", "physics_informed", "fourier_operator",
     "kalman_filter", "hidden_markov", "clustering", "ensemble", "private_gradients", "pruned_and_orthogonal",
     "rotary_decoder", "graph_attention", "spectral_mask", "selective_scan", "radiance_field", "published_optimizers",
     "reptile", "adjoint", "capsules", "hashed_grid", "splats", "world_model", "preferences", "forward_gradients",
     "observed_ranges", "parse_trees", "memory_machine", "volumes", "complex_layers", "tensor_train",
     *(make.__name__ for make in architectures.PROGRAMS)]
)  # fmt: skip
CONFIG = "data: {workers: [0, 1]}\n"

pytestmark = [
    pytest.mark.usefixtures("plain_threads"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),
]


def outcome(make: Make, device: str, place: Callable[[Program], Any] = contextlib.nullcontext) -> dict[str, Any]:
    """Losses, weights and what the program evaluates, on the CPU."""
    torch.manual_seed(0)
    program = make(device)
    losses = []
    with place(program) if place is not contextlib.nullcontext else contextlib.nullcontext():
        for batch in program.batches:
            parts = [part.to(device) if isinstance(part, torch.Tensor) else part for part in batch]
            losses.append(float(program.step(*parts)))
    weights = {
        f"{n}.{name}": tensor.detach().cpu().clone()
        for n, module in enumerate(program.modules)
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }
    return {"losses": losses, "weights": weights, "evaluated": _on_cpu(program.evaluate() if program.evaluate else [])}


def _on_cpu(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v.detach().cpu().clone() for v in values]


@contextlib.contextmanager
def data_parallel(program: Program) -> Iterator[None]:
    for module in program.modules:
        if isinstance(module, nn.Module):
            gt.signal.apply(module, {"": "data"})
    with gt.signal.context("data"):
        yield


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_one_worker_has_the_bits_of_the_cpu(make: Make, one: None) -> None:
    close = TOLERANCE if make.__name__ in RECURRENT | SECOND_ORDER else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(outcome(make, "remote"), outcome(make, "cpu"), equal_nan=True, **close)


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_two_workers_have_the_values_of_the_cpu(make: Make, session: Callable[..., None]) -> None:
    session(CONFIG)
    torch.testing.assert_close(outcome(make, "remote", data_parallel), outcome(make, "cpu"), equal_nan=True, **TOLERANCE)


@pytest.mark.parametrize("make", [make for make in ALL if make.__name__ in CAPTURED], ids=lambda make: make.__name__)
def test_a_captured_step_has_the_losses_of_an_eager_one(make: Make, one: None) -> None:
    losses: dict[bool, list[float]] = {}
    for captured in (False, True):
        torch.manual_seed(0)
        program = make("remote")
        step = gt.compile(program.step) if captured else program.step
        rows = [tuple(part.to("remote") for part in batch if isinstance(part, torch.Tensor)) for batch in program.batches[:2]]
        losses[captured] = [float(step(*rows[n % len(rows)])) for n in range(5)]
        if captured:
            assert step.explain().splitlines()[0].endswith(": 1 program"), step.explain()
    torch.testing.assert_close(losses[True], losses[False], **TOLERANCE)
