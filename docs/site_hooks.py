"""What mkdocs does with these pages beside rendering them: `make docs`.

In the repository, links lead from file to file. The site has the pages and the pictures only, so every other link is
made to lead to the repository. Its first page is the README.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = Path(__file__).parent
LINK = re.compile(r"(?<=\]\()(?!https?://|#)([^)#\s]+)")
PICTURES = (".png", ".svg")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pictures, which are in other folders, under their paths in the repository."""
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    targets = {(page.parent, target) for page in pages for target in LINK.findall(page.read_text())}
    for path in sorted({in_repository(folder, target) for folder, target in targets if target.endswith(PICTURES)}):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    of_site = os.path.dirname(page.file.src_uri)
    folder = DOCS / of_site
    if page.file.src_uri == "index.md":
        folder, markdown = ROOT, (ROOT / "README.md").read_text()
    return LINK.sub(lambda match: site_link(in_repository(folder, match[1]), of_site, config.repo_url), markdown)


def in_repository(folder: Path, target: str) -> str:
    return Path(os.path.normpath(folder / target)).relative_to(ROOT).as_posix()


def site_link(path: str, folder: str, repository: str) -> str:
    """Returns the link from a page in `folder` of the site to a file of the repository."""
    if path == "README.md":
        path = "docs/index.md"
    if path.startswith("docs/") or path.endswith(PICTURES):
        return os.path.relpath(path.removeprefix("docs/"), folder)
    return f"{repository}/blob/main/{path}"
