"""A package imports only from the floors below it."""

import ast
from pathlib import Path

import toolkit

ROOT = Path(toolkit.__file__).parent
FLOORS = {
    "errors": 0,
    "functional": 0,
    "models": 1,
    "data": 1,
    "rewards": 2,
    "checkpoints": 2,
    "reports": 2,
    "trainers": 3,
    "recipes": 4,
    "cli": 5,
    "__main__": 6,
    "__init__": 0,
}
KNOWN_TO_ALL = {"errors"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_imports_go_downwards():
    files = list(ROOT.rglob("*.py"))
    assert len(files) > 20
    for path in files:
        for name in imports(path):
            if not name.startswith("toolkit.") or name.split(".")[1] in KNOWN_TO_ALL:
                continue
            target = name.split(".")[1]
            if target == "__version__" or target == room(path):
                continue
            assert FLOORS[target] < FLOORS[room(path)], f"{path.relative_to(ROOT)} imports toolkit.{target}"


def test_only_trainers_and_recipes_know_trl():
    for path in ROOT.rglob("*.py"):
        if any(name == "trl" or name.startswith("trl.") for name in imports(path)):
            assert room(path) in ("trainers", "recipes"), path


def test_functional_knows_torch_alone():
    import sys

    for path in (ROOT / "functional").glob("*.py"):
        for name in imports(path):
            top = name.split(".")[0]
            assert top in ("torch", "toolkit") or top in sys.stdlib_module_names, f"{path}: {name}"


def test_roles_are_switched_in_one_place():
    switches = ("set_adapter", "disable_adapter", "enable_adapter_layers", "disable_adapter_layers")
    for path in ROOT.rglob("*.py"):
        called = {
            node.func.attr
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        assert not called & set(switches) or path == ROOT / "models" / "roles.py", path


def test_every_public_name_is_documented():
    import importlib
    import inspect

    for name in ("functional", "models", "data", "rewards", "checkpoints", "reports", "recipes"):
        package = importlib.import_module(f"toolkit.{name}")
        for public in package.__all__:
            member = getattr(package, public)
            if inspect.isclass(member) or inspect.isfunction(member):
                assert member.__doc__ and len(member.__doc__) > 20, f"toolkit.{name}.{public}"
