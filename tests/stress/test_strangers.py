"""Strangers of every kind beside an honest client: what the server keeps of them, and what it writes, stays small."""

from tests.stress import strangers


def test_strangers_leave_the_server_small_and_the_client_served():
    found = strangers.measure(3.0, 3 * len(strangers.WAYS))
    assert found["connections"] > 50 and found["round_trips"] > 20 and found["newcomers"] > 0
    assert found["server_mib_grown"] < 50
    assert found["stderr_bytes"] < 50_000
