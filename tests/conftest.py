"""What tests share: how each of them starts, which are long, and ranks on gloo processes."""

import gc
import os
import sys

import pytest
import tiers
from afresh import start_afresh
from random_examples import register_profiles

os.environ["PARTWAY_CACHE"] = "0"  # tests plan anew; those of the cache set it themselves
os.environ.setdefault("PARTWAY_VERIFY", "1")  # every value of every rank is compared with what was traced for it


register_profiles()


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "cuda"), help="where tensors are made; on cuda, ranks talk by NCCL")


def pytest_configure(config):
    """The models of the zoo have two layers, a first and a last one; in `deep` (make conformance) some between too."""
    if config.getoption("--device"):
        os.environ["PARTWAY_TEST_DEVICE"] = config.getoption("--device")
    deep = config.getoption("--hypothesis-profile") == "deep"
    os.environ["ZOO_LAYERS"] = "4" if deep else "2"


@pytest.fixture(autouse=True)
def _defaults():
    """Each test starts with the default options and the same seed, and leaves the options so."""
    if torch := sys.modules.get("torch"):
        torch.distributions.Distribution.set_default_validate_args(True)  # torch.cond turns it off, for good
    start_afresh()
    yield
    if torch := sys.modules.get("torch"):
        on = torch._C._is_torch_function_enabled()
        assert on, "this test left __torch_function__ turned off for its thread"
    start_afresh()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the cache of plans, which is on in a test that has it."""
    monkeypatch.delenv("PARTWAY_CACHE", raising=False)
    monkeypatch.delenv("PARTWAY_VERIFY", raising=False)
    import partway as pw

    pw.set_auto_parallel_context(compile_cache_path=str(tmp_path))
    return tmp_path


@pytest.fixture
def plans(monkeypatch):
    """What is planned in a test, in order."""
    from partway.engine import engine

    made = []
    plain = engine.compile_call

    def compile_call(*args, **kwargs):
        made.append(plain(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(engine, "compile_call", compile_call)
    return made


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """The garbage collector leaves alone what stands when the tests are collected: modules and tests last."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """What is in long.txt, or in the folders of pages and of GPUs, is marked as long. Half of the workers have pools of
    ranks, since each rank is a process too; a file's tests share a pool. They come first, so that pools end early."""
    long = tiers.long()
    for item in items:
        if item.nodeid in long or item.nodeid.startswith(("tests/conformance/", "tests/gpu/")):
            item.add_marker("long")
    groups = max(1, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) // 2)
    files = list(dict.fromkeys(item.path for item in items if "pools" in item.fixturenames))
    for item in items:
        if "pools" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group(f"ranks {files.index(item.path) % groups}"))
    items.sort(key=lambda item: "pools" not in item.fixturenames)


def pytest_runtest_teardown(item, nextitem):
    """Ranks end with the last of their tests, since process groups cost a CPU time even while nobody uses them."""
    if nextitem is None or "pools" not in nextitem.fixturenames:
        close(item.funcargs.get("pools", {}))


@pytest.fixture(scope="session")
def pools():
    """The pools of ranks, by how many ranks they have."""
    started = {}
    yield started
    close(started)


def close(pools):
    while pools:
        pools.popitem()[1].close()


@pytest.fixture
def on_ranks(pools):
    """`on_ranks(n, function, *arguments)`: run a function of the test's file on n gloo processes."""

    from pool import Pool

    def run(n, function, *arguments):
        if n in pools and pools[n].is_worn():
            pools.pop(n).close()
        if n not in pools:
            pools[n] = Pool(n)
        try:
            return pools[n].call(function, arguments)
        except BaseException:
            pools.pop(n).close()  # its ranks may be out of step
            raise

    return run
