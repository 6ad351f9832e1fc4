"""The engine's own argument definitions, read from its source without importing it."""

import ast
import os


def engine_flags(package):
    """read_flags of the engine in the folder `package` (…/site-packages/sglang)."""

    def read(module):
        path = os.path.join(os.path.dirname(package), *module.split(".")) + ".py"
        try:
            with open(path, encoding="utf-8") as handle:
                return handle.read()
        except OSError:
            return ""

    return read_flags(read(os.path.basename(package) + ".srt.server_args"), read)


def read_flags(source, read=lambda module: ""):
    """Every `--flag` that `source` (the text of sglang/srt/server_args.py) defines, by each of its names.

    Each is a dict of name, type ("str", "int", "float" or "json"), switch (takes no value), many (takes a list),
    choices, same_as (the name to use, where this is another one) and deprecated. Of several names the one to use is the
    one that ServerArgs has a field for. Choices are followed through constants, sums of lists, and the keys of a
    class's dict in another module, whose text `read(module)` gives; any other way leaves them open. Only
    `add_argument` calls are looked at, so what the parser accepts by abbreviation is not listed.
    """
    tree = ast.parse(source)
    scope = _Scope(tree, read)
    fields = {
        statement.target.id
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for statement in cls.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    flags = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            for flag in _flags_of(call, scope, fields):
                flags[flag["name"]] = flag
    return dict(sorted(flags.items()))


class _Scope:
    """What names stand for in a module, as far as it can be told without running it."""

    def __init__(self, tree, read):
        self.assigned = {
            statement.targets[0].id: statement.value
            for statement in ast.walk(tree)
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        }
        self.imported = {
            alias.asname or alias.name: statement.module
            for statement in ast.walk(tree)
            if isinstance(statement, ast.ImportFrom) and statement.module
            for alias in statement.names
        }
        self.read = read

    def value(self, node):
        """A list, a set or a tuple of constants; None when it cannot be told."""
        if isinstance(node, ast.Name):
            return self.value(self.assigned[node.id]) if node.id in self.assigned else None
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            items = [self.constant(item) for item in node.elts]
            if any(item is None for item in items):
                return None
            return sorted(items) if isinstance(node, ast.Set) else items
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            both = self.value(node.left), self.value(node.right)
            return both[0] + both[1] if None not in both else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("list", "sorted"):
            return self.value(node.args[0]) if node.args else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "keys":
            return self.keys(node.func.value)
        return None

    def constant(self, node):
        if isinstance(node, ast.Name) and node.id in self.assigned:
            node = self.assigned[node.id]
        return str(node.value) if isinstance(node, ast.Constant) and node.value is not None else None

    def keys(self, node):
        """The keys of `Class.Attribute`, a dict written out in the module that the class is imported from."""
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            return None
        module = self.imported.get(node.value.id)
        for cls in ast.parse(self.read(module)).body if module else ():
            if isinstance(cls, ast.ClassDef) and cls.name == node.value.id:
                for statement in cls.body:
                    targets = [getattr(statement, "target", None), *getattr(statement, "targets", ())]
                    named = any(isinstance(target, ast.Name) and target.id == node.attr for target in targets)
                    if named and isinstance(statement.value, ast.Dict):
                        return [str(key.value) for key in statement.value.keys if isinstance(key, ast.Constant)]
        return None


SWITCHES = ("store_true", "store_false", "argparse.BooleanOptionalAction", "DeprecatedStoreTrueAction")


def _flags_of(call, scope, fields):
    names = [a.value[2:] for a in call.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")]
    keywords = {k.arg: k.value for k in call.keywords if k.arg}
    action = ast.unparse(keywords["action"]).strip("'\"") if "action" in keywords else "store"
    kind = ast.unparse(keywords["type"]) if "type" in keywords else "str"
    # SGLang 0.5.12 takes 20k for 20000 too; a number is what rules can count with.
    kind = {"json.loads": "json", "json_list_type": "json", "human_readable_int": "int"}.get(kind, kind)
    allowed = scope.value(keywords["choices"]) if "choices" in keywords else None
    right = next((name for name in names if name.replace("-", "_") in fields), names[0] if names else "")
    return [
        {
            "name": name,
            "type": kind if kind in ("str", "int", "float", "json") else "str",
            "switch": action in SWITCHES,
            "many": "nargs" in keywords or action in ("append", "LoRAPathAction"),
            "choices": allowed or [],
            "same_as": "" if name == right else right,
            "deprecated": action == "DeprecatedAction",
        }
        for name in names
    ]
