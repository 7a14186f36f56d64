"""Generation with a cache of keys and values: tokens of one device, two plans, and caches that stay split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import partway as pw
from partway.requests.request import engine_of
from partway.reuse.replanning import Signature

LENGTH, NEW = 6, 8
LONG = 64


def llama(**more: Any) -> nn.Module:
    """Grouped queries: two heads share keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
        vocab_size=64, max_position_embeddings=80, bos_token_id=0, eos_token_id=None, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=8, vocab_size=64, n_positions=80, bos_token_id=0, eos_token_id=None
    )
    return GPT2LMHeadModel(config).double().eval()


def mistral(window: int = 5) -> nn.Module:
    """A sliding window that is shorter than what is generated."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=64, max_position_embeddings=80, sliding_window=window, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return MistralForCausalLM(config).double().eval()


MODELS = {"llama": llama, "gpt2": gpt2, "mistral": mistral, "mistral, later": lambda: mistral(10)}
PLANS = {"mistral": 4, "mistral, later": 7}  # transformers counts tokens in a number: before, at and past the window


def signatures(model: nn.Module) -> tuple[Signature, ...]:
    engine = engine_of(model)
    assert engine is not None
    return tuple(engine._planned.signatures)


def generated(model: Any, sequences: int, sampled: bool, new: int = NEW) -> Any:
    """What `model` generates for prompts of unequal lengths, which are padded and masked."""
    torch.manual_seed(1)
    ids = torch.randint(1, 64, (sequences, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, : LENGTH // 2] = 0
    torch.manual_seed(2)
    with torch.inference_mode():
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=sampled, pad_token_id=0,
            cache_implementation="static", return_dict_in_generate=True,
        )  # fmt: skip


def check(name: str, mesh: dict[str, int], sequences: int, inference: bool, new: int = NEW) -> Any:
    model, plain = pw.shard(MODELS[name](), mesh=mesh, inference=inference), MODELS[name]()
    for sampled in (False, True, False):
        found, expected = (generated(one, sequences, sampled, new) for one in (model, plain))
        assert torch.equal(found.sequences, expected.sequences)
    engine = engine_of(model)
    assert engine is not None
    assert sum(len(courses) for each in engine._planned._by_signature.values() for courses in each) <= PLANS.get(
        name, 2
    )
    for layer, other in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        for one, two in ((layer.keys, other.keys), (layer.values, other.values)):
            given = one.full_tensor() if isinstance(one, DTensor) else one
            torch.testing.assert_close(given, two, rtol=1e-4, atol=1e-6)  # transformers' norms compute in float32
    return model, found.past_key_values


@pytest.mark.parametrize(
    ("name", "mesh", "sequences"),
    [
        ("llama", {"tp": 4}, 1),
        ("llama", {"dp": 2, "tp": 2}, 8),
        ("gpt2", {"tp": 8}, 8),
        ("gpt2", {"dp": 2, "tp": 2}, 1),
    ],
    ids=str,
)
def test_tokens_are_those_of_one_device(name: str, mesh: dict[str, int], sequences: int) -> None:
    check(name, mesh, sequences, inference=True)


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp": 2, "tp": 2}, {"tp": 8}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_long_texts_are_those_of_one_device(name: str, mesh: dict[str, int], sequences: int) -> None:
    check(name, mesh, sequences, inference=True, new=LONG)


@pytest.mark.parametrize("name", ["mistral", "mistral, later"])
def test_a_sliding_window_that_is_shorter_than_the_text(name: str) -> None:
    check(name, {"tp": 4}, 2, inference=True)


def test_a_model_that_may_train_generates_as_well() -> None:
    model, _ = check("llama", {"tp": 4}, 2, inference=False)
    ids = torch.arange(6)[None]
    plain = llama()
    for one in (model, plain):
        one(ids, labels=ids).loss.backward()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)


def test_it_is_planned_under_another_default_device() -> None:
    """Where PyTorch makes a tensor for itself while it decomposes a graph, the default device is not the person's."""
    with torch.device("meta"), torch.inference_mode():
        model = pw.shard(llama(use_cache=False), mesh={"tp": 4}, inference=True)
        model.infer_predict_layout(torch.ones(2, LENGTH, dtype=torch.long))
    assert model.plan.operators


def test_a_token_gathers_no_cache() -> None:
    model, _ = check("llama", {"tp": 4}, 2, inference=True)
    sizes = [each.wire_bytes for each in model.plan.collectives]
    cache = 2 * 8 * (LENGTH + NEW) * 4 * 8
    assert len(sizes) == 5  # two a layer, and the scores
    assert max(sizes) < cache / 4


def in_processes(devices: int) -> None:
    check("mistral, later", {"tp": devices}, 2, inference=True)
    _, cache = check("llama", {"tp": devices}, 2, inference=True)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            assert isinstance(tensor, DTensor)
            assert tensor.to_local().numel() * devices == tensor.numel()


@pytest.mark.gloo
@pytest.mark.parametrize("devices", [2, 4])
def test_in_processes_each_has_its_part_of_the_cache(on_ranks: Callable[..., Any], devices: int) -> None:
    on_ranks(devices, in_processes, devices)


def long_texts(name: str, sequences: int) -> None:
    check(name, {"tp": 4}, sequences, inference=True, new=LONG)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_long_texts_in_processes(on_ranks: Callable[..., Any], name: str, sequences: int) -> None:
    on_ranks(4, long_texts, name, sequences)


class Store:
    """A cache as people write them: an object with tensors."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.length = 0


class Reader(nn.Module):
    """Writes to a cache, returns it or a copy of it, and attends to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(8, 8).double()

    def forward(self, x: Tensor, store: Store, place: Tensor, copied: bool = False) -> tuple[Tensor, Store]:
        store.keys.index_copy_(1, place, self.project(x))
        if copied:
            store = Store(store.keys.clone())
        return (x @ store.keys.transpose(1, 2)).softmax(-1) @ store.keys, store


@pytest.mark.parametrize("copied", [False, True])
def test_a_cache_that_is_returned_is_the_callers(copied: bool) -> None:
    model, plain = pw.shard(Reader().eval(), mesh={"dp": 2}, inference=True), Reader().eval()
    stores = [Store(torch.zeros(2, 5, 8, dtype=torch.float64)) for _ in range(2)]
    first = [store.keys for store in stores]
    with torch.no_grad():
        for step in range(3):
            x, place = torch.full((2, 1, 8), step + 1.0, dtype=torch.float64), torch.tensor([step])
            results = [one(x, store, place, copied) for one, store in zip((model, plain), stores, strict=True)]
            torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-12, atol=0)
            for before, store, (_, after) in zip(first, stores, results, strict=True):
                assert store.keys is before
                assert (after.keys is store.keys) is not copied
                assert after.keys.data_ptr() != before.data_ptr() or not copied
            torch.testing.assert_close(first[0], first[1], rtol=1e-12, atol=0)


class Turns(nn.Module):
    """Writes to its arguments what lies in the memory of the same ones."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        before, part = x.clone(), y[0]
        first, second = x.clone(), y.clone()
        x.copy_(second)
        y.copy_(first)
        x.copy_(x.transpose(0, 1).clone())
        return before, first.t(), second, part, y.t()


def turned(devices: int) -> None:
    with torch.no_grad():
        model, plain = pw.shard(Turns().eval(), mesh={"dp": devices}, inference=True), Turns().eval()
        given = [[torch.arange(16.0).view(4, 4), torch.arange(16.0, 32.0).view(4, 4)] for _ in range(2)]
        for _ in range(3):
            found, expected = model(*given[0]), plain(*given[1])
            for one, two in zip((*found, *given[0]), (*expected, *given[1]), strict=True):
                assert torch.equal(one, two)


def test_what_is_returned_is_not_what_is_written_over() -> None:
    turned(2)


@pytest.mark.gloo
def test_in_processes_what_is_returned_is_not_what_is_written_over(on_ranks: Callable[..., Any]) -> None:
    on_ranks(2, turned, 2)
