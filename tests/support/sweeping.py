"""How tests run sweeps."""

# The sweep's own processes as forks of the warm one
FORKED = """
import os, sys
from blr.compressor.__main__ import main
from blr.compressor.base import process_environment as environment
from blr.compressor.commands.sweep import chain, folder

class Forked:
    def __init__(self, pid):
        self.pid, self.code = pid, None
    def poll(self):
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if ended else None
        return self.code
    def kill(self):
        os.kill(self.pid, 9)

def start(command, environ, alive):
    pid = os.fork()
    if pid:
        return Forked(pid)
    code = 99
    try:
        os.dup2(os.open(command.out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open(command.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os.environ.update(environ, **{environment.PARENT: str(alive)})
        sys.argv = ["blr", *command.arguments]
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
        sys.stdout.flush()
    finally:
        os._exit(code)

chain.start = start
"""
