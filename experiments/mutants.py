"""Mutants of numeric source code: each is one small change to one function, as text.

Five kinds: a flipped sign, a dropped mask, an index shifted by one, mean and sum exchanged, a dropped stop-gradient.
Docstrings, checks (chex, `raise` and the `if` before it) and what only feeds the metrics are left as they are.
"""

import ast
import dataclasses
from collections.abc import Iterator

KINDS = ("sign", "mask", "shift", "mean", "gradient")
METRICS = {"metrics", "sums"}  # what is assigned to these, or given under these names, is reported and never trained on
AGGREGATES = {"mean": "sum", "sum": "mean", "group_mean": "group_sum", "group_sum": "group_mean"}
AGGREGATES |= {"segment_mean": "segment_sum", "segment_sum": "segment_mean"}
COUNTS = ("count", "size", "n", "n_B", "tokens_B", "others")  # names that a division by a count divides by
PLACES = ("turn", "last", "start", "segment", "at", "first", "offset", "index")  # names whose values are indices
MASKED = {"apply": 2, "sum": 1, "mean": 1, "var": 1, "whiten": 1, "count": 0}  # where masked.X takes its mask


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change: bytes [start, end) of a module's source become `text`."""

    module: str  # dotted, below rsi_jax: credit.group
    function: str  # qualified name in the module
    kind: str  # one of KINDS
    line: int  # from 1
    start: int
    end: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.module}.{self.function}"

    def apply(self, source: str) -> str:
        """The source of the module with the change in it."""
        raw = source.encode()
        return (raw[: self.start] + self.text.encode() + raw[self.end :]).decode()

    def lines(self, source: str) -> tuple[str, str]:
        """The line before and after the change, without indentation; a longer piece of code is folded into one."""
        raw = source.encode()
        first = raw.rfind(b"\n", 0, self.start) + 1
        last = raw.find(b"\n", self.end)
        after = raw[first : self.start] + self.text.encode() + raw[self.end : last]
        return _folded(raw[first:last].decode()), _folded(after.decode())


def _folded(code: str) -> str:
    return " ".join(code.split())


def of_module(module: str, source: str, *, skip: tuple[str, ...] = ()) -> list[Mutant]:
    """Lists the mutants of all functions and methods of a module, in order of their place; each text once.

    Args:
      module: its name, as Mutant.module.
      source: its text.
      skip: names `module.function` that are left alone.
    """
    found: dict[str, Mutant] = {}
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for name, function in _functions(ast.parse(source)):
        if f"{module}.{name}" in skip:
            continue
        for node, kind, text in _changes(function):
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            mutant = Mutant(module, name, kind, node.lineno, start, end, text)
            found.setdefault(mutant.apply(source), mutant)
    found.pop(source, None)
    return sorted(found.values(), key=lambda mutant: (mutant.start, mutant.kind))


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _changes(function: ast.FunctionDef) -> Iterator[tuple]:
    """Yields (node, kind, the text that stands for it) over the body of a function."""
    numeric = list(_numeric(function.body, _reported(function)))
    shapes = {id(child) for node in numeric if _is_shape(node) for child in ast.walk(node)}
    numeric = [node for node in numeric if id(node) not in shapes]
    inside = {id(child) for node in numeric for child in _index_parts(node)}
    for node in numeric:
        where = id(node) in inside
        for kind, rule in zip(KINDS, (_sign, _mask, _shift, _mean, _gradient), strict=True):
            if kind == "sign" and where:
                continue
            for text in rule(node, where) if kind == "shift" else rule(node):
                if not text.startswith(f"{function.name}("):  # a function that only calls itself is no mistake to make
                    yield node, kind, text
        if isinstance(node, ast.Assign | ast.Return) and _is_scaled(node.value):
            yield node.value, "sign", f"(-({ast.unparse(node.value)}))"


def _numeric(nodes: list, reported: set[str]) -> Iterator[ast.AST]:
    """Walks the nodes that steer numbers: no docstring, no check, no annotation, nothing that is only reported."""
    for node in nodes:
        match node:
            case ast.Expr() | ast.Raise() | ast.arguments() | ast.JoinedStr():
                continue
            case ast.If(body=[*_, ast.Raise()]):
                nodes_in = node.orelse
            case ast.Assign() if all(_root(target) in reported for target in node.targets):
                continue
            case ast.keyword() if node.arg in METRICS:
                continue
            case ast.FunctionDef():
                nodes_in = node.body
            case _:
                yield node
                nodes_in = list(ast.iter_child_nodes(node))
        yield from _numeric(nodes_in, reported)


def _root(target: ast.AST) -> str | None:
    """The name that an assignment changes."""
    while isinstance(target, ast.Subscript | ast.Attribute):
        target = target.value
    return target.id if isinstance(target, ast.Name) else None


def _reported(function: ast.FunctionDef) -> set[str]:
    """Names of a function that are read only to make its metrics."""
    assigned = {
        node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    found = set(METRICS)
    while True:
        read = {node.id for node in _numeric(function.body, found) if _is_read(node)}
        more = assigned - found - read
        if not more:
            return found
        found |= more


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _index_parts(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that count places: what stands in [], in a comparison of an index, a roll, a pad or a maximum."""
    match node:
        case ast.Subscript():
            yield from ast.walk(node.slice)
        case ast.Compare() if _named(node.left, PLACES):
            yield from node.comparators
        case ast.Call() if _called(node) in ("roll", "pad"):
            for argument in node.args[1:]:
                yield from ast.walk(argument)
        case ast.Call() if _called(node) == "maximum" and _named(node.args[0], PLACES):
            yield node.args[1]


def _called(node: ast.AST) -> str | None:
    """The last part of the name of what is called."""
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def _is_shape(node: ast.AST) -> bool:
    """True for x.shape[0], and for the -1 that reshape is given."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    return isinstance(node, ast.UnaryOp) and ast.unparse(node) == "-1"


def _named(node: ast.AST, stems: tuple[str, ...]) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.split("_")[0] in stems or name in stems


def _is_scaled(node: ast.AST | None) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div)


def _sign(node: ast.AST) -> Iterator[str]:
    flipped = {ast.Add: "-", ast.Sub: "+", ast.Gt: "<", ast.Lt: ">", ast.GtE: "<=", ast.LtE: ">="}
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            yield f"({ast.unparse(node.left)} {flipped[type(node.op)]} ({ast.unparse(node.right)}))"
        case ast.UnaryOp(op=ast.USub()):
            yield f"({ast.unparse(node.operand)})"
        case ast.Compare(ops=[op]) if type(op) in flipped:
            yield f"({ast.unparse(node.left)} {flipped[type(op)]} {ast.unparse(node.comparators[0])})"


def _mask(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Call() if _called(node) == "where":
            yield f"({ast.unparse(node.args[1])})"
        case ast.Call() if _called(node) in ("zero", "_keep"):
            yield f"({ast.unparse(node.args[0])})"
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr()):
            yield f"({ast.unparse(node.left)})"
            yield f"({ast.unparse(node.right)})"
        case ast.AugAssign(op=ast.BitAnd() | ast.BitOr()):
            yield f"{ast.unparse(node.target)} = {ast.unparse(node.value)}"
            yield "pass"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="masked")) | ast.Name()) if _called(node) in MASKED:
            place = MASKED[_called(node)]
            arguments = [ast.unparse(argument) for argument in node.args]
            arguments[place] = f"jnp.ones_like({arguments[place]})"
            arguments += [ast.unparse(keyword) for keyword in node.keywords]
            yield f"{ast.unparse(node.func)}({', '.join(arguments)})"


def _shift(node: ast.AST, index: bool) -> Iterator[str]:
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=1)) if type(node.right.value) is int:
            yield f"({ast.unparse(node.left)})"
        case ast.Slice(lower=ast.Constant(value=1), upper=None):
            yield ":"
        case ast.Constant(value=0 | 1) if index and type(node.value) is int:
            yield str(1 - node.value)
        case ast.Tuple(elts=[ast.Constant(value=first), ast.Constant(value=second)]) if index and first != second:
            yield f"({second!r}, {first!r})"


def _mean(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="masked" | "jnp")) | ast.Name()) if (
            _called(node) in AGGREGATES
        ):
            name = ast.unparse(node.func)
            arguments = [ast.unparse(part) for part in [*node.args, *node.keywords]]
            yield f"{name.removesuffix(_called(node))}{AGGREGATES[_called(node)]}({', '.join(arguments)})"
        case ast.Attribute(value=ast.Name(id="masked"), attr="mean" | "sum" as name):
            yield f"masked.{AGGREGATES[name]}"
        case ast.BinOp(op=ast.Div()) if any(_named(part, COUNTS) for part in ast.walk(node.right)):
            yield f"({ast.unparse(node.left)})"
        case ast.Call() if _called(node) == "reciprocal":
            yield f"jnp.ones_like({ast.unparse(node.args[0])})"


def _gradient(node: ast.AST) -> Iterator[str]:
    if _called(node) == "stop_gradient":
        yield f"({ast.unparse(node.args[0])})"
