"""Kernels that run the pages, as forks of one process that has imported what pages import.

A kernel of its own takes each page seven seconds of imports. A nursery does them once, and forks whenever a stand-in,
the small program that `kernel.json` names, asks it to. Where processes that have loaded torch do not fork safely, pages
have kernels of their own. Imports nothing outside of the standard library but in the nursery.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

FORKS = sys.platform == "linux"
NAME = "forked" if FORKS else "python3"
INLINE = "module://matplotlib_inline.backend_inline"


def nursery(descriptor):
    """Says that it is ready, and forks a kernel for each connection until the standard input ends."""
    import matplotlib.pyplot  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch._dynamo  # noqa: F401 (two seconds, which torch.optim takes at a first step)
    from ipykernel.kernelapp import IPKernelApp

    import stiefelkit

    for name in stiefelkit.__all__:
        getattr(stiefelkit, name)
    server, kernels = socket.socket(fileno=int(descriptor)), []
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while sys.stdin not in (ready := select.select([server, sys.stdin], [], [])[0]):
        if server in ready:
            caller, _ = server.accept()
            with caller.makefile() as lines:
                connection_file, folder, environment = json.loads(lines.readline())
            kernel = os.fork()
            if kernel == 0:
                server.close()
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(environment)
                threading.Thread(target=_die_with, args=(caller,), daemon=True).start()
                IPKernelApp.launch_instance(["-f", connection_file, "--log-level=ERROR"])
                os._exit(0)
            kernels.append(kernel)
            caller.close()
    for kernel in kernels:  # all have ended, unless the build was stopped
        os.kill(kernel, signal.SIGKILL)
        os.waitpid(kernel, 0)  # and their time counts as this process's


def _die_with(caller):
    with contextlib.suppress(ConnectionError):
        caller.recv(1)
    os._exit(1)


def stand_in(path, connection_file):
    """Has a kernel forked, and ends when it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as kernel:
        kernel.connect(path)
        kernel.sendall(json.dumps([connection_file, os.getcwd(), dict(os.environ)]).encode() + b"\n")
        kernel.recv(1)


def start(app):
    """Starts the nursery, and tells Jupyter of its kernel; both go when the build has ended."""
    if not FORKS or app.config.nb_execution_mode == "off":
        return
    folder = tempfile.TemporaryDirectory()
    path = str(Path(folder.name) / "socket")
    spec = Path(folder.name) / "kernels" / NAME / "kernel.json"
    spec.parent.mkdir(parents=True)
    command = [sys.executable, "-I", "-S", __file__, path, "{connection_file}"]
    spec.write_text(json.dumps({"argv": command, "display_name": NAME, "language": "python"}))
    os.environ["JUPYTER_PATH"] = folder.name
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        process = subprocess.Popen(
            [sys.executable, __file__, str(server.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[server.fileno()],
            env={**os.environ, "MPLBACKEND": INLINE},  # as kernels set it, who are too late for it here
        )

    def end(app, exception):
        process.stdin.close()
        process.wait()
        folder.cleanup()

    # Jupyter gives a kernel a minute to answer: the nursery says that it is ready by closing its output.
    app.connect("builder-inited", lambda app: process.stdout.read(), priority=900)
    app.connect("build-finished", end)


def setup(app):
    app.connect("builder-inited", start, priority=100)  # while pages are written and drawn
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    stand_in(*sys.argv[1:]) if len(sys.argv) > 2 else nursery(sys.argv[1])
