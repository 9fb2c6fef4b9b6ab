"""What mkdocs cannot do by itself for the site of the docs: add pages that are not in docs/, and Mermaid.

The README, the changelog and their like stay where people look for them in a repository, and become pages of
the site as they are. Links are written as they work in the repository, and are rewritten here.
"""

from __future__ import annotations

import posixpath
import re
from importlib import resources
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security_policy.md",
}
_SOURCES = {page: source for source, page in PAGES.items()}
_FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    mermaid = resources.files("mermaidx") / "assets" / "mermaid.js"
    files.append(File.generated(config, "assets/mermaid.js", content=mermaid.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    parts = _FENCE.split(markdown)
    parts[::2] = [_rewrite_links(text, page.file.src_uri) for text in parts[::2]]
    return "".join(parts)


def _rewrite_links(markdown: str, page: str) -> str:
    """The text with the links of the repository as links of the site."""
    here = posixpath.dirname(_SOURCES.get(page, f"docs/{page}"))

    def rewritten(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = posixpath.normpath(posixpath.join(here, target))
        if path in PAGES:
            path = PAGES[path]
        elif path.startswith("docs/"):
            path = path.removeprefix("docs/")
        elif (ROOT / path).exists():
            return f"{text} (`{path}`)" if text.strip("`") != path else f"`{path}`"
        else:
            return link[0]  # mkdocs warns, and a strict build fails
        return f"[{text}]({posixpath.relpath(path, posixpath.dirname(page) or '.')}{anchor})"

    return _LINK.sub(rewritten, markdown)
