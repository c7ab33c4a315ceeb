"""Makes a site of these pages: what they link to outside this folder becomes part of it, and the index its menu."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = "project"
LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)\s#]+)((?:#[^)]*)?\))")


def place(path: str) -> str:
    """Where a file of the repository lies on the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"


def origin(uri: str) -> str:
    """Where a page of the site lies in the repository."""
    return uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(f"{OUTSIDE}/") else f"docs/{uri}"


def outside(pages: list[Path]) -> set[str]:
    """Files beyond this folder that pages link to, and those that these link to."""
    found: set[str] = set()
    queue = [page.relative_to(ROOT).as_posix() for page in pages]
    while queue:
        here = queue.pop()
        if not here.endswith(".md"):
            continue
        for _, target, _ in LINK.findall((ROOT / here).read_text(encoding="utf-8")):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
            if not path.startswith("docs/") and (ROOT / path).is_file() and path not in found:
                found.add(path)
                queue.append(path)
    return found


def on_files(files: Files, config: Any) -> Files:
    """Adds what lies outside."""
    for path in sorted(outside(sorted((ROOT / "docs").rglob("*.md")))):
        files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links between files of the repository into links between pages of the site."""
    here = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin(here)), match[2]))
        aim = place(path)
        if not (ROOT / path).is_file():
            return match[0]
        return match[1] + posixpath.relpath(aim, posixpath.dirname(here) or ".") + match[3]

    return LINK.sub(moved, markdown)
