"""Mixtures of experts of Hugging Face, unchanged, with the batch annotated: the numbers of one device."""

import copy
import math

import pytest
import torch

import partway as pw

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 4,
    "num_experts_per_tok": 2,
}
GROUPS = {"n_routed_experts": 8, "moe_intermediate_size": 12, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
OF = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 12},
    "Olmoe": {"num_experts": 4},
    "DeepseekV3": {**GROUPS, **LATENT, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
    "GptOss": {"num_local_experts": 4, "sliding_window": 8},
    "Glm4Moe": {**GROUPS, "n_group": 1, "topk_group": 1},
}


def model_of(name, implementation):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON | OF[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    for module in model.modules():  # on the CPU, PyTorch's product of groups takes no float64
        if hasattr(module, "config"):
            module.config._experts_implementation = implementation
    return model


def loss_and_gradients(call, model, ids):
    model.zero_grad()
    loss = call(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def check(name, implementation, mesh):
    plain, ids = model_of(name, "batched_mm"), torch.randint(0, 32, (4, 8))
    expected, gradients = loss_and_gradients(plain, plain, ids)
    model = copy.deepcopy(plain)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = implementation
    sharded = pw.shard(model, ((math.prod(mesh.values()), 1),), mesh=mesh)
    loss, found = loss_and_gradients(sharded, model, ids)
    text = str(sharded.plan)
    assert "experts dispatch" in text
    assert "experts combine" in text
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)  # routers compute in float32
    for parameter in [name for name, gradient in gradients.items() if gradient is not None]:
        difference = (found[parameter] - gradients[parameter]).abs().max()
        assert difference <= 1e-5 * gradients[parameter].abs().max() + 1e-9, parameter


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_mixtral_is_dispatched_and_combined(implementation):
    check("Mixtral", implementation, {"dp": 4})


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("name", OF)
def test_six_mixtures_train_as_on_one_device(name, implementation, mesh):
    check(name, implementation, mesh)


def on_processes(name):
    check(name, "grouped_mm", {"dp": 2, "ep": 2})


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("name", OF)
def test_six_mixtures_train_on_four_processes_as_on_one_device(on_ranks, name):
    on_ranks(4, on_processes, name)


def generated(name, ranks):
    """The tokens that a mixture adds to four prompts, with its cache of keys and values."""
    plain, ids = model_of(name, "batched_mm"), torch.randint(1, 32, (4, 5))
    model = copy.deepcopy(plain)
    pw.shard(model, ((ranks, 1),), mesh={"dp": ranks})
    with torch.no_grad():
        found, expected = (
            each.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0) for each in (model, plain)
        )
    assert torch.equal(found, expected)


def test_mixtral_generates_with_its_cache():
    generated("Mixtral", 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF)
def test_six_mixtures_generate_with_their_caches(name):
    generated(name, 2)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3"])
def test_mixtures_generate_on_processes(on_ranks, name):
    on_ranks(2, generated, name, 2)


def saved_and_read(folder, name):
    """A model that was saved, whose experts are files of their own, is read before it is split."""
    model_of(name, "batched_mm").save_pretrained(folder) if pw.get_rank() == 0 else None
