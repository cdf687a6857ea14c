"""The policy file is replaced at one moment, or left as it was."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.errors import PolicyError
from sglang_ext.policy_file import PolicyFile

OLD, NEW = "version: 1\n", "version: 1\ntenants: {}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(OLD)
    path.chmod(0o640)
    return path


def in_force(path: Path) -> PolicyFile:
    file = PolicyFile(path)
    file.accept(file.read())
    return file


def test_saved_with_its_mode_and_the_one_before_beside_it(path: Path) -> None:
    file = in_force(path)
    assert file.save(NEW) is None
    assert path.read_text() == NEW
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.with_name("tenants.yaml.bak").read_text() == OLD
    assert file.save(OLD) is None, "its own writing looked like somebody else's"
    assert sorted(item.name for item in path.parent.iterdir()) == [
        "tenants.yaml",
        "tenants.yaml.bak",
    ]


@pytest.mark.parametrize("edit", ["version: 1\n# mine\n", ""])
def test_an_edit_that_is_not_in_force_is_kept(path: Path, edit: str) -> None:
    file = in_force(path)
    path.write_text(edit)
    assert "SIGHUP" in (file.save(NEW) or "")
    file.read()
    assert "SIGHUP" in (file.save(NEW) or ""), "reading alone does not put it in force"
    file.accept(edit)
    assert file.save(NEW) is None


def test_a_file_that_is_gone_is_not_made_again(path: Path) -> None:
    file = in_force(path)
    path.unlink()
    assert "cannot be read" in (file.save(NEW) or "")
    assert not path.exists()


@pytest.mark.parametrize("step", ["os.fsync", "os.replace", "shutil.copy2", "shutil.copystat"])
def test_a_step_that_fails_leaves_the_file_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    file = in_force(path)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(f"sglang_ext.policy_file.{step}", fail)
        assert "No space left" in (file.save(NEW) or "")
    assert path.read_text() == OLD
    assert {item.name for item in path.parent.iterdir()} <= {"tenants.yaml", "tenants.yaml.bak"}
    assert file.save(NEW) is None


def test_a_read_only_file_is_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = in_force(path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "read-only" in (file.save(NEW) or "")
    assert path.read_text() == OLD


def test_behind_a_link_the_target_is_replaced(path: Path) -> None:
    link = path.with_name("link.yaml")
    link.symlink_to(path.name)
    assert in_force(link).save(NEW) is None
    assert link.is_symlink()
    assert path.read_text() == NEW


def test_what_is_no_text_is_refused(path: Path) -> None:
    path.write_bytes(b"\xff")
    with pytest.raises(PolicyError, match="UTF-8"):
        PolicyFile(path).read()
