"""A hook of MkDocs: make pages of the files outside docs/ that pages link to, and let the links lead to these.

README.md is the first page.  CONTRIBUTING.md, SECURITY.md and CHANGELOG.md are pages too.  Results of benchmarks are
copied.  Any other file becomes a page that shows its source, and a folder becomes a page that lists its files.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
PAGES: Final = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
                "SECURITY.md": "security.md"}  # fmt: skip
LINK: Final = re.compile(r"\]\((?!\w+://|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES: Final = {".py": "python", ".cu": "cpp", ".cuh": "cpp", ".cc": "cpp", ".h": "cpp", ".toml": "toml"}

_sources: dict[str, Path] = {}  # the file of the repository that each page shows, by the page's name


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files outside docs/."""
    _sources.clear()
    for name, page in PAGES.items():
        _add(files, config, page, ROOT / name)
    for file in [each for each in files if each.is_documentation_page()]:
        path = _sources.get(file.src_uri, DOCS / file.src_uri)
        if path.suffix == ".md":
            for link, _ in LINK.findall(path.read_text(encoding="utf-8")):
                _add_source(files, config, (path.parent / link).resolve())
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page that lead out of docs/ lead to the pages of those files."""
    uri = page.file.src_uri
    source = _sources.get(uri, DOCS / uri)
    if source.suffix != ".md":
        return markdown

    def rewritten(match: re.Match[str]) -> str:
        target = page_of((source.parent / match[1]).resolve())
        return f"]({os.path.relpath(target, Path(uri).parent)}{match[2] or ''})"

    return LINK.sub(rewritten, markdown)


def page_of(path: Path) -> str:
    """Return the name, inside the site's sources, of the page or file that shows a file or folder of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    return name if path.suffix == ".json" else f"source/{name}{'/index' if path.is_dir() else ''}.md"


def _add(files: Files, config: MkDocsConfig, uri: str, path: Path) -> None:
    _sources[uri] = path
    if path.suffix in (".md", ".json"):
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    else:
        files.append(File.generated(config, uri, content=_listing(path) if path.is_dir() else _source(path)))


def _add_source(files: Files, config: MkDocsConfig, path: Path) -> None:
    """Add the page of a file or folder that a page links to, unless it is there.  A lost link is left to MkDocs."""
    uri = page_of(path)
    if path.is_relative_to(DOCS) or uri in _sources or not path.exists():
        return
    _add(files, config, uri, path)
    if path.is_dir():
        for each in _tracked(path):
            _add_source(files, config, each)


def _tracked(folder: Path) -> list[Path]:
    """Return the files of a folder that belong to the repository; where git is not there, those that are not caches."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=folder, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [folder / name for name in listed.stdout.split("\0") if name]
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _listing(folder: Path) -> str:
    here = Path(page_of(folder)).parent
    links = {path.relative_to(folder).as_posix(): os.path.relpath(page_of(path), here) for path in _tracked(folder)}
    title = folder.relative_to(ROOT).as_posix()
    return f"# {title}\n\n" + "".join(f"- [{name}]({link})\n" for name, link in links.items())


def _source(path: Path) -> str:
    language = LANGUAGES.get(path.suffix, "text")
    return f"# {path.relative_to(ROOT).as_posix()}\n\n````{language}\n{path.read_text(encoding='utf-8')}\n````\n"
