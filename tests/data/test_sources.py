"""Package clients, played by small scripts, and archives, some of them hostile."""

import io
import os
import sys
import tarfile
import time
from pathlib import Path

import pytest

from kinfolk.data import sources
from kinfolk.data.archive import unpack
from kinfolk.data.sources import Apt, Npm, Official
from kinfolk.errors import UserError

posix = pytest.mark.skipif(os.name != "posix", reason="the fake clients are shell scripts")


def install(monkeypatch, folder: Path, name: str, script: str) -> None:
    """Make `script` the only program called `name`."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


def refusal(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@posix
def test_npm_packs_the_exact_version_in_the_folder_and_runs_no_script(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path / "bin", "npm", 'echo "$@" > packed.tgz')
    place = tmp_path / "place"
    place.mkdir()
    seen = []
    Npm("some-set", "1.2.3").fetch(place, lambda *now: seen.append(now))
    words = (place / "packed.tgz").read_text().split()
    assert words[0] == "pack"
    assert words[-1] == "some-set@1.2.3"
    assert "--ignore-scripts" in words
    assert seen == [("npm pack some-set@1.2.3", 0, None)]


@pytest.mark.parametrize("source, client", [(Npm("a", "1"), "npm"), (Apt("a"), "apt-get")])
def test_a_client_that_is_not_installed_is_named(monkeypatch, tmp_path, source, client):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal(source.fetch, tmp_path, None) == f"{client} is not installed"


@posix
def test_a_package_apt_does_not_know_comes_with_advice(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "apt-get", "echo 'E: Unable to locate package a' >&2; exit 100")
    message = refusal(Apt("a").fetch, tmp_path, None)
    assert "knows no package a" in message
    assert "apt-get update" in message


@posix
def test_the_reason_of_a_failing_client_is_passed_on_in_one_line(monkeypatch, tmp_path):
    lines = "npm notice hello\nnpm error code E404\nnpm error 404 no such\nnpm error A complete log of this run"
    install(monkeypatch, tmp_path, "npm", f"printf '{lines}' >&2; exit 1")
    assert refusal(Npm("a", "1").fetch, tmp_path, None) == ("npm failed: npm error code E404 npm error 404 no such")
    install(monkeypatch, tmp_path, "npm", "exit 7")
    assert refusal(Npm("a", "1").fetch, tmp_path, None) == "npm failed: exit code 7"


@posix
def test_a_late_client_is_stopped_with_all_it_started(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "npm", "(sleep 1; touch survived) & sleep 60")
    began = time.monotonic()
    message = refusal(sources._run_client, ["npm"], tmp_path, 0.2)
    assert message == "npm did not finish within 0.2 s"
    time.sleep(1.2)
    assert time.monotonic() - began < 5
    assert not (tmp_path / "survived").exists()


def test_official_files_that_are_already_whole_are_not_fetched_again(monkeypatch, tmp_path):
    fetched = []
    monkeypatch.setattr(sources, "download", lambda url, target, progress: fetched.append((url, target)))
    (tmp_path / "a.gz").write_bytes(b"x")
    Official("https://example.org/set/", ("a.gz", "b.gz")).fetch(tmp_path, None)
    assert fetched == [("https://example.org/set/b.gz", tmp_path / "b.gz")]


# ---------------------------------------------------------------------------------------------------- archives


def write_tar(path: Path, members: list[tuple[str, bytes]], links: tuple[tuple[str, str], ...] = ()) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for name, target in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return path


def test_only_wanted_files_are_taken_and_none_lands_outside(tmp_path):
    place = tmp_path / "deep" / "place"
    place.mkdir(parents=True)
    archive = write_tar(
        tmp_path / "a.tgz",
        [("package/data/a", b"A"), ("../../b", b"B"), ("package/c", b"C")],
        links=(("package/d", "/etc/hostname"),),
    )
    before = {path for path in tmp_path.rglob("*") if place not in path.parents}
    assert unpack(archive, ["a", "b", "d"], place) == ["a", "b"]
    assert {path.name: path.read_bytes() for path in place.iterdir()} == {"a": b"A", "b": b"B"}
    assert {path for path in tmp_path.rglob("*") if place not in path.parents} == before


def test_a_member_over_the_limit_and_a_name_that_comes_twice_are_refused(tmp_path):
    archive = write_tar(tmp_path / "a.tgz", [("x/a", b"12345"), ("y/a", b"1")])
    assert "a has 5 bytes, more than the 4 allowed" in refusal(unpack, archive, ["a"], tmp_path, 4)
    assert "holds more than one a" in refusal(unpack, archive, ["a"], tmp_path)


def test_a_cut_archive_and_a_file_that_is_none_are_refused_by_name(tmp_path):
    archive = write_tar(tmp_path / "a.tgz", [("a", os.urandom(100_000))])
    archive.write_bytes(archive.read_bytes()[:-5000])
    assert str(archive) in refusal(unpack, archive, ["a"], tmp_path)
    archive.write_bytes(b"not an archive at all")
    assert str(archive) in refusal(unpack, archive, ["a"], tmp_path)


@posix
def test_a_debian_package_is_read_through_dpkg_deb(monkeypatch, tmp_path):
    inner = write_tar(tmp_path / "inner", [("./usr/share/a.gz", b"A")])
    script = f"exec {sys.executable} -c 'import gzip,sys; sys.stdout.buffer.write(gzip.open(\"{inner}\").read())'"
    install(monkeypatch, tmp_path / "bin", "dpkg-deb", script)
    package = tmp_path / "set_1_all.deb"
    package.write_bytes(b"")
    assert unpack(package, ["a.gz"], tmp_path) == ["a.gz"]
    assert (tmp_path / "a.gz").read_bytes() == b"A"
    install(monkeypatch, tmp_path / "bin", "dpkg-deb", "echo 'not a package' >&2; exit 2")
    assert str(package) in refusal(unpack, package, ["a.gz"], tmp_path)
    monkeypatch.setenv("PATH", "")
    assert "needs dpkg-deb, which is not installed" in refusal(unpack, package, ["a.gz"], tmp_path)
