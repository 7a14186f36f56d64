"""Random programs are right or refused, and minimized programs that once failed stay right."""

import fuzz
import pytest
import torch

FEW, MANY = 12, 1000


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def failures_of(seeds):
    """The wrong programs, minimized, and the number of right ones."""
    tally = fuzz.Tally()
    for seed, program, outcome in fuzz.run(seeds):
        tally.add(seed, program, outcome)
    smaller = [(seed, *fuzz.shrunk(program, outcome)) for seed, program, outcome in tally.failures[:3]]
    said = [f"seed {seed}: {outcome}\n{program.as_test()}" for seed, program, outcome in smaller]
    return "\n".join(said), tally.counts["right"]


def test_random_programs_are_right_or_refused():
    failures, right = failures_of(range(FEW))
    assert not failures, failures
    assert right > FEW / 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_programs_are_right_or_refused():
    failures, right = failures_of(range(1000, 1000 + MANY))
    assert not failures, failures
    assert right > MANY / 2


def test_a_seed_always_gives_the_same_program_and_it_prints_as_python():
    program = fuzz.generate(11)
    assert program == fuzz.generate(11)
    assert "class Model(nn.Module):" in program.as_test()
    compile(program.as_test(), "<test>", "exec")


def test_a_wrong_number_is_found_and_minimised(monkeypatch):
    def wrong(build, arguments, setting):
        found = fuzz.on_one_device(build, arguments, setting)
        if any("tanh" in line.text for line in latest[-1].lines):
            found["step 0, output 0"] = found["step 0, output 0"] + 1e-3
        return found

    latest, checked = [], fuzz.checked
    monkeypatch.setattr(fuzz, "split", wrong)
    monkeypatch.setattr(fuzz, "checked", lambda program: latest.append(program) or checked(program))
    line = fuzz.Line
    program = fuzz.Program(
        (fuzz.Argument("x0", "T((8, 12), 1).t()", True), fuzz.Argument("x1", "T((12, 8), 2)", True)),
        (("p0", "P((12,), 3)"),),
        (line(("v0",), "v0 = x0.t() * 2"), line(("v1",), "v1 = v0.tanh() + self.p0"), line(("v2",), "v2 = x1 + 1")),
        ("v1", "v2"),
        fuzz.Setting({"a": 4, "b": 2}, steps=2, optimizer="sgd", options={"reshard_after_forward": True}),
    )
    outcome = fuzz.checked(program)
    assert (outcome.kind, outcome.reason[:6]) == ("wrong", "step 0")
    smaller, outcome = fuzz.shrunk(program, outcome)
    assert outcome.kind == "wrong"
    assert [line.text for line in smaller.lines] == ["v1 = x0.tanh() + self.p0"] or len(smaller.lines) == 1
    assert smaller.outputs == ("v1",)
    assert str(smaller.setting) == "mesh={'b': 2}"
