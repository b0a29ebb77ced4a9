"""`blr` of a process that has imported it and forks for each command: imports are most of the time of
the dozens that pages run.

    python scripts/forking.py FOLDER    makes FOLDER/blr, says so, and answers it until it is ended

A client sends its arguments, folder, environment and standard streams, and ends as the fork.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

MOST = 1 << 17  # bytes of a message
CLIENT = """#!{python} -IS
import json, os, socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({address!r})
job = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(link, [json.dumps(job).encode()], [0, 1, 2])
sys.exit(int(link.recv(16)))
"""


def serve(folder: str) -> None:
    """Answer commands side by side, each in a fork of its own."""
    import transformers

    import blr.compressor.cli
    import blr.compressor.commands.compress
    import blr.compressor.commands.evaluate
    import blr.compressor.commands.generate

    assert transformers.LlamaForCausalLM and blr.compressor.cli.command()  # imports what they need
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(address := f"{folder}/socket")
        door.listen()
        client = Path(folder, "blr")
        client.write_text(CLIENT.format(python=sys.executable, address=address))
        client.chmod(0o755)
        print("ready", flush=True)
        while True:
            link, _ = door.accept()
            if os.fork() == 0:
                door.close()
                answer(link)
            link.close()


def answer(link: socket.socket) -> None:
    """Run the command of a client in a fork and tell its exit code; never returns."""
    text, streams, _, _ = socket.recv_fds(link, MOST, 3)
    child = os.fork()
    if child == 0:
        link.close()
        become(json.loads(text), streams)
    for stream in streams:
        os.close(stream)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    link.send(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def become(job: dict[str, Any], streams: list[int]) -> None:
    """Be the command; never returns."""
    from blr.compressor.__main__ import main

    code = 99
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environment"])
        sys.argv = ["blr", *job["arguments"]]
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
