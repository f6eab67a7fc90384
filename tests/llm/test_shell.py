"""The commands that are printed work in the shell that reads them."""

import os
import sys

import pytest

from flashtile.llm.shell import flashtile

pytestmark = pytest.mark.skipif(os.name == "nt", reason="scripts have another ending there")


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A folder with a virtual environment, and another flashtile on the PATH."""
    for folder in (tmp_path / ".venv" / "bin", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
        (folder / "flashtile").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    return tmp_path


def test_by_its_path_where_the_shell_does_not_find_it(environment, monkeypatch):
    assert flashtile("demo", "--resume") == ".venv/bin/flashtile demo --resume"
    assert flashtile("generate", "--model", "a b") == ".venv/bin/flashtile generate --model 'a b'"
    monkeypatch.chdir(environment / "elsewhere")
    assert flashtile() == f"{environment}/.venv/bin/flashtile"


def test_by_its_name_where_the_shell_finds_this_one(environment, monkeypatch):
    monkeypatch.setenv("PATH", str(environment / ".venv" / "bin"))
    assert flashtile("demo") == "flashtile demo"
    (environment / "link").mkdir()
    (environment / "link" / "flashtile").symlink_to(environment / ".venv" / "bin" / "flashtile")
    monkeypatch.setenv("PATH", str(environment / "link"))
    assert flashtile("demo") == "flashtile demo"


def test_by_its_module_where_it_is_not_installed(environment):
    (environment / ".venv" / "bin" / "flashtile").unlink()
    assert flashtile("demo") == ".venv/bin/python -m flashtile.cli demo"
