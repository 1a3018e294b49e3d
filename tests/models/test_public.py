"""Other rooms reach `toolkit.models` by its public names."""

import ast
import re
from pathlib import Path

import toolkit
from toolkit import models

ROOT = Path(toolkit.__file__).parent


def test_nobody_imports_past_the_public_names():
    used = set()
    for path in ROOT.rglob("*.py"):
        if path.is_relative_to(ROOT / "models"):
            continue
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("toolkit.models"):
                assert node.module == "toolkit.models", f"{path} imports {node.module}"
                used |= {alias.name for alias in node.names}
        if re.search(r"^from toolkit import (\w+, )*models\b", text, re.MULTILINE):
            used |= set(re.findall(r"\bmodels\.(\w+)", text))
    tree = ast.parse(Path(models.__file__).read_text(encoding="utf-8"))
    public = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert len(used) > 30 and used <= public
    # Classes whose objects others get, to make one in a test, and what benchmarks ask for.
    assert public - used <= {"ScoreHead", "ValueModel", "quantize_outline"}
