"""Texts of configs: a file by its path, a ready config by `gt:` and its name, such as gt:llama/tp2."""

from __future__ import annotations

from pathlib import Path

from gt.config.load import hint
from gt.errors import ConfigError

READY = "gt:"
_PACKAGE = Path(__file__).resolve().parent.parent
FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")  # in an installed package; in a checkout


def read(path: str) -> str:
    """The text of a config; "" for the path "". ConfigError for an unreadable file, or a name that no ready config has."""
    if not path:
        return ""
    try:
        return (ready(path) if path.startswith(READY) else Path(path)).read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {_way_out(path)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot be read (it is not text in UTF-8); GT_CONFIG or config= names the YAML") from None


def _way_out(path: str) -> str:
    """Advice on a path without a file: the ready config of that name, as of configs/dp4.yaml outside of a checkout."""
    name = path.removesuffix(".yaml").removeprefix("configs/")
    return f"try {READY}{name}, a ready config" if name in names() else "GT_CONFIG or config= names the YAML"


def ready(name: str) -> Path:
    """The file of a ready config, whose name may have `gt:` before it."""
    known, wanted = names(), name.removeprefix(READY)
    if wanted not in known:
        raise ConfigError(f"{name}: no ready config is called {wanted!r}{hint(wanted, known)}")
    return known[wanted]


def names() -> dict[str, Path]:
    """The ready configs and their files, in order of name."""
    folder = next((folder for folder in FOLDERS if folder.is_dir()), FOLDERS[0])
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.yaml"))}
