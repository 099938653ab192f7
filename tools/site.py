"""Writes the pages of the documentation site into build/docs: `python -m tools.site`. `make site` then builds it by mkdocs.yml.

The pages are docs/, README as the first page, the changelog, and the public names of gt, whose docstrings the build reads.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "docs"
LINK = re.compile(r"\[([^\]]*)\]\((?!https?://|#)([^)#]+)(#[^)]*)?\)")
TITLES = {"Functions": False, "Errors": True}  # headings of the API, and which has the errors
API = """# Python API

`import gt` has these names. Factories such as `gt.zeros` are torch's, with `device="remote"` unless told otherwise; `gt.nn`,
`gt.optim`, `gt.no_grad` and dtypes such as `gt.float32` are torch's own.
"""


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    for path in PAGES.glob("*.md"):
        path.write_text(relinked(path.read_text(), ROOT / "docs"))
    for source, name in (("README.md", "index.md"), ("CHANGELOG.md", "changelog.md")):
        (PAGES / name).write_text(relinked((ROOT / source).read_text(), ROOT))
    (PAGES / "api.md").write_text(api())


def relinked(markdown: str, folder: Path) -> str:
    """The text of a page of `folder`: links to pages of docs/ lead to the site's; links to other files become their words."""

    def instead(link: re.Match[str]) -> str:
        words, target, anchor = link.groups()
        page = (folder / target).resolve()
        if page.parent == ROOT / "docs":
            return f"[{words}]({page.name}{anchor or ''})"
        return words

    return LINK.sub(instead, markdown)


def api() -> str:
    """An entry for each public name of gt that is not torch's and has a docstring, its errors last."""
    rows = [(module, name) for module, name in public() if module.startswith("gt") and documented(module, name)]
    groups = {title: [name for module, name in rows if (module == "gt.errors") is errors] for title, errors in TITLES.items()}
    return API + "".join(f"\n## {title}\n" + "".join(f"\n::: gt.{name}\n" for name in names) for title, names in groups.items())


def public() -> Iterator[tuple[str, str]]:
    """(module, name) of what gt/__init__.py imports for checkers: its public names."""
    for node in ast.parse((ROOT / "gt" / "__init__.py").read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for row in node.body:
                if isinstance(row, ast.ImportFrom):
                    yield from ((str(row.module), alias.name) for alias in row.names)


def documented(module: str, name: str) -> bool:
    """True for a function or class with a docstring, and for a module."""
    path = ROOT / f"{module.replace('.', '/')}"
    if path.is_dir():
        return (path / f"{name}.py").exists()
    rows = ast.parse(path.with_suffix(".py").read_text()).body
    return any(getattr(row, "name", "") == name and ast.get_docstring(row) for row in rows)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
