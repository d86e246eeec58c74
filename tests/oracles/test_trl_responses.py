"""TRL's own DPO, CPO (SimPO), reward and SFT trainers against one step of ours, from the rows of a file on.

Both sides read the same JSONL: TRL tokenizes it by its own way and runs its own ``compute_loss`` and backward over a
Hugging Face model; ours takes the run's own stages, over one process and over two, and weights are equal at first.
"""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from tests.oracles.response_gradients import response_gradient
from tests.reference import relative_error
from tests.unit.data.templates import tokenizer_of

trl = pytest.importorskip("trl", reason="TRL is not installed; `make test-oracles` installs it")
datasets = pytest.importorskip("datasets", reason="TRL reads its rows from datasets")

# ChatML whose turns are parted by a line end, where the usual one ends every turn by it: TRL trains that last token of
# a conversation too, and ours ends with the token that ends the turn.
TEMPLATE = (
    "{% for m in messages %}{% if not loop.first %}\n{% endif %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}"
)
TOLERANCE = 1e-5  # float32, another order of summation: 2e-6 was seen
PP2, TP2 = ("parallel.pipeline=2",), ("parallel.tensor=2",)
LAYOUTS = [(1, ()), (2, ()), (2, PP2), (2, TP2)]
IDS = ["1 process", "DP2", "PP2", "TP2"]
# by our name: TRL's loss_type, and the settings of both
DPO = {
    "dpo": ("sigmoid", {"beta": 0.3}, ("preference.beta=0.3",)),
    "hinge": ("hinge", {"beta": 0.3}, ("preference.beta=0.3",)),
    "ipo": ("ipo", {"beta": 0.3}, ("preference.beta=0.3",)),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> pathlib.Path:
    """Return a folder with tokenizer, rows, a policy, a reference and a reward model, with logits far from uniform."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from tests.reference import tiny_config

    folder = tmp_path_factory.mktemp("responses")
    tokenizer = tokenizer_of(TEMPLATE)
    config = tiny_config("qwen2_tied", vocab_size=len(tokenizer))
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    for seed, name in enumerate(("policy", "reference", "judge")):
        torch.manual_seed(seed)
        if name == "judge":
            config.num_labels = 1
        kind = AutoModelForSequenceClassification if name == "judge" else AutoModelForCausalLM
        model = kind.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(3.0)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    texts = ["no", "perhaps", "yes, of course", "42", "nobody knows", "a b c"]
    pairs = [{"prompt": f"{i}?", "chosen": texts[i], "rejected": texts[i + 1]} for i in range(len(texts) - 1)]
    write(folder / "pairs.jsonl", pairs)
    write(folder / "solutions.jsonl", [{"prompt": f"{i}?", "solution": x} for i, x in enumerate(texts)])
    say = lambda *turns: [{"role": role, "content": text} for role, text in turns]  # noqa: E731
    chats = [
        say(("user", "hi"), ("assistant", "hello")),
        say(("system", "be brief"), ("user", "1+1"), ("assistant", "2"), ("user", "+1"), ("assistant", "it is 3")),
        say(("user", "go"), ("assistant", "call"), ("tool", "7"), ("user", "and?"), ("assistant", "seven")),
    ]
    write(folder / "chats.jsonl", [{"messages": chat} for chat in chats])
    chat_pairs = [
        {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": say(("assistant", f"wrong {i}"))}
        for i, chat in enumerate(chats)
    ]
    write(folder / "chat_pairs.jsonl", chat_pairs)
    return folder


def write(path: pathlib.Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rows_of(path: pathlib.Path) -> datasets.Dataset:
    return datasets.Dataset.from_list([json.loads(line) for line in path.read_text().splitlines()])


def arguments(tmp_path: pathlib.Path, count: int) -> dict:
    return dict(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=count,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )


def theirs(trainer) -> tuple[float, dict[str, torch.Tensor], dict]:
    """Return loss, gradient and batch of a trainer's first step, which takes all rows."""
    trainer.model.eval()  # nothing is dropped out of these models; of the metrics alone
    trainer.model.zero_grad()
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    gradient = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.item(), gradient, batch


def policy(inputs: pathlib.Path, name: str = "policy"):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(inputs / name)
    return model, AutoTokenizer.from_pretrained(inputs / name)


def assert_equal(found: tuple[float, dict], wanted: tuple[float, dict]) -> None:
    loss, gradient = found
    assert loss == pytest.approx(wanted[0], rel=TOLERANCE)
    assert relative_error(gradient, wanted[1]) < TOLERANCE


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=IDS)
@pytest.mark.parametrize("rows", ["pairs", "chat_pairs"])
@pytest.mark.parametrize("name", DPO)
def test_dpo(pool, inputs, tmp_path, name: str, rows: str, world: int, layout: tuple[str, ...]) -> None:
    """DPOTrainer's sigmoid, hinge and IPO: texts and chat messages, policy and reference of other weights."""
    loss_type, settings, given = DPO[name]
    model, tokenizer = policy(inputs)
    data = rows_of(inputs / f"{rows}.jsonl")
    args = trl.DPOConfig(loss_type=[loss_type], **settings, **arguments(tmp_path, len(data)))
    reference, _ = policy(inputs, "reference")
    trainer = trl.DPOTrainer(
        model=model, ref_model=reference, args=args, train_dataset=data, processing_class=tokenizer
    )
    loss, gradient, _ = theirs(trainer)
    chat = ("data.template=chat",) if rows == "chat_pairs" else ()
    ours = pool.run(
        world,
        response_gradient,
        inputs / "policy",
        inputs / f"{rows}.jsonl",
        inputs / "reference",
        f"preference.loss={name}",
        *(given + chat + layout),
        timeout_s=90,
    )
    assert_equal(ours[0], (loss, gradient))


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=IDS)
def test_simpo(pool, inputs, tmp_path, world: int, layout: tuple[str, ...]) -> None:
    """CPOTrainer's SimPO, without its likelihood term (``cpo_alpha``)."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    model, tokenizer = policy(inputs)
    data = rows_of(inputs / "pairs.jsonl")
    args = CPOConfig(loss_type="simpo", cpo_alpha=0.0, beta=2.0, simpo_gamma=0.5, **arguments(tmp_path, len(data)))
    trainer = CPOTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
    loss, gradient, _ = theirs(trainer)
    given = ("preference.loss=simpo", "preference.beta=2.0", "preference.margin=0.5", *layout)
    ours = pool.run(world, response_gradient, inputs / "policy", inputs / "pairs.jsonl", None, *given, timeout_s=90)
    assert_equal(ours[0], (loss, gradient))


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=IDS)
def test_reward_model(pool, inputs, tmp_path, world: int, layout: tuple[str, ...]) -> None:
    """RewardTrainer's loss over a sequence classifier of one label, whose head is read at the response's end."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(inputs / "judge")
    data = rows_of(inputs / "pairs.jsonl")
    trainer = trl.RewardTrainer(
        model=model,
        args=trl.RewardConfig(**arguments(tmp_path, len(data))),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(inputs / "judge"),
    )
    loss, gradient, _ = theirs(trainer)
    given = ("preference.loss=bradley_terry", *layout)
    ours = pool.run(world, response_gradient, inputs / "judge", inputs / "pairs.jsonl", None, *given, timeout_s=90)
    assert_equal(ours[0], (loss, gradient))


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=IDS)
@pytest.mark.parametrize("rows", ["solutions", "chats"])
def test_sft(pool, inputs, tmp_path, rows: str, world: int, layout: tuple[str, ...]) -> None:
    """SFTTrainer's loss: on completions, and on the assistant's tokens of conversations of several turns."""
    model, tokenizer = policy(inputs)
    data = rows_of(inputs / f"{rows}.jsonl")
    chat = rows == "chats"
    if not chat:
        data = data.rename_column("solution", "completion")
    args = trl.SFTConfig(
        assistant_only_loss=chat, completion_only_loss=not chat, packing=False, **arguments(tmp_path, len(data))
    )
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
    loss, gradient, _ = theirs(trainer)
    given = ("data.template=chat", "data.messages_key=messages") if chat else ()
    ours = pool.run(
        world, response_gradient, inputs / "policy", inputs / f"{rows}.jsonl", None, *given, *layout, timeout_s=90
    )
    assert_equal(ours[0], (loss, gradient))


def test_tokens_and_masks_of_conversations_are_trls(inputs, tmp_path) -> None:
    """Each conversation's tokens, and those that carry the loss, are those that SFTTrainer makes by the template."""
    from megatron_rl.config import DataConfig
    from megatron_rl.data.prompt_dataset import PromptDataset

    model, tokenizer = policy(inputs)
    data = rows_of(inputs / "chats.jsonl")
    args = trl.SFTConfig(assistant_only_loss=True, **arguments(tmp_path, len(data)))
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
    config = DataConfig(template="chat", messages_key="messages", shuffle=False)
    solutions = PromptDataset(list(data), tokenizer, config, 0).next_solutions(len(data))
    for ours, row in zip(solutions, trainer.train_dataset, strict=True):
        assert [*ours.prompt.token_ids, *ours.response_ids] == row["input_ids"]
        assert [False] * len(ours.prompt.token_ids) + list(ours.loss_mask) == [label != -100 for label in row["labels"]]
