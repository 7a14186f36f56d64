"""Nothing that comes out of a file is run: every place that could run a text, unpickle, import by name or start a
process is listed here with the reason why it may."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sources import sources, tree_of

MODULES = (
    "cloudpickle", "code", "codeop", "ctypes", "dill", "imp", "joblib", "jsonpickle", "marshal", "pickle", "pty",
    "runpy", "shelve", "subprocess", "yaml",
)  # fmt: skip
BUILTINS = ("__import__", "compile", "eval", "exec")
CALLS = (
    "CodeType", "exec_module", "fromfile", "gopen", "import_module", "load_inline", "load_library", "load_module",
    "load_state_dict_from_url", "popen", "read_pickle", "run_module", "run_path", "spawn", "startfile", "unsafe_load",
)  # fmt: skip
OF_OS = ("exec", "popen", "posix_spawn", "spawn", "startfile", "system")  # how their names begin
LOADERS = (
    "export",
    "hub",
    "jit",
    "marshal",
    "np",
    "numpy",
    "pickle",
    "torch",
    "yaml",
)  # of which `load` runs or unpickles
BETWEEN_RANKS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
# file, what it uses, how often: why it may
ALLOWED = {
    ("strategy/basics/kits.py", "import_module", 1): "imports this package's own kits, by a table in the code",
    ("partway/__init__.py", "import_module", 1): "imports a module of this package, by its name",
    ("strategy/basics/first_use.py", "import_module", 1): "imports this package's own modules, by tables in the code",
    (
        "kits/integrations/lightning.py",
        "objects between ranks",
        1,
    ): "pickled by another process of the same job, for this one",
    ("kits/measure/bench.py", "spawn", 1): "starts the processes that are measured, of this package's function",
    ("kits/measure/bench_experts.py", "spawn", 1): "starts the processes that are measured, of this package's function",
    (
        "kits/measure/calibrate.py",
        "spawn",
        1,
    ): "starts the processes that are measured, of this package's function",
    ("partway/commands/jobs.py", "import subprocess", 1): "runs the script that a person names on the command line",
    ("partway/commands/jobs.py", "subprocess.run", 1): "see above",
    ("kits/operator/manifests.py", "import yaml", 1): "its safe_load_all and safe_dump_all: plain values only",
    ("kits/ps/jobs.py", "import ctypes", 1): "for prctl of the system's own C library, with numbers of this file",
    ("kits/ps/jobs.py", "ctypes.CDLL", 1): "see above",
    ("kits/ps/jobs.py", "import subprocess", 1): "runs the script that a person names on the command line",
    ("kits/ps/jobs.py", "subprocess.Popen", 1): "see above",
    ("kits/ps/workers.py", "objects between ranks", 1): "pickled by another process of the same job, for this one",
    ("kits/ps/service/cluster.py", "import subprocess", 1): "starts Ray's own processes",
    ("kits/ps/service/cluster.py", "subprocess.Popen", 2): "see above",
    ("kits/ps/service/keeper.py", "import subprocess", 1): "starts Ray, as cluster.py says on its command line",
    ("kits/ps/service/keeper.py", "subprocess.Popen", 1): "see above",
    ("kits/ps/service/cluster.py", "import_module", 1): "ray, by its name",
    (
        "partway/requests/user_rules.py",
        "import marshal",
        1,
    ): "writes the code of a rule's local form, for a digest; reads none",
    ("partway/requests/user_rules.py", "marshal.dumps", 1): "see above",
    (
        "partway/commands/named.py",
        "import_module",
        1,
    ): "a module that a person names on the command line, as for `python -m`",
    (
        "partway/commands/named.py",
        "exec_module",
        1,
    ): "a file that a person names on the command line, as for `python FILE`",
    (
        "kits/checkpoints/contents.py",
        "torch.load",
        1,
    ): "with weights_only=True: tensors and plain values",
    ("kits/checkpoints/rank_files.py", "torch.load", 1): "with weights_only=True",
    (
        "kits/checkpoints/ranks.py",
        "objects between ranks",
        1,
    ): "pickled by another process of the same job, for this one",
    ("kits/data/web_decode.py", "np.load", 1): "of an .npz file, with allow_pickle=False",
    ("kits/data/web_pipeline.py", "gopen", 1): "opens shards; commands only where `allow` names them",
    ("propagation/ops/python/functions.py", "compile", 1): "what capture wrote in this process, never an argument",
    ("propagation/ops/python/functions.py", "exec", 1): "see above",
    ("runtime/random_state.py", "objects between ranks", 1): "pickled by another process of the same job, for this one",
    ("runtime/launching/worker.py", "os.execv", 1): "starts this process's own command again, as the shell gave it",
    ("runtime/code/straight_line.py", "compile", 1): "the lines of a program: slots, operators' names and literals",
    ("runtime/code/straight_line.py", "exec", 1): "see above",
}


def uses(tree: ast.Module) -> Iterator[str]:
    """What a module uses of the things that are watched."""
    bound = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names if a.name in MODULES}
    bound |= {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"import {a.name}" for a in names if a.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.partition(".")[0] in MODULES:
                yield from (f"import {module}.{a.name}" for a in names)
            case ast.Call(func=ast.Name(id=name)) if name in CALLS or (name in BUILTINS and name not in bound):
                yield name
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                owner = ast.unparse(value).rpartition(".")[2]
                if name in CALLS:
                    yield name
                elif (name in ("load", "loads") and owner in LOADERS) or owner in imported:
                    yield f"{owner}.{name}"
                elif owner == "os" and name.startswith(OF_OS):
                    yield f"os.{name}"
    if any(isinstance(node, ast.Attribute) and node.attr in BETWEEN_RANKS for node in ast.walk(tree)):
        yield "objects between ranks"


def found() -> dict[str, list[str]]:
    return {name: sorted(uses(tree_of(path))) for name, path in sources().items()}


def test_every_place_that_could_run_data_is_listed_with_its_reason() -> None:
    seen = {(name, use, used.count(use)) for name, used in found().items() for use in used}
    new, gone = seen - ALLOWED.keys(), ALLOWED.keys() - seen
    assert not new, f"say in ALLOWED why this cannot run what a file or a stranger says: {sorted(new)}"
    assert not gone, f"no longer there, or another number of times: {sorted(gone)}"


def test_all_modules_are_looked_at() -> None:
    names = set(found())
    assert {
        "partway/reuse/cache.py",
        "kits/data/web.py",
        "strategy/basics/files.py",
        "propagation/plan/stored.py",
        "propagation/plan/forms.py",
        "runtime/loaded.py",
    } <= names
    assert len(names) > 100


def test_what_is_watched_is_seen() -> None:
    lines = (
        "import pickle", "import os, subprocess", "from yaml import load", "types.CodeType()", "eval('1')", "exec('1')",
        "compile('1', '', 'eval')", "os.system('true')", "os.popen('true')", "os.execvp('true', [])", "torch.load('x')",
        "np.load('x', allow_pickle=True)", "torch.jit.load('x')", "importlib.import_module('x')", "__import__('x')",
        "import_module('x')", "pickle.loads(b'')", "marshal.loads(b'')", "torch.ops.load_library('x')",
        "runpy.run_path('x')", "dist.all_gather_object(x, y)",
    )  # fmt: skip
    for line in lines:
        assert list(uses(ast.parse(line))), line
    for line in ("from partway.sharding import compile\ncompile(f)", "json.loads('1')", "re.compile('x')"):
        assert not list(uses(ast.parse(line))), line
