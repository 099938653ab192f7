"""`python -m gt.launch`: a supervisor, which gt.launch.local, gt.launch.job or ssh starts; it is not for the command line."""

import logging
import os
import sys

from gt.launch import host_agent, machine
from gt.launch.process import go_on_at_end_of_parent
from gt.launch.supervisor import Supervisor, read_order


def main(args: list[str]) -> int:
    """Supervise by the order on stdin. --gpus: print the number of this host's GPUs; --agent: answer `gt doctor --hosts`."""
    go_on_at_end_of_parent()
    if args == ["--gpus"]:
        print(len(machine.gpus()))
        return 0
    if args == ["--agent"]:
        return host_agent.main()
    order = read_order()
    if not order:
        return 1
    if "server" in order:
        from gt.launch.worker_host import WorkerHost

        return WorkerHost(order).run()
    return Supervisor(order).run()


code = main(sys.argv[1:])
logging.shutdown()
for stream in (sys.stdout, sys.stderr):
    stream.flush()
os._exit(code)  # the interpreter would take 0.1 s to free torch's modules, while the program waits for this process
