"""Other rooms reach `toolkit.models` by its public names."""

import ast
from pathlib import Path

import toolkit
from toolkit import models

ROOT = Path(toolkit.__file__).parent


def test_nobody_imports_past_the_public_names():
    used = set()
    for path in ROOT.rglob("*.py"):
        if path.is_relative_to(ROOT / "models"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("toolkit.models"):
                assert node.module == "toolkit.models", f"{path} imports {node.module}"
                used |= {alias.name for alias in node.names}
    assert len(used) > 30 and used <= set(models.__all__)
