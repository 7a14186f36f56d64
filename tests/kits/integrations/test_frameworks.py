"""Trainer, Accelerator, peft and Lightning: a plain model's losses in one process, and under torchrun with 2 and 4."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow
for needed in ("accelerate", "lightning", "peft", "torchmetrics"):
    pytest.importorskip(needed)

HEAD = """
    import json, os, sys, warnings
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    import partway as pw

    mode, folder, *rest = sys.argv[1:]
    pw.set_auto_parallel_context(device_num=2)
    ranks = int(os.environ.get("WORLD_SIZE", "2"))
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=66, n_positions=16,
                        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, 66, (48, 8))

    def shard(model):
        if mode == "plain":
            return model
        return pw.shard(model, mesh={"dp": ranks}, in_strategy={"input_ids": ("dp", None), "labels": ("dp", None)})

    def tell(found):
        if int(os.environ.get("RANK", "0")) == 0:
            print("FOUND", json.dumps(found), flush=True)
"""
TRAINER = """
    import transformers
    from partway.integrations.transformers import Trainer as Sharded

    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=8, per_device_eval_batch_size=8, num_train_epochs=2,
        logging_steps=2, save_steps=4, report_to=[], use_cpu=True, learning_rate=1e-2, disable_tqdm=True,
        eval_strategy="epoch", seed=3, gradient_accumulation_steps=int(rest[1]) if rest[1:] else 1,
    )
    trainer = (transformers.Trainer if mode == "plain" else Sharded)(
        model=shard(model), args=arguments, train_dataset=data, eval_dataset=data[:16],
        compute_metrics=lambda p: {"right": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    trainer.train(resume_from_checkpoint=rest[0] if rest and rest[0] else None)
    keys = ("loss", "eval_loss", "eval_right", "learning_rate")
    tell([{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history[:-1]])
"""
ACCELERATOR = """
    import accelerate
    from partway.integrations.accelerate import Accelerator as Sharded

    accelerator = (accelerate.Accelerator if mode == "plain" else Sharded)(cpu=True)
    model = shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = torch.utils.data.DataLoader(ids, batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found = []
    for batch in loader:
        output = model(input_ids=batch, labels=batch)
        accelerator.backward(output.loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        right = (output.logits.argmax(-1) == batch).sum()
        right, total = accelerator.gather_for_metrics((right, torch.tensor(len(batch))))
        found.append([output.loss.item(), float(norm), int(right), int(total), scheduler.get_last_lr()[0]])
    tell(found)
"""
PEFT = """
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file
    from partway.integrations.peft import save_pretrained

    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    if rest[0] == "before":
        torch.manual_seed(1)
        model = shard(get_peft_model(model, lora))
    else:
        model = shard(model)
        if rest[0] == "after a call":
            model(input_ids=ids[:8], labels=ids[:8])
        torch.manual_seed(1)
        model = get_peft_model(model, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-1)
    found = []
    for i in range(3):
        loss = model(input_ids=ids[:8], labels=ids[:8]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    save_pretrained(model, folder)
    tell(found)
"""

LIGHTNING = """
    import lightning, torchmetrics

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = shard(model.double()), []
            self.right = torchmetrics.classification.MulticlassAccuracy(66, average="micro")
            self.sum = torchmetrics.SumMetric()

        def training_step(self, batch, index):
            output = self.net(input_ids=batch, labels=batch)
            self.right(output.logits.flatten(0, 1), batch.flatten())
            self.sum(output.loss)
            self.log("right", self.right, on_epoch=True)
            self.losses.append(output.loss.item())
            return output.loss

        def on_train_epoch_end(self):
            self.losses.append(float(self.sum.compute()))
            self.sum.reset()

        def validation_step(self, batch, index):
            self.log("val", self.net(input_ids=batch, labels=batch).loss)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    options = {}
    if mode != "plain":
        from partway.integrations.lightning import PartwayStrategy
        options["strategy"] = PartwayStrategy("cpu")
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=int(rest[1]) if rest else 2, accelerator="cpu", devices=1, default_root_dir=folder,
        enable_progress_bar=False, logger=False, enable_model_summary=False, gradient_clip_val=0.5,
        accumulate_grad_batches=2, **options,
    )
    batches = torch.utils.data.DataLoader(ids, 8, shuffle=True), torch.utils.data.DataLoader(ids[:16], 8)
    trainer.fit(module, *batches, ckpt_path=rest[0] if rest else None)
    tell([module.losses, float(trainer.callback_metrics["right_epoch"]), float(trainer.callback_metrics["val"])])
"""


def run(script: str, ranks: int, *arguments: str, folder: Path) -> Any:
    """What a script finds: plain (ranks 0), on virtual devices (1), or under torchrun."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(HEAD) + textwrap.dedent(script))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    mode = ("plain", "simulated")[ranks] if ranks < 2 else "ranks"
    output = folder / f"output {mode} {ranks}"
    command = [sys.executable, *launcher, str(path), mode, str(output), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PARTWAY_VERIFY": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0, done.stderr[-4000:]
    assert found, done.stdout + done.stderr[-4000:]
    return json.loads(found[0].removeprefix("FOUND "))


def assert_close(found: Any, expected: Any, absolute: float = 1e-6) -> None:
    """Equal, as far as sums in float32 in another order are, and steps of Adam that divide by small ones."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=absolute)


def test_trainer(tmp_path: Path) -> None:
    expected = run(TRAINER, 0, folder=tmp_path)
    for ranks in (1, 2, 4):
        assert_close(run(TRAINER, ranks, folder=tmp_path), expected)
    for before, ranks in ((4, 2), (2, 1), (1, 2)):  # goes on from a checkpoint of another number of processes
        mode = "ranks" if before > 1 else "simulated"
        kept = str(tmp_path / f"output {mode} {before}" / "checkpoint-8")
        assert_close(run(TRAINER, ranks, kept, folder=tmp_path)[-4:], expected[-4:])


def test_trainer_accumulates_gradients(tmp_path: Path) -> None:
    expected = run(TRAINER, 0, "", "2", folder=tmp_path)
    for ranks in (1, 2):
        assert_close(run(TRAINER, ranks, "", "2", folder=tmp_path), expected)


def test_accelerator(tmp_path: Path) -> None:
    expected = run(ACCELERATOR, 0, folder=tmp_path)
    for ranks in (1, 2, 4):
        assert_close(run(ACCELERATOR, ranks, folder=tmp_path), expected)


@pytest.mark.timeout(900)  # nine runs
def test_lightning(tmp_path: Path) -> None:
    expected = run(LIGHTNING, 0, folder=tmp_path)
    for ranks in (1, 2, 4):
        assert_close(run(LIGHTNING, ranks, folder=tmp_path), expected)
    runs = {ranks: f"output {mode} {ranks}" for ranks, mode in enumerate(("plain", "simulated", "ranks"))}
    kept = {ranks: str(*(tmp_path / folder).rglob("*.ckpt")) for ranks, folder in runs.items()}
    names = [torch.load(path, weights_only=True)["state_dict"].keys() for path in kept.values()]
    assert names[0] == names[1] == names[2]
    expected = run(LIGHTNING, 0, kept[0], "3", folder=tmp_path)
    for before, ranks in ((2, 2), (2, 1), (1, 2), (2, 0)):  # goes on from a checkpoint of another number of processes
        assert_close(run(LIGHTNING, ranks, kept[before], "3", folder=tmp_path), expected)


@pytest.mark.parametrize("order", ["before", "after", "after a call"])
def test_peft(order: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    expected = run(PEFT, 0, order, folder=tmp_path)
    adapter = load_file(tmp_path / "output plain 0" / "adapter_model.safetensors")
    for ranks in (1, 2, 4):
        assert_close(run(PEFT, ranks, order, folder=tmp_path), expected)
        mode = "ranks" if ranks > 1 else "simulated"
        assert_close(load_file(tmp_path / f"output {mode} {ranks}" / "adapter_model.safetensors"), adapter, 1e-4)
