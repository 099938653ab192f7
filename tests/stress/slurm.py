"""A real SLURM with three nodes on this machine: `python -m tests.stress.slurm` prints ok. Needs root.

slurmctld, slurmd and munged are Debian's: apt-get install --no-install-recommends slurm-wlm munge. All run in namespaces of
their own, with an /etc/hosts in which h0, h1 and h2 are this machine. srun and sbatch are then tried with deploy/slurm/.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.helpers import ROOT
from tests.helpers.processes import free_ports, wait_until

NODES = 3
NEEDED = ("slurmctld", "slurmd", "munged", "unshare")
TOKEN = "0123456789 abcdefghij of this run"
UP_SECONDS, JOB_SECONDS = 60.0, 300.0
CONF = """
ClusterName=gt
SlurmctldHost=h0
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=/run/munge/munge.socket.2
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool-%n
SlurmctldPidFile=/run/slurm/ctld.pid
SlurmdPidFile=/run/slurm/d-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
MessageTimeout=10
SchedulerParameters=sched_interval=1,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
JobRequeue=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4
"""
SUM = """
import sys, torch, gt
x = torch.ones(4, device="remote") + 1
print("sum", x.sum().item(), [worker["name"] for worker in gt.stats()["workers"]], flush=True)
sys.exit(7)
"""


def why_not() -> str:
    """Why this machine can have no SLURM of its own, "" if it can."""
    if os.geteuid():
        return "it needs root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


class Slurm:
    """The daemons, until the end of the context. Everything is in `folder`, and in the namespace's own /run."""

    def __init__(self, folder: Path) -> None:
        self.folder, ports = folder, free_ports(NODES + 1)
        nodes = [
            f"NodeName=h{n} NodeHostname=h0 NodeAddr=127.0.0.1 Port={ports[n + 1]} CPUs=8 State=UNKNOWN" for n in range(NODES)
        ]
        self.conf = folder / "slurm.conf"
        self.conf.write_text(CONF.format(ports=ports, folder=folder, nodes="\n".join(nodes)))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf), "PYTHONPATH": str(ROOT), "GT_TOKEN": TOKEN}
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Slurm:
        munge = pwd.getpwnam("munge")
        for name in ("slurm/state", *(f"slurm/spool-h{n}" for n in range(NODES)), "munge"):
            Path("/run", name).mkdir(parents=True, exist_ok=True)
        key = Path("/run/munge/key")
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for path in ("/run/munge", key):
            os.chown(path, munge.pw_uid, munge.pw_gid)
        private = [f"--{name}=/run/munge/m.{name[:3]}" for name in ("pid-file", "log-file", "seed-file")]
        user = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
        munged = ["munged", "-F", f"--key-file={key}", *private, "--socket=/run/munge/munge.socket.2", "--num-threads=1"]
        try:
            self._start([*user, *munged])
            self._start(["slurmctld", "-D", "-f", str(self.conf)])
            for n in range(NODES):
                self._start(["slurmd", "-D", "-N", f"h{n}", "-f", str(self.conf)])
            if not wait_until(self._idle, UP_SECONDS):
                said = self.run("sinfo").stderr, (self.folder / "daemons").read_text()[:3000]
                raise OSError(f"slurm does not come up: {said}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()

    def _idle(self) -> bool:
        return self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(NODES)

    def _start(self, command: list[str]) -> None:
        with (self.folder / "daemons").open("a") as out:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=out, stderr=out))

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, **variables}
        return subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=JOB_SECONDS, check=False
        )


def srun(slurm: Slurm) -> str:
    """A program on three nodes: what differs from what is wanted, "" for nothing."""
    program = slurm.folder / "program.py"
    program.write_text(SUM)
    command = ("srun", "-N3", "--ntasks-per-node=1", "--kill-on-bad-exit=0", sys.executable, "-m", "gt", "run", str(program))
    done = slurm.run(*command)
    good = done.stdout == "sum 8.0 ['w0', 'w1', 'w2']\n" and done.returncode == 7
    return "" if good else f"{done.returncode} {done.stdout} {done.stderr}"


def batch_script(slurm: Slurm) -> str:
    """The batch script itself is no task: it is told to use srun."""
    script = slurm.folder / "no-srun.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --output=no-srun.log\n{sys.executable} -m gt run program.py\n")
    done = slurm.run("sbatch", "--wait", str(script))
    log = (slurm.folder / "no-srun.log").read_text()
    return "" if done.returncode == 2 and "put srun before the command" in log else f"{done.returncode} {done.stderr} {log}"


def requeued(slurm: Slurm) -> str:
    """deploy/slurm/train.sbatch: steps, warmup and rate by arguments; SIGTERM saves, requeues, and the job goes on."""
    folder = slurm.folder / "train"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    log, token = folder / "training.log", folder / "token"
    token.write_text(TOKEN)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    flags = "--model tiny --max-length 16 --log-every 1"
    options = {"GT_TOKEN": "", "GT_TOKEN_FILE": str(token), "TRAIN_OPTIONS": flags, "PATH": path}
    line = ["sbatch", "--parsable", "--gres=none", f"--output={log}", f"--chdir={folder}"]
    line.append(str(ROOT / "deploy/slurm/train.sbatch"))
    sent = slurm.run(*line, "60", "3", "1e-2", **options)
    job = sent.stdout.strip()
    if not job:
        return sent.stderr

    def says(pattern: str) -> bool:
        return log.exists() and re.search(pattern, log.read_text()) is not None

    if not wait_until(lambda: says(r"Batch 10/"), JOB_SECONDS):
        return f"no training: {log.read_text() if log.exists() else slurm.run('squeue').stdout}"
    slurm.run("scancel", "--signal=TERM", job)  # as --signal=TERM@120 sends it
    if not wait_until(lambda: says("saved at step"), JOB_SECONDS):
        return f"no checkpoint: {log.read_text()}"
    if not wait_until(lambda: says("Training is complete: 60 steps"), JOB_SECONDS):
        return f"not continued: {log.read_text()} {slurm.run('scontrol', 'show', 'job', job).stdout}"
    text = log.read_text()
    losses = [float(loss) for loss in re.findall(r"Loss: (\S+)", text)]
    good = says(r"resumed from \S+ at step [1-9]") and losses[-1] < losses[0]
    return "" if good else text


def main() -> int:
    if why := why_not():
        print(f"skipped: {why}")
        return 0
    if os.environ.get("GT_TEST_SLURM") != "inside":
        names = "".join(f"127.0.0.1 h{n}\n" for n in range(NODES))
        with tempfile.NamedTemporaryFile("w", suffix=".hosts") as hosts:
            hosts.write(f"127.0.0.1 localhost\n127.0.0.1 {socket.gethostname()}\n{names}")
            hosts.flush()
            os.chmod(hosts.name, 0o644)
            ground = f"hostname h0 && mount --bind {hosts.name} /etc/hosts && mount -t tmpfs none /run"
            inner = f"{ground} && exec {sys.executable} -m tests.stress.slurm"
            # the first process of a pid namespace: whatever is left ends with it
            command = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", inner]
            return subprocess.run(command, cwd=ROOT, env={**os.environ, "GT_TEST_SLURM": "inside"}, check=False).returncode
    failed = 0
    with tempfile.TemporaryDirectory() as folder, Slurm(Path(folder)) as slurm:
        for check in (srun, batch_script, requeued):
            begin = time.monotonic()
            wrong = check(slurm)
            failed += bool(wrong)
            print(f"{'fails' if wrong else 'right'}: {check.__name__}, {time.monotonic() - begin:.1f} s {wrong}", flush=True)
    print("fails" if failed else "ok")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
