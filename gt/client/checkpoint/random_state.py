"""gt.RandomState: the state of all random numbers of a program, as an object that gt.save and gt.load take."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from gt.client.device import random as remote_random


class RandomState:
    """Random state of torch on the CPU, of the remote device, of NumPy and of Python's `random`, at the moment of a call."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "torch": torch.get_rng_state(),
            "remote": remote_random.get_rng_state(),
            "numpy": np.random.get_state(),
            "python": random.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        remote_random.set_rng_state(state["remote"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
