"""`gt run program.py args...`: runs a program as a job under torchrun, srun, mpirun or Kubernetes, by hand, or from a hostfile.

Rank 0 has the server and the program, and every process has workers. Without a program it serves programs elsewhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType

from gt import env
from gt.cli.plan import no_script
from gt.errors import GTError
from gt.ir.text import counted
from gt.launch import job, ssh
from gt.launch.local import Local
from gt.wire.socket import positive


def parser(text: str) -> argparse.ArgumentParser:
    options_parser = argparse.ArgumentParser(prog="gt run", description=text)
    option = options_parser.add_argument
    option("--hostfile", help="file of lines `host slots=N`: start N workers there by ssh; N is the number of GPUs if left out")
    option("--hosts", metavar="H,H", help="the same as a list: h0,h1:4")
    option("--ssh", default=" ".join(ssh.SSH), help="command for ssh; default: %(default)s")
    option("--python", default="", help="interpreter on the hosts; default: the path of this one")
    option("--address", default="", help="address of this host for the others; default: where their ssh connections are from")
    option("--token-file", type=Path, help="file with the job's token; default: GT_TOKEN or GT_TOKEN_FILE; ssh needs none")
    option("--workers", type=positive(int), default=0, help="workers of each process; default: GT_WORKERS, or one for each GPU")
    option("-m", dest="module", action="store_true", help="the program is a module's name, as with python -m")
    option("program", nargs=argparse.REMAINDER, metavar="program.py args", help="without one: serve until SIGTERM")
    return options_parser


def main(args: list[str], text: str) -> int:
    """Exit code: the program's; 2 if the job cannot be started."""
    options = parser(text).parse_args(args)
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if program and not options.module and (missing := no_script(program[0])):
        sys.stderr.write(f"gt run: {missing}\n")
        return 2
    try:
        started = _start(options)
    except GTError as error:
        sys.stderr.write(f"gt run: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"gt run: {error.filename} cannot be read: {error.strerror}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    env.export(GT_JOB=f"{started.address} {started.workers}", GT_SERVER=started.address, GT_TOKEN=started.token)
    try:
        return _program(program, options.module) if program else _serve(started)
    finally:
        started.stop()


def _start(given: argparse.Namespace) -> Local:
    """Start the job; on a rank above 0 this never returns."""
    if given.token_file:
        env.export(GT_TOKEN=env.token(given.token_file))
    if given.workers:
        env.export(GT_WORKERS=str(given.workers))
    if given.hostfile or given.hosts is not None:
        hosts = ssh.read_hostfile(given.hostfile) if given.hostfile else ssh.entries(given.hosts.split(","))
        return job.start_hosts(hosts, job.Reach(given.ssh.split(), given.python, given.address))
    at = job.place()
    if at.rank:
        job.work(at)
    return job.start(at)


def _serve(started: Local) -> int:
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    sys.stdout.write(f"gt run: listening on {started.address}, {counted(started.workers, 'worker')}; Ctrl-C ends it\n")
    sys.stdout.flush()
    signal.sigwait(signals)
    return 0


def _program(program: list[str], module: bool) -> int:
    """Run the program in this process, as python does. SIGTERM ends it in order, unless it has a handler of its own."""
    from gt import make_device
    from gt.api import shutdown

    make_device()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.argv = program
    sys.path[0] = os.getcwd() if module else str(Path(program[0]).resolve().parent)
    try:
        if module and not _found(program[0]):
            sys.stderr.write(f"gt run: no module named {program[0]}\n")
            return 1
        if module:
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        traceback.print_exception(type(error), error, _of_program(error.__traceback__))
        return 1
    finally:
        shutdown()
    return 0


def _found(module: str) -> bool:
    """True if there is a module of this name. Its packages are imported; errors in those are for runpy to show."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        return not (error.name and module.startswith(error.name))
    except Exception:
        return True


def _of_program(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this module and of runpy."""
    own = (__file__, runpy.__file__)
    while frames is not None and (frames.tb_frame.f_code.co_filename in own or "runpy" in frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames
