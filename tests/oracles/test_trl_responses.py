"""TRL's own DPO, CPO (SimPO), reward and SFT trainers against one step of ours, from the rows of a file on."""

import json
import pathlib
from collections.abc import Callable

import pytest
import torch

from tests.oracles.response_gradients import response_gradient
from tests.pairwise import pairwise, quick
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
LAYOUTS = {"1 process": (1,), "DP2": (2,), "PP2": (2, "parallel.pipeline=2"), "TP2": (2, "parallel.tensor=2")}
DPO = {"dpo": "sigmoid", "hinge": "hinge", "ipo": "ipo"}  # TRL's loss_type by our name


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
    halves = zip(chats, [say(("assistant", f"wrong {i}")) for i in range(len(chats))], strict=True)
    write(folder / "chat_pairs.jsonl", [{"prompt": x[:-1], "chosen": x[-1:], "rejected": y} for x, y in halves])
    return folder


def write(path: pathlib.Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rows_of(path: pathlib.Path) -> datasets.Dataset:
    return datasets.Dataset.from_list([json.loads(line) for line in path.read_text().splitlines()])


def arguments(tmp_path: pathlib.Path, count: int) -> dict:
    off = dict(bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True)
    return dict(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=count, seed=0, **off)


def theirs(trainer) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradient of a trainer's first step, which takes all rows."""
    trainer.model.eval()  # nothing is dropped out of these models; of the metrics alone
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, dict(next(iter(trainer.get_train_dataloader()))))
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def policy(inputs: pathlib.Path, name: str = "policy"):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(inputs / name), AutoTokenizer.from_pretrained(inputs / name)


@pytest.fixture
def ours_equals(pool, inputs) -> Callable[..., None]:
    """Return a check of one step of ours, on a layout and the rows of a file, against a trainer's."""

    def check(trainer, layout: str, rows: str, *given: str, model=inputs / "policy", reference=None) -> None:
        (world, *degrees), wanted = LAYOUTS[layout], theirs(trainer)
        found = pool.run(world, response_gradient, model, inputs / rows, reference, *given, *degrees, timeout_s=90)
        assert found[0][0] == pytest.approx(wanted[0], rel=TOLERANCE)
        assert relative_error(found[0][1], wanted[1]) < TOLERANCE

    return check


@pytest.mark.parametrize("name, rows, layout", pairwise(DPO, ("pairs", "chat_pairs"), LAYOUTS, strength=1))
def test_dpo(ours_equals, inputs, tmp_path, name: str, rows: str, layout: str) -> None:
    """DPOTrainer's sigmoid, hinge and IPO: texts and chat messages, policy and reference of other weights."""
    model, tokenizer = policy(inputs)
    data = rows_of(inputs / f"{rows}.jsonl")
    args = trl.DPOConfig(loss_type=[DPO[name]], beta=0.3, **arguments(tmp_path, len(data)))
    given = dict(model=model, ref_model=policy(inputs, "reference")[0], args=args)
    trainer = trl.DPOTrainer(**given, train_dataset=data, processing_class=tokenizer)
    chat = ("data.template=chat",) if rows == "chat_pairs" else ()
    settings = (f"preference.loss={name}", "preference.beta=0.3", *chat)
    ours_equals(trainer, layout, f"{rows}.jsonl", *settings, reference=inputs / "reference")


@pytest.mark.parametrize("layout", quick(LAYOUTS, "PP2"))
def test_simpo(ours_equals, inputs, tmp_path, layout: str) -> None:
    """CPOTrainer's SimPO, without its likelihood term (``cpo_alpha``)."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    model, tokenizer = policy(inputs)
    data = rows_of(inputs / "pairs.jsonl")
    args = CPOConfig(loss_type="simpo", cpo_alpha=0.0, beta=2.0, simpo_gamma=0.5, **arguments(tmp_path, len(data)))
    trainer = CPOTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
    given = ("preference.loss=simpo", "preference.beta=2.0", "preference.margin=0.5")
    ours_equals(trainer, layout, "pairs.jsonl", *given)


@pytest.mark.parametrize("layout", quick(LAYOUTS, "TP2"))
def test_reward_model(ours_equals, inputs, tmp_path, layout: str) -> None:
    """RewardTrainer's loss over a sequence classifier of one label, whose head is read at the response's end."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(inputs / "judge")
    data = rows_of(inputs / "pairs.jsonl")
    args, tokenizer = trl.RewardConfig(**arguments(tmp_path, len(data))), policy(inputs)[1]
    trainer = trl.RewardTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
    ours_equals(trainer, layout, "pairs.jsonl", "preference.loss=bradley_terry", model=inputs / "judge")


ROWS = pairwise(("solutions", "chats"), LAYOUTS, kept=(("solutions", "DP2"), ("chats", "PP2")))


@pytest.mark.parametrize("rows, layout", ROWS)
def test_sft(ours_equals, inputs, tmp_path, rows: str, layout: str) -> None:
    """SFTTrainer's loss: on completions, and on the assistant's tokens of conversations of several turns."""
    model, tokenizer = policy(inputs)
    data = rows_of(inputs / f"{rows}.jsonl")
    chat = rows == "chats"
    if not chat:
        data = data.rename_column("solution", "completion")
    args = trl.SFTConfig(assistant_only_loss=chat, completion_only_loss=not chat, packing=False,
                         **arguments(tmp_path, len(data)))
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
    given = ("data.template=chat", "data.messages_key=messages") if chat else ()
    ours_equals(trainer, layout, f"{rows}.jsonl", *given)
