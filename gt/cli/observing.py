"""The frame of commands that observe a running server: address, token, connection, and the signals and errors that end them."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from gt import env
from gt.errors import ConfigError, GTError
from gt.observe.record_stream import RecordStream
from gt.wire.socket import PORT, server_of_environment

SHORTEST_SECONDS, LONGEST_SECONDS = 0.5, 60.0  # between two Records, as the server grants them
NOTICE_SECONDS = 1.0  # without records; then the user is told


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that name the server."""
    parser.add_argument("address", nargs="?", default="", metavar="HOST:PORT", help=f"default: GT_SERVER, or 127.0.0.1:{PORT}")
    parser.add_argument("--token-file", type=Path, help="file with the server's token; default: GT_TOKEN")


def add_interval(parser: argparse.ArgumentParser, default: float, what: str) -> None:
    """The option for the time between two Records. what: the noun for one, in the plural."""
    text = f"seconds between two {what}, {SHORTEST_SECONDS:g} to {LONGEST_SECONDS:g}; default: {default:g}"
    parser.add_argument("--interval", type=_interval, default=default, metavar="SECONDS", help=text)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"got {text!r}, want {SHORTEST_SECONDS:g} to {LONGEST_SECONDS:g} seconds")
    return seconds


def observe(command: str, given: argparse.Namespace, interval: float, show: Callable[[RecordStream], int]) -> int:
    """Exit code: of `show`, 0 if it is interrupted, 1 after a line on stderr if the server cannot be observed."""
    try:
        address = given.address or server_of_environment(f"127.0.0.1:{PORT}")
        with RecordStream(address, token(given.token_file), interval) as stream:
            tell_delay(command, stream)
            return show(stream)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # of the output: gt.cli.main ends it in silence
        raise
    except (GTError, ValueError, OSError) as error:
        sys.stderr.write(f"{command}: {error}\n")
    return 1


def tell_delay(command: str, stream: RecordStream) -> None:
    """Tell on stderr what is waited for, unless the first records are here soon."""
    if delay := stream.delay(NOTICE_SECONDS):
        sys.stderr.write(f"{command}: {delay}; Ctrl-C ends the wait\n")


def token(file: Path | None) -> str:
    try:
        return env.token(file)
    except OSError as error:
        raise ConfigError(f"--token-file {error.filename} cannot be read: {error.strerror}") from None
