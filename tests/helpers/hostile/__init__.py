"""Hostile clients, workers and observers, and a dispatcher's core among them."""

from tests.helpers.hostile.field import Field, HonestWorker, rounds  # noqa: F401
from tests.helpers.hostile.liar import CONFIGS, T0, T1, TEMPLATES, WILD, Liar, mutated, row, spec  # noqa: F401
