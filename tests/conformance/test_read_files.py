"""Every kind of file that Partway reads, with changed structure and changed bytes: either the loaded values are those
of the file, or an error of Partway's own names the file. `sealed`: the checksums are corrected, so that the checks
behind them run."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import malformed
import pytest
import torch
from certificates import Authority
from hypothesis import given
from hypothesis import strategies as st
from malformed import MESH, Net, X
from random_examples import examples

import partway as pw
from partway.checkpoints.manifest import MANIFEST
from partway.commands.compare_graphs import saved_calls
from partway.operator import manifests
from partway.propagation.cost.profile import DeviceProfile, profile_of, read_profile
from partway.propagation.plan.data import PlanData
from partway.propagation.plan.stored import dump, load
from partway.propagation.program.program import Program
from partway.reuse.cache import Files
from partway.strategy.basics.files import json_of

DRAWS = st.randoms(use_true_random=False)
JUNK = (
    b"", b"{}", b"[]", b"null", b"0", b'"x"', b"[" * 50_000, b'{"a":' * 50_000, b"\xff\xfe\x00", b"\x80\x04\x95.",
    b"PK\x03\x04", b"1" * 6000, b"NaN", b"\xef\xbb\xbf{}", b'{"format": 2}', b'{"format": 1, "format": 1}', b"\0" * 100,
)  # fmt: skip


class Home:
    """A folder of valid files; `changed` changes the form of one, and `restore` restores all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.good = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    def restore(self) -> None:
        for path, content in self.good.items():
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            if path.is_symlink() or not path.is_file() or path.read_bytes() != content:
                path.unlink(missing_ok=True)
                path.write_bytes(content)

    def replace(self, path: Path, draws: Random) -> None:
        """Replace the file by nothing, a folder, a link that leads nowhere or to itself, or junk."""
        path.unlink()
        match draws.randrange(5):
            case 0:
                path.mkdir()
            case 1:
                path.symlink_to(path.with_name("nowhere"))
            case 2:
                path.symlink_to(path)
            case 3:
                path.write_bytes(draws.choice(JUNK))


def edited_json(data: bytes, draws: Random) -> bytes:
    """JSON with other values, with a value in another spelling, or with a repeated name."""
    tree = json.loads(data)
    if places := list(malformed._places(tree)) if draws.random() < 0.3 else []:
        holder, key = draws.choice(places)
        spell: Any = draws.choice(
            (json.dumps, lambda value: [value], bool, lambda value: value + 0.0, lambda value: f"{value} ")
        )
        with contextlib.suppress(TypeError, OverflowError):
            holder[key] = spell(holder[key])
    else:
        tree = malformed.edited(tree, draws)
    if isinstance(tree, dict) and tree and draws.random() < 0.1:
        name = draws.choice(list(tree))
        return f"{{{json.dumps(name)}: 1, {json.dumps(tree)[1:]}".encode()
    return json.dumps(tree).encode()


def edited_header(data: bytes, draws: Random) -> bytes:
    """A safetensors file with another header of the right length."""
    length = int.from_bytes(data[:8], "little")
    text = edited_json(data[8 : 8 + length], draws)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def edited_note(data: bytes, draws: Random) -> bytes:
    """A rank's file with other facts about the rank."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    note = header["__metadata__"]["partway"].encode()
    header["__metadata__"]["partway"] = draws.choice((edited_json(note, draws), draws.choice(JUNK))).decode("latin-1")
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def refusal(call: Callable[[], object], *named: Path) -> pw.PartwayError | None:
    """The one-line error of Partway's own that a call raises, which names one of the files; None if the call works."""
    found = None
    try:
        with malformed.within(malformed.SECONDS), warnings.catch_warnings(action="ignore"):
            call()
    except pw.PartwayError as error:
        found = error
    finally:
        malformed.reset()
    if found is not None:
        assert not named or any(str(path) in str(found) for path in named), f"the file is not named: {found}"
        assert "\n" not in str(found) or "is not a device profile:\n" in str(found), str(found)
    return found


def agrees(said: Any, found: Any) -> bool:
    """Whether the loaded values are those of a file; further fields in the file belong to a later version."""
    if isinstance(said, dict) and isinstance(found, dict):
        return all(agrees(said[name], found[name]) for name in said.keys() & found.keys())
    if isinstance(said, list) and isinstance(found, list):
        return len(said) == len(found) and all(map(agrees, said, found))
    if type(said) in (int, float) and isinstance(found, dict):  # of a profile, one figure for all kinds
        return all(agrees(said, value) for value in found.values())
    if type(said) in (int, float) and type(found) in (int, float):
        return float(said) == float(found)  # where a float is wanted, an int of more digits is the next one
    return type(said) is type(found) and said == found


# -- Checkpoints -------------------------------------------------------------------------------------------------------


def trained() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(X).backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Home:
    model, optimizer = trained()
    numpy_too = torch.arange(3).numpy()
    return Home(
        pw.save(tmp_path_factory.mktemp("checkpoints"), model, optimizer, step=7, seen=[numpy_too.tolist(), "x"])
    )


def sealed(home: Home) -> None:
    """Correct the sizes and the checksums in the manifest."""
    manifest = json.loads((home.folder / MANIFEST).read_bytes())
    for name in manifest["sizes"]:
        content = (home.folder / name).read_bytes()
        manifest["sizes"][name] = len(content)
        if name in manifest["checksums"]:
            manifest["checksums"][name] = zlib.crc32(content)
        else:
            length = int.from_bytes(content[:8], "little")
            manifest["headers"][name] = zlib.crc32(content[: 8 + length])
    write_manifest(home, manifest)


def write_manifest(home: Home, manifest: Any) -> None:
    if isinstance(manifest, dict):
        said = json.dumps({name: value for name, value in manifest.items() if name != "checksum"})
        manifest["checksum"] = zlib.crc32(said.encode())
    (home.folder / MANIFEST).write_bytes(json.dumps(manifest).encode())


@given(DRAWS, st.sampled_from(["bytes", "other", "structure", "sealed"]))
@examples(60)
def test_a_changed_checkpoint_loads_equal_or_is_refused_by_name(checkpoint: Home, draws: Random, how: str) -> None:
    path = draws.choice(list(checkpoint.good))
    good = checkpoint.good[path]
    as_json = path.suffix == ".json"
    try:
        if how == "other":
            checkpoint.replace(path, draws)
        elif how == "bytes" or path.suffix == ".pt":
            path.write_bytes(malformed.bytes_of(good, draws))
        else:
            path.write_bytes(edited_json(good, draws) if as_json else edited_header(good, draws))
        if how == "sealed" and path.name == MANIFEST:
            write_manifest(checkpoint, json.loads(path.read_bytes()))
        elif how == "sealed":
            sealed(checkpoint)
        model, optimizer = Net(), torch.optim.Adam(Net().parameters())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
        error = refusal(lambda: pw.load(checkpoint.folder, model, optimizer), checkpoint.folder)
        if error is not None:
            after = model.state_dict(), optimizer.state_dict(), torch.get_rng_state()
            torch.testing.assert_close(after, before, rtol=0, atol=0)
        elif how != "sealed" or path.suffix == ".safetensors":
            expected, states = trained()
            torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
            if how != "sealed":
                torch.testing.assert_close(optimizer.state_dict(), states.state_dict(), rtol=0, atol=0)
    finally:
        checkpoint.restore()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("ranks")
    model: Any = pw.shard(Net(), mesh={"tp": 2}, parameter_plan={"up.weight": ("tp", None)})
    model(X)
    pw.save_checkpoint(model, folder / "rank_{rank}.safetensors")
    model.plan.save(folder / "strategy.json")
    return Home(folder)


@given(DRAWS, st.sampled_from(["header", "note", "cut", "other", "strategy"]))
@examples(60)
def test_a_changed_file_of_a_rank_or_of_its_strategy_is_read_or_refused_by_name(
    ranks: Home, draws: Random, how: str
) -> None:
    files = [path for path in ranks.good if path.suffix == ".safetensors"]
    strategy = ranks.folder / "strategy.json"
    path = strategy if how == "strategy" else draws.choice(files)
    good = ranks.good[path]
    try:
        match how:
            case "header":
                path.write_bytes(edited_header(good, draws))
            case "note":
                path.write_bytes(edited_note(good, draws))
            case "cut":
                path.write_bytes(good[: draws.randrange(len(good))] + bytes(draws.randrange(3)))
            case "strategy":
                path.write_bytes(edited_json(good, draws))
            case _:
                ranks.replace(path, draws)
        network = Net()
        draws.shuffle(files)
        error = refusal(
            lambda: pw.load_distributed_checkpoint(network, files, train_strategy_filename=strategy), *ranks.good
        )
        if (error is None and how in ("cut", "note")) or error is not None:
            torch.testing.assert_close(network.state_dict(), Net().state_dict(), rtol=0, atol=0)
    finally:
        ranks.restore()


# -- Plans, profiles, graphs, configurations ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("documents")
    malformed.plan().save(folder / "plan.json")
    profile_of("cpu").save(folder / "profile.json")
    return Home(folder)


READERS: dict[str, Callable[[Path], Any]] = {"plan.json": pw.Plan.load, "profile.json": read_profile}


@given(DRAWS, st.sampled_from(sorted(READERS)), st.sampled_from(["bytes", "other", "structure", "structure"]))
@examples(200)
def test_a_changed_plan_or_profile_says_what_is_loaded_or_is_refused_by_name(
    documents: Home, draws: Random, name: str, how: str
) -> None:
    path = documents.folder / name
    good = documents.good[path]
    found: list[PlanData | DeviceProfile] = []
    try:
        if how == "other":
            documents.replace(path, draws)
        else:
            path.write_bytes(malformed.bytes_of(good, draws) if how == "bytes" else edited_json(good, draws))
        if refusal(lambda: found.append(READERS[name](path)), path) is None:
            assert agrees(json_of(path.read_bytes()), json.loads(found[0].model_dump_json()))
    finally:
        documents.restore()


@pytest.mark.parametrize("name", READERS)
def test_a_name_that_a_file_says_twice_is_refused(documents: Home, name: str) -> None:
    path = documents.folder / name
    try:
        first = next(iter(json.loads(path.read_bytes())))
        path.write_bytes(b'{"%s": 1,' % first.encode() + path.read_bytes().lstrip()[1:])
        error = refusal(lambda: READERS[name](path), path)
        assert f"has {first!r} twice in one object" in str(error)
    finally:
        documents.restore()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A configuration of certificates with all its fields."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority(folder)
    for side in ("server", "client"):
        authority.sign(side, kind="p12", password="hush hush")
    (folder / "password").touch(mode=0o600)
    (folder / "password").write_text("hush hush")
    (folder / "config.json").touch(mode=0o600)
    said = {
        "secure_interfaces": ["wg0"], "server_cert_path": "server.p12", "client_cert_path": "client.p12",
        "ca_cert_path": authority.file.name, "cipher_list": "ECDHE+AESGCM", "password_path": "password",
        "cert_expire_warning_time_in_day": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(said))
    yield Home(folder)
    pw.set_ps_context()


@given(DRAWS, st.sampled_from(["bytes", "other", "structure", "structure"]))
@examples(60)
def test_a_changed_configuration_of_certificates_is_read_or_refused(
    certificates: Home, draws: Random, how: str
) -> None:
    path = certificates.folder / ("config.json" if how != "other" else draws.choice([*certificates.good]).name)
    good = certificates.good[path]
    try:
        if how == "other":
            certificates.replace(path, draws)
        else:
            path.write_bytes(malformed.bytes_of(good, draws) if how == "bytes" else edited_json(good, draws))
        path = certificates.folder / "config.json"
        refusal(lambda: pw.set_ps_context(enable_ssl=True, config_file_path=str(path)))
    finally:
        certificates.restore()
        for each in certificates.good:
            each.chmod(0o600)


@given(DRAWS, st.sampled_from(["bytes", "structure", "junk"]))
@examples(200)
def test_a_changed_yaml_of_a_job_is_right_or_its_problems_are_told(draws: Random, how: str) -> None:
    yaml = pytest.importorskip("yaml")
    job = manifests.job("train.py", ["--steps", "3"], 4, 2, "image")
    good = yaml.safe_dump(job).encode()
    if how == "structure":
        text = yaml.safe_dump(json.loads(edited_json(json.dumps(job).encode(), draws))).encode()
    else:
        text = draws.choice(JUNK) if how == "junk" else malformed.bytes_of(good, draws)
    with malformed.within(malformed.SECONDS):
        assert all(isinstance(problem, str) and problem for problem in manifests.check(text))


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("graphs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARTWAY_SAVE_GRAPHS", "1")
        patch.setenv("PARTWAY_SAVE_GRAPHS_PATH", str(folder))
        pw.compile(Net(), (X,), mesh=MESH)
    yield Home(folder)
    shutil.rmtree(folder)


@given(
    DRAWS,
    st.sampled_from(["index.txt", "make_plan.txt", "plan.json"]),
    st.sampled_from(["bytes", "other", "structure"]),
)
@examples(60)
def test_a_changed_folder_of_graphs_is_read_or_refused_by_name(
    graphs: Home, draws: Random, name: str, how: str
) -> None:
    path = next(path for path in graphs.good if path.name.endswith(name))
    good = graphs.good[path]
    try:
        if how == "other":
            graphs.replace(path, draws)
        elif how == "bytes" or name != "plan.json":
            path.write_bytes(malformed.bytes_of(good, draws))
        else:
            path.write_bytes(edited_json(good, draws))
        refusal(lambda: [(call.texts(), call.plan) for call in saved_calls(graphs.folder)], graphs.folder)
    finally:
        graphs.restore()


# -- The cache ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> tuple[Any, Any, bytes]:
    """A graph, its program, and the program's bytes."""
    compiled = pw.compile(Net(), (X,), mesh=MESH)
    return compiled.graph, compiled.program, dump(compiled.program, compiled.graph, (Program,))


@given(DRAWS, st.sampled_from(["bytes", "structure", "junk"]))
@examples(200)
def test_a_forged_entry_of_the_cache_with_a_right_digest_is_read_or_made_anew(
    tmp_path_factory: pytest.TempPathFactory, program: tuple[Any, Any, bytes], draws: Random, how: str
) -> None:
    graph, value, good = program
    forged = (
        draws.choice(JUNK)
        if how == "junk"
        else {"bytes": malformed.bytes_of, "structure": edited_json}[how](good, draws)
    )
    folder = tmp_path_factory.mktemp("cache")
    files = Files(folder, "content")
    with malformed.within(malformed.SECONDS), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        files.fetch("plan", lambda: value, lambda _: forged, lambda data: load(data, graph, (Program,)))
        found = files.fetch("plan", lambda: value, lambda _: good, lambda data: load(data, graph, (Program,)))
    assert found is not value or any(f"{folder}" in str(one.message) for one in told)
