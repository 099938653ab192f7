"""The parts of the package that pyproject.toml cannot say: configs/ is `gt.configs`, and README's links become plain text."""

import re
from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).with_name("README.md")
CODE = re.compile(r"^```.*?^```[^\n]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?://)[^)]*\)")  # within the repository: it leads nowhere on a package's page


def without_links(markdown: str) -> str:
    """The text with relative links replaced by their words; code stays as it is."""
    code = CODE.findall(markdown)
    text = [LINK.sub(r"\1", part) for part in CODE.split(markdown)]
    return "".join(part for pair in zip(text, [*code, ""]) for part in pair)


if __name__ == "__main__":
    # Folders of data are listed as packages too: setuptools warns of those that are not, and will leave them out one day.
    configs = ["configs", *sorted(str(path) for path in Path("configs").iterdir() if path.is_dir())]
    data = ["gt.observe.dashboard.page", *("gt." + folder.replace("/", ".") for folder in configs)]
    setup(
        py_modules=["gt_autoload"],
        packages=[*find_packages(include=["gt", "gt.*"]), *data],
        package_dir={"gt.configs": "configs"},
        long_description=without_links(README.read_text()),
        long_description_content_type="text/markdown",
    )
