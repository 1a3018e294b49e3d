"""A package imports only from the floors below it."""

import ast
import subprocess
import sys
from pathlib import Path

import toolkit

ROOT = Path(toolkit.__file__).parent
FLOORS = {
    "errors": 0,
    "settings": 0,
    "processes": 0,
    "disk": 0,
    "memory": 0,
    "phases": 0,
    "hub": 0,
    "portion": 0,
    "time_limit": 0,
    "functional": 0,
    "models": 1,
    "data": 1,
    "checkpoints": 1,
    "rewards": 2,
    "reports": 2,
    "sampling": 3,
    "trainers": 4,
    "spec": 5,
    "costs": 5,
    "runs": 6,
    "inference": 7,
    "recipes": 8,
    "cli": 9,
    "__main__": 10,
    "__init__": 0,
}
KNOWN_TO_ALL = {"errors", "settings", "processes", "disk", "phases", "hub", "portion", "memory", "time_limit"}


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


def modules() -> dict[str, Path]:
    names = {path: ".".join(("toolkit", *path.relative_to(ROOT).with_suffix("").parts)) for path in ROOT.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first one again at the end; empty if there is none."""
    done: set[str] = set()

    def walk(name: str, above: list[str]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            circle = walk(other, [*above, name])
            if circle:
                return circle
        done.add(name)
        return []

    return next(filter(None, (walk(name, []) for name in sorted(graph))), [])


def test_a_circle_is_seen():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_module_imports_itself_in_a_circle():
    """Imports inside functions and for type checkers alone count as any other."""
    known = modules()
    graph = {}
    for name, path in known.items():
        # A package's own __init__ runs first, whatever part of it is imported.
        graph[name] = {other for other in imports(path) if other in known and other != name and other != "toolkit"}
    assert len(graph) > 80 and any(graph.values())
    assert cycle(graph) == []


def test_trl_is_known_where_contributing_says():
    for path in ROOT.rglob("*.py"):
        if any(name == "trl" or name.startswith("trl.") for name in imports(path)):
            assert room(path) in ("trainers", "spec") or path == ROOT / "runs" / "check_data.py", path


def test_functional_knows_torch_alone():
    for path in (ROOT / "functional").glob("*.py"):
        for name in imports(path):
            top = name.split(".")[0]
            assert top in ("torch", "toolkit") or top in sys.stdlib_module_names, f"{path}: {name}"


def test_recipes_are_listed_without_a_library():
    """Which take five seconds to import."""
    script = "import sys; from toolkit.cli import app; app(['recipes'], standalone_mode=False); print(*sys.modules)"
    listed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    *recipes, modules = listed.splitlines()
    assert any(line.startswith("doubling ") for line in recipes)
    assert {"torch", "transformers", "datasets", "omegaconf"}.isdisjoint(modules.split())


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
        for public, member in vars(package).items():
            ours = getattr(member, "__module__", "").startswith("toolkit.")
            if ours and (inspect.isclass(member) or inspect.isfunction(member)):
                assert member.__doc__ and len(member.__doc__) > 20, f"toolkit.{name}.{public}"
