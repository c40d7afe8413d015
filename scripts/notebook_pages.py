"""mkdocs hook: each notebook of docs/notebooks becomes a page of Markdown with its stored outputs and pictures."""

import base64
import json
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Replace every notebook by its page and its pictures."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        stem = file.src_uri.removesuffix(".ipynb")
        page, pictures = to_markdown(json.loads(file.content_string), stem.rsplit("/", 1)[-1])
        files.remove(file)
        files.append(File.generated(config, f"{stem}.md", content=page))
        for name, content in pictures.items():
            files.append(File.generated(config, f"{stem.rsplit('/', 1)[0]}/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to notebooks lead to their pages."""
    return re.sub(r"(\]\([^)\s]*)\.ipynb", r"\1.md", markdown)


def to_markdown(notebook: dict[str, Any], stem: str) -> tuple[str, dict[str, bytes]]:
    """The text of a notebook and its pictures by file name."""
    parts, pictures = list[str](), dict[str, bytes]()
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            content = output.get("data", {})
            if output["output_type"] == "error":
                raise ValueError(f"{stem}.ipynb holds an error; run scripts/docs --execute")
            if "image/png" in content:
                name = f"{stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode(content["image/png"])
                parts.append(f"![Output of the cell above]({name})")
            elif text := "".join(output.get("text", content.get("text/plain", ""))):
                parts.append(f"```text\n{_COLOURS.sub('', text).rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures
