"""The engine's own argument definitions, read from its source without importing it."""

import ast


def read_flags(source):
    """Every `--flag` that `source` (the text of sglang/srt/server_args.py) defines, by each of its names, as a dict of
    name, type ("str", "int", "float" or "json"), switch (takes no value), many and choices.

    Choices written as a module constant are followed; ones computed any other way are left open. Only
    `add_argument` calls are looked at, so what the parser accepts by abbreviation is not listed.
    """
    tree = ast.parse(source)
    constants = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                constants[statement.targets[0].id] = ast.literal_eval(statement.value)
            except ValueError:
                continue
    flags = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            for flag in _flags_of(call, constants):
                flags[flag["name"]] = flag
    return dict(sorted(flags.items()))


def _flags_of(call, constants):
    names = [a.value for a in call.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")]
    keywords = {k.arg: k.value for k in call.keywords if k.arg}
    action = ast.unparse(keywords["action"]).strip("'\"") if "action" in keywords else "store"
    kind = ast.unparse(keywords["type"]) if "type" in keywords else "str"
    kind = {"json.loads": "json", "json_list_type": "json"}.get(kind, kind)
    choices = keywords.get("choices")
    allowed = ()
    if isinstance(choices, ast.Name):
        allowed = constants.get(choices.id, ())
    elif choices is not None:
        try:
            allowed = ast.literal_eval(choices)
        except ValueError:
            allowed = ()
    return [
        {
            "name": name[2:],
            "type": kind if kind in ("str", "int", "float", "json") else "str",
            "switch": action in ("store_true", "store_false"),
            "many": "nargs" in keywords or action in ("append", "LoRAPathAction"),
            "choices": [str(c) for c in (sorted(allowed) if isinstance(allowed, set) else allowed) if c],
        }
        for name in names
    ]
