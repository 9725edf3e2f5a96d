"""What MkDocs calls while it builds the site: pages get what is made from the code, and files from outside of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import generated
import leaderboard_picture
import sample
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/NOTES.md": "notes.md",
    "constraints.txt": "constraints.txt",
}
"""Files that are not in docs/ and have their place on the site all the same."""

_MARK = re.compile(r"^<!-- (?:file: (?P<file>[\w.]+)|run|row|test|not run: .+) -->\n```(?P<language>\w*)$", re.M)
_GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in what lies outside of docs/, and what the guide's run gives."""
    for place, path in {**sample.made(), **leaderboard_picture.made()}.items():
        files.append(File.generated(config, place, abs_src_path=str(path)))
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill in what is generated, turn marks for the tests into titles, and point links at the site."""
    for source, place in OUTSIDE.items():
        markdown = markdown.replace(f"](../{source}", f"]({place}")
        markdown = markdown.replace(f"]({source}", f"]({place}")
    if page.file.src_uri in OUTSIDE.values():
        markdown = markdown.replace("](docs/", "](")
    markdown = _MARK.sub(_fence, markdown)
    return _GENERATED.sub(lambda match: generated.PAGES[match[1]](), markdown)


def _fence(match: re.Match[str]) -> str:
    title = f' title="{match["file"]}"' if match["file"] else ""
    return f"```{match['language']}{title}"
