"""A factorization that fails raises at its line, where a program that retries with jitter catches it."""

from __future__ import annotations

import pytest
import torch

import gt

pytestmark = pytest.mark.usefixtures("one")

CALLS = {
    "cholesky": torch.linalg.cholesky,
    "inv": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, x),
    "a batch": lambda x: torch.linalg.cholesky(torch.stack([x + torch.eye(3, device=x.device), x])),
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(x, check_errors=True),
    "inv_ex": lambda x: torch.linalg.inv_ex(x, check_errors=True),
    "solve_ex": lambda x: torch.linalg.solve_ex(x, x, check_errors=True),
    "lu_factor_ex": lambda x: torch.linalg.lu_factor_ex(x, check_errors=True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_failed_factorization_raises_the_error_of_the_cpu(call):
    with pytest.raises(RuntimeError) as want:
        call(torch.zeros(3, 3))
    with pytest.raises(want.type) as got:
        call(torch.zeros(3, 3, device="remote"))
    assert str(got.value) == str(want.value)


NOT_FINITE = {
    "svd": torch.linalg.svd,
    "svdvals": torch.linalg.svdvals,
    "pinv": torch.linalg.pinv,
    "norm": lambda x: torch.linalg.matrix_norm(x, 2),
    "a batch": lambda x: torch.linalg.svd(torch.stack([torch.eye(2, device=x.device), x])),
}


@pytest.mark.parametrize("call", NOT_FINITE.values(), ids=NOT_FINITE)
def test_a_decomposition_that_does_not_converge_raises_at_its_line(call):
    matrix = torch.full((2, 2), float("nan"))
    with pytest.raises(torch.linalg.LinAlgError) as want:
        call(matrix)
    there = matrix.to("remote")
    with pytest.raises(torch.linalg.LinAlgError) as got:
        call(there)
    assert str(got.value).split(":")[-1] == str(want.value).split(":")[-1]
    assert torch.ones(2, device="remote").sum().item() == 2  # nothing fails later


def test_a_decomposition_of_a_failed_input_has_the_inputs_error():
    failed = torch.ones(3, 3, dtype=torch.long, device="remote") // torch.zeros(3, 3, dtype=torch.long, device="remote")
    with pytest.raises(gt.OpFailed, match="floor_divide"):
        torch.linalg.svd(failed.double())
    del failed


def jittered(x: torch.Tensor, notes: list) -> torch.Tensor:
    for jitter in (0.0, 1.0, 10.0):
        try:
            return torch.linalg.cholesky(x + jitter * torch.eye(3, device=x.device))
        except torch.linalg.LinAlgError:
            notes.append(jitter)
    raise AssertionError(notes)


def test_a_retry_with_jitter_works_eagerly_and_in_a_step_that_runs_in_parts():
    want: list[float] = []
    factor = jittered(-2 * torch.eye(3), want)

    def step(x):
        notes: list[float] = []
        print(end="")  # the step runs in parts
        return jittered(x, notes), notes

    compiled, x = gt.compile(step), -2 * torch.eye(3, device="remote")
    assert compiled(torch.eye(3, device="remote"))[1] == []  # the recorded call
    for call in (step, compiled, compiled, compiled):
        result, notes = call(x)
        assert notes == want == [0.0, 1.0]
        torch.testing.assert_close(result.cpu(), factor, rtol=0, atol=0)


def test_a_captured_step_is_one_program_and_its_worker_raises():
    step = gt.compile(lambda x: torch.linalg.cholesky(x))
    for _ in range(3):
        assert step(4 * torch.eye(3)).diagonal().tolist() == [2, 2, 2]
    assert step.explain().splitlines()[0].endswith(": 1 program"), step.explain()
    with pytest.raises(gt.OpFailed, match="not positive-definite"):
        step(-torch.eye(3)).cpu()
    assert step(torch.eye(3)).sum().item() == 3
