"""Take named files out of a tar archive or a Debian package.

Only plain files are taken, each is written under its own last name into one folder, and the sizes are
bounded: no path in an archive is ever followed.
"""

import lzma
import os
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from kinfolk.errors import UserError

FILE_LIMIT = 2 * 2**30


def unpack(archive: Path, wanted: Collection[str], into: Path, limit: int = FILE_LIMIT) -> list[str]:
    """Write the members of `archive` whose last name is in `wanted` to `into`; return the names found."""
    try:
        if archive.suffix == ".deb":
            return _unpack_deb(archive, wanted, into, limit)
        with tarfile.open(archive, "r:*") as tar:
            return _take(tar, archive, wanted, into, limit)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = (str(error).splitlines() or ["it ends too soon"])[0]  # tarfile lists all it tried, in lines
        raise UserError(f"{archive}: not a whole archive: {reason}") from error
    except OSError as error:
        raise UserError(f"{archive}: cannot be unpacked: {error.strerror or error}") from error


def _take(tar: tarfile.TarFile, archive: Path, wanted: Collection[str], into: Path, limit: int) -> list[str]:
    found: list[str] = []
    for member in tar:
        name = PurePosixPath(member.name).name
        if name not in wanted or not member.isreg():
            continue
        if name in found:
            raise UserError(f"{archive}: holds more than one {name}")
        if member.size > limit:
            raise UserError(f"{archive}: {name} has {member.size} bytes, more than the {limit} allowed")
        source = tar.extractfile(member)
        assert source is not None  # true for every regular file
        with source, (into / name).open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)
        found.append(name)
    return found


def _unpack_deb(archive: Path, wanted: Collection[str], into: Path, limit: int) -> list[str]:
    """dpkg-deb knows every compression that Debian and Ubuntu use; its output is read as a stream."""
    tool = shutil.which("dpkg-deb")
    if tool is None:
        raise UserError(f"{archive}: unpacking it needs dpkg-deb, which is not installed")
    command = [tool, "--fsys-tarfile", os.path.abspath(archive)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
                return _take(tar, archive, wanted, into, limit)
        finally:
            process.kill()  # what is left of its output is of no interest
