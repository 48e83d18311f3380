"""The typed face of the dispatcher: the stub names what the module has, with the same parameters.
(Proved by leaving a function out of the stub, by renaming a parameter and by giving one a default.)
"""

import ast
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "rust_dispatch/py/python/lowlat_dispatch/_dispatch.pyi"
dispatch = pytest.importorskip("lowlat._dispatch", reason="lowlat is not built (make build)")


def stub() -> ast.Module:
    return ast.parse(STUB.read_text())


def public(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Functions and classes by name; __new__ and __len__ are said in a stub too."""
    nodes = [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return {node.name: node for node in nodes}


def parameters(node: ast.FunctionDef) -> list[tuple[str, str, bool]]:
    """(name, kind, has a default) of each, without self or cls."""
    arguments = node.args
    plain = [
        (argument.arg, "plain", len(arguments.args) - idx <= len(arguments.defaults))
        for idx, argument in enumerate(arguments.args)
        if argument.arg not in ("self", "cls")
    ]
    keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return plain + [(argument.arg, "keyword", default is not None) for argument, default in keyword]


def seen_parameters(value: object) -> list[tuple[str, str, bool]]:
    kinds = {
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "plain",
        inspect.Parameter.KEYWORD_ONLY: "keyword",
    }
    return [
        (one.name, kinds[one.kind], one.default is not inspect.Parameter.empty)
        for one in inspect.signature(value).parameters.values()
        if one.name != "self"
    ]


def test_the_stub_names_what_the_module_has() -> None:
    names = next(
        ast.literal_eval(node.value)
        for node in stub().body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    assert sorted(names) == sorted(dispatch.__all__)
    assert sorted(public(stub().body)) == sorted(dispatch.__all__)


@pytest.mark.parametrize(
    "name", [name for name, node in public(stub().body).items() if isinstance(node, ast.ClassDef)]
)
def test_a_class_has_the_members_of_the_stub(name: str) -> None:
    value = getattr(dispatch, name)
    members = public(public(stub().body)[name].body)
    own = {member for member in vars(value) if not member.startswith("_")}
    assert own == {member for member in members if not member.startswith("_")}
    if "__new__" in members:
        assert parameters(members["__new__"]) == seen_parameters(value)
    else:
        with pytest.raises(TypeError, match=r"cannot create|No constructor"):
            value()
    for member, node in members.items():
        is_property = any(getattr(one, "id", "") == "property" for one in node.decorator_list)
        if not member.startswith("_") and not is_property:
            assert parameters(node) == seen_parameters(getattr(value, member)), member


def test_a_function_has_the_parameters_of_the_stub() -> None:
    for name, node in public(stub().body).items():
        if isinstance(node, ast.FunctionDef):
            assert parameters(node) == seen_parameters(getattr(dispatch, name)), name
