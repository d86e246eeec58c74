"""Runs TRL's side of update.py: GRPOTrainer's own training step on given samples, padded as a setting says.

TRL's own code runs ``training_step`` (its loss, accelerate's backward), accelerate's clipping, the optimizer and the
scheduler that the trainer makes. Ours are the missing rollout (``_prepare_inputs`` hands the micro-batch on) and the
padding of the two layouts that TRL lacks. The padded tensors are made outside the timing, as TRL makes them with the
rollout.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.types import Sample

INSTALL = "pip install -c constraints.txt -e '.[benchmark]'"
LAYOUTS = ("batch", "trimmed", "sorted")
"""``batch``: prompts and completions padded to the longest of the whole batch, as GRPOTrainer pads before it splits.
``trimmed``: padded to the longest of the micro-batch. ``sorted``: the same, the samples in order of length. TRL has the
first alone; the others favour it."""


class TrlMissing(RuntimeError):
    """Says that trl, or something it imports, is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlSetting:
    """Holds one setting of TRL's trainer.

    samples: per_device_train_batch_size; gradients accumulate over the batch.
    checkpointing: gradient_checkpointing.
    compiled: torch.compile over the decoder, with dynamic shapes; it compiles in the comparison, before anything is
        timed.
    """

    samples: int
    layout: str
    checkpointing: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        return (
            f"TRL {self.samples} samples, {self.layout}"
            + (", checkpointing" if self.checkpointing else "")
            + (", compiled" if self.compiled else "")
        )

    @property
    def as_shipped(self) -> bool:
        return self.layout == "batch"


def trl_settings(sizes: Sequence[int], *, compiled: bool = False) -> list[TrlSetting]:
    """Return every size in every layout without recomputation, and GRPOConfig's default for the record.

    That default is 8 samples with recomputation.
    compiled: every size once more under torch.compile, as it ships and sorted.

    Example: sizes 4, 8, 16 → ten settings, of which four are TRL as it ships. Without 8 among the sizes the first
    replaces it.
    """
    settings = [TrlSetting(samples=size, layout=layout) for layout in LAYOUTS for size in sizes]
    settings.append(TrlSetting(samples=8 if 8 in sizes else sizes[0], layout="batch", checkpointing=True))
    layouts = ("batch", "sorted") if compiled else ()
    return settings + [TrlSetting(samples=size, layout=layout, compiled=True) for layout in layouts for size in sizes]


def pad_rows(rows: Sequence[np.ndarray], *, left: bool, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask, both int64 [rows, width]; pads are id 0, mask 0.

    Example: [[7, 8], [9]], left, width 3 → ids [[0, 7, 8], [0, 0, 9]], mask [[0, 1, 1], [0, 0, 1]].
    """
    longest = max(len(row) for row in rows)
    if longest > width:
        raise ValueError(f"a row of {longest} tokens does not fit a width of {width}; pad to the longest row at least")
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, columns] = torch.from_numpy(np.asarray(row, dtype=np.int64))
        mask[i, columns] = 1
    return ids, mask


def make_microbatches(
    samples: Sequence[Sample], advantages: np.ndarray, setting: TrlSetting
) -> list[dict[str, torch.Tensor]]:
    """Return the batch as GRPOTrainer's ``_compute_loss`` takes it: one dict for each micro-batch.

    Every sample is in one of them. ``num_items_in_batch`` counts the whole batch's response tokens in every dict: the
    ``dapo`` loss divides by it. No ``old_per_token_logps``: with one optimizer step per batch TRL takes the current
    ones, and so does megatron_rl.
    """
    order = np.arange(len(samples))
    if setting.layout == "sorted":
        order = np.argsort([len(x.token_ids) for x in samples], kind="stable")
    prompts = [samples[i].token_ids[: samples[i].prompt_tokens] for i in order]
    responses = [samples[i].token_ids[samples[i].prompt_tokens :] for i in order]
    items = torch.tensor(sum(len(x) for x in responses))
    microbatches = []
    for start in range(0, len(order), setting.samples):
        part = slice(start, start + setting.samples)
        padded_with = slice(None) if setting.layout == "batch" else part
        prompt_ids, prompt_mask = pad_rows(prompts[part], left=True, width=max(map(len, prompts[padded_with])))
        completion_ids, completion_mask = pad_rows(
            responses[part], left=False, width=max(map(len, responses[padded_with]))
        )
        microbatches.append(
            {
                "prompt_ids": prompt_ids,
                "prompt_mask": prompt_mask,
                "completion_ids": completion_ids,
                "completion_mask": completion_mask,
                "num_items_in_batch": items,
                "advantages": torch.from_numpy(advantages[order[part]]).float(),
            }
        )
    return microbatches


def padded_tokens(microbatches: Sequence[dict[str, torch.Tensor]]) -> int:
    """Count the positions that go through the model, pads included."""
    return sum(x["prompt_ids"].numel() + x["completion_ids"].numel() for x in microbatches)


def load_trl():
    """Import the module trl with its GRPOTrainer; raises TrlMissing with the command that installs it."""
    try:
        import trl
        from trl import GRPOConfig, GRPOTrainer  # noqa: F401  (trl imports lazily: its own imports fail here)
    except (ImportError, RuntimeError) as error:
        raise TrlMissing(f"trl cannot be imported ({error}); install it with: {INSTALL}") from error
    return trl


def versions() -> dict[str, str]:
    """Return the versions of the packages that take part, trl's first."""
    return {
        name: importlib.metadata.version(name)
        for name in ("trl", "transformers", "accelerate", "megatron-core", "torch")
    }


def make_tokenizer():
    """Make the tokenizer that GRPOTrainer asks for; the update never uses it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


class TrlUpdate:
    """Holds one model under one GRPOTrainer in float32 on the CPU; settings change from call to call."""

    def __init__(self, model, *, num_samples: int, group_size: int, lr: float, seed: int):
        trl = load_trl()
        from datasets import Dataset

        class GivenSamples(trl.GRPOTrainer):
            """Takes the given micro-batches instead of generating any."""

            def _prepare_inputs(self, inputs):
                return inputs

        self._folder = tempfile.TemporaryDirectory(prefix="benchmark_update_")
        config = trl.GRPOConfig(
            output_dir=self._folder.name,
            per_device_train_batch_size=group_size,
            gradient_accumulation_steps=num_samples // group_size,
            num_generations=group_size,
            loss_type="dapo",
            beta=0.0,
            epsilon=0.2,
            temperature=1.0,
            learning_rate=lr,
            seed=seed,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        self.trainer = GivenSamples(
            model=model,
            args=config,
            reward_funcs=lambda **columns: [0.0],
            processing_class=make_tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": ["a"] * num_samples}),
        )
        self.trainer.create_optimizer_and_scheduler(num_training_steps=10_000)
        self.model, self.optimizer = self.trainer.accelerator.prepare(model, self.trainer.optimizer)
        self.scheduler = self.trainer.lr_scheduler
        self._eager = self.model.base_model.forward
        self._compiled = torch.compile(self._eager, dynamic=True)  # lazy: costs nothing if no setting asks for it
        self.samples_forwarded = 0
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, positional, named) -> None:
        self.samples_forwarded += len(named["input_ids"])

    def accumulate(self, microbatches: Sequence[dict[str, torch.Tensor]], setting: TrlSetting) -> None:
        """Add the batch's gradient, by TRL's training_step on each micro-batch."""
        self.trainer.args.per_device_train_batch_size = setting.samples
        self.trainer.args.gradient_accumulation_steps = self.trainer.args.steps_per_generation = len(microbatches)
        # Normally set by the training loop, which calls this method's steps.
        self.trainer.current_gradient_accumulation_steps = len(microbatches)
        if setting.checkpointing != self.model.is_gradient_checkpointing:
            (
                self.model.gradient_checkpointing_enable
                if setting.checkpointing
                else self.model.gradient_checkpointing_disable
            )()
        self.model.base_model.forward = self._compiled if setting.compiled else self._eager
        for microbatch in microbatches:
            self.trainer.training_step(self.model, microbatch, num_items_in_batch=None)

    def gradient(self, microbatches: Sequence[dict[str, torch.Tensor]], setting: TrlSetting) -> dict[str, torch.Tensor]:
        """Return the batch's gradient by Hugging Face name, a tied head once; no gradient stays behind."""
        self.model.zero_grad()
        self.accumulate(microbatches, setting)
        gradient = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        self.model.zero_grad()
        return gradient

    def update(self, microbatches: Sequence[dict[str, torch.Tensor]], setting: TrlSetting) -> None:
        """Take one optimizer step as Trainer's loop does.

        It runs training steps, clipping, AdamW and schedule, and sets gradients to None.
        """
        self.accumulate(microbatches, setting)
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), self.trainer.args.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.model.zero_grad()

    def close(self) -> None:
        self._folder.cleanup()
