"""The engine of attacks: a fuzzer that knows the protocol, beside honest trainers, and a matrix of signals.

`python -m tests.attacks --minutes N` looks for what no test has thought of; `--replay FILE` plays one finding again.
"""
