"""Every Python example in the README and the docs runs, each document from top to bottom in an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(document: Path) -> str:
    """The blocks of a document as one program, at the lines where they stand, so that an error names the place."""
    text = document.read_text("utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for number, line in enumerate(block[1].splitlines()):
            lines[first + number] = line
    return "\n".join(lines)


# The guides to Spark are run by tests/spark, which have what they need.
WITH_EXAMPLES = [document for document in DOCUMENTS if examples(document).strip() and not document.name.startswith("spark")]


def test_the_readme_and_the_docs_have_examples():
    assert {document.name for document in WITH_EXAMPLES} >= {"README.md", "format.md", "operations.md"}


@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=lambda document: document.name)
def test_the_examples_of_a_document_run(document, tmp_path):
    program = f"exec(compile({examples(document)!r}, {str(document)!r}, 'exec'))"

    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)

    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_links_to_other_documents_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text("utf-8")):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
