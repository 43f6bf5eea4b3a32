"""Programs in processes of their own that need not wait for torch: all are forked from one that has imported it, and
that has done nothing else. What starting Python itself is for has its own tests, with a real start.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from conftest import Outcome

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "kinfolk.cli", "kinfolk.experiment", "kinfolk.comparison", "sklearn.datasets"])


def start(program: str | Path, *words: str, out: int, err: int, **environment: str) -> BaseProcess:
    """Run a file, or a module by its name, in this folder; `out` and `err` are descriptors to write to."""
    streams = [Connection(os.dup(descriptor), readable=False) for descriptor in (out, err)]
    settings = {**os.environ, **environment}
    process = FORKS.Process(target=_live, args=(str(program), words, os.getcwd(), settings, *streams))
    process.start()
    for stream in streams:
        stream.close()
    return process


def finished(program: str | Path, *words: str, timeout: float = 240) -> Outcome:
    """What a program has left when it has ended."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = start(program, *words, out=out.fileno(), err=err.fileno())
        code = ended(process, timeout)
        out.seek(0)
        err.seek(0)
        return Outcome(code, out.read(), err.read())


def ended(process: BaseProcess, timeout: float = 60) -> int:
    """The exit code; a process that takes too long is killed."""
    process.join(timeout)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
        raise AssertionError(f"not ended after {timeout} seconds")
    process.close()
    return code


def _live(
    program: str, words: tuple[str, ...], folder: str, settings: dict[str, str], out: Connection, err: Connection
) -> None:
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(settings)
    for stream, number in ((out, 1), (err, 2)):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.argv = [program, *words]
    if program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
