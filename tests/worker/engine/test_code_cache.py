"""The folder of compiled code is the user's alone, or not used."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gt import env
from gt.worker.engine.torch.compiler import code_cache


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Inductor's default folder, which is not there yet."""
    import torch._inductor.runtime.cache_dir_utils as module

    path = tmp_path / "torchinductor_somebody"
    monkeypatch.setattr(module, "default_cache_dir", lambda: str(path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    return path


def test_a_new_folder_is_the_users_alone(default: Path) -> None:
    code_cache.secure()
    assert env.inductor_cache() == str(default)
    assert stat.S_IMODE(default.stat().st_mode) == 0o700


def test_a_folder_that_is_the_users_own_stays(default: Path) -> None:
    default.mkdir(mode=0o755)
    code_cache.secure()
    assert env.inductor_cache() == str(default)


@pytest.mark.parametrize("fault", ["others can write", "another's", "a link"])
def test_a_folder_of_others_is_not_used(default: Path, monkeypatch: pytest.MonkeyPatch, fault: str, caplog) -> None:
    if fault == "a link":
        target = default.with_name("target")
        target.mkdir()
        default.symlink_to(target)
    else:
        default.mkdir()
    if fault == "others can write":
        default.chmod(0o777)
    if fault == "another's":
        uid = code_cache.os.getuid()
        monkeypatch.setattr(code_cache.os, "getuid", lambda: uid + 1)
    code_cache.secure()
    private = Path(env.inductor_cache())
    assert private != default and stat.S_IMODE(private.stat().st_mode) == 0o700
    assert "belongs to another user" in caplog.text


def test_a_folder_that_the_environment_names_is_the_users_choice(default: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    code_cache.secure()
    assert env.inductor_cache() == "/somewhere" and not default.exists()
