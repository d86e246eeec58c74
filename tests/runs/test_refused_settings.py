"""Settings that cannot work are refused by the command line, with their values and the way out, before any training."""

import pytest

from tests.runs.command import DEADLINE_S

DISTILLED = "advantage.estimator=distillation loss.policy=importance_sampling reward.functions=[]"
SERVED = f"{DISTILLED} teacher.servers=[http://b:1] teacher.request_s=20"
STARTED = "sft.steps=3"
PAIRS = f"{STARTED} train.num_rollouts=0 reward.functions=[]"
JUDGED = "reward.functions=[reward_model]"
PLAYED, LATE = "reward.functions=[environment]", f"environment.deadline_s={DEADLINE_S:g}"
# overrides, and what must be said of them; POLICY stands for the folder of the policy's model
REFUSED = [
    ("train.num_rolouts=3", "train.num_rolouts", "nearest known key is train.num_rollouts"),
    ("train.stpes=3", "train.stpes", "nearest known key is train.num_rollouts"),
    ("megatron.transformer.recompute_granularty=full", "recompute_granularty", "recompute_granularity"),
    ("megatron.transformer.calculate_per_token_loss=false", "calculate_per_token_loss", "token-sum seam"),
    ("loss.kl_coefficient=0.1", "loss.kl_coefficient=0.1", "skip.mode=approximate", "skip.mode=off"),
    ("loss.entropy_coefficient=0.1", "loss.entropy_coefficient=0.1", "skip.mode=approximate"),
    ("model.hf_path=nowhere", "model.hf_path", "nowhere", "config.json"),
    ("data.train=nowhere.jsonl", "data.train", "nowhere.jsonl"),
    ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt=1", "at least 2"),
    ("rollout.max_response_tokens=60", "76", "64", "lower one"),
    ("parallel.pipeline=2", "world size 1", "parallel.pipeline=2"),
    ("reward.functions=[arithmatic]", "arithmatic", "arithmetic"),
    ("rollout.bitwise=true lora.rank=4", "rollout.bitwise=true does not hold with lora.rank=4"),
    ("rollout.bitwise=true rollout.speculation=history", "=history does not work with rollout.bitwise=true"),
    ("rollout.speculation=histroy", "rollout.speculation='histroy'", "history"),
    ("profile.steps=[1,1] profile.ranks=[1]", "profile.ranks=[1] names rank 1, and the policy has 1 ranks"),
    ("profile.steps=[1,1] profile.tool=nsys", "profile.tool=nsys marks ranges on a GPU", "profile.tool=torch"),
    ("eval.every_rollouts=2", "eval.every_rollouts=2", "eval.sets"),
    (PLAYED, "environment.name is null; name one"),
    (f"{PLAYED} environment.name=calculator {LATE}", f"{LATE} must be below run.deadline_s={DEADLINE_S:g}"),
    (DISTILLED, "advantage.estimator=distillation has no teacher"),
    (f"{DISTILLED} teacher.hf_path=nowhere", "teacher.hf_path='nowhere' holds no config.json"),
    (f"{DISTILLED} teacher.hf_path=a teacher.servers=[http://b:1]", "both name the teacher; give one"),
    ("advantage.estimator=grpo teacher.discount=0.5", "teacher.discount=0.5 and advantage.estimator=grpo has no"),
    (f"{SERVED} rollout.temperature=0.5", "give log-probs at temperature 1"),
    (f"{SERVED} replay.capacity_groups=4", "acts on groups without signal"),
    (f"{SERVED} teacher.servers=[b]", "which is no server's address"),
    (f"{PAIRS} preference.loss=dpo sft.steps=0", "preference.loss=dpo trains in supervised steps"),
    (f"{PAIRS} preference.loss=dop", "preference.loss='dop'"),
    (f"{PAIRS} preference.loss=simpo preference.beta=0", "preference.beta=0"),
    (f"{PAIRS} preference.loss=dpo rollout.temperature=0.7", "rollout.temperature=0.7 divides the logits"),
    (f"{PAIRS} preference.loss=dpo preference.chosen_key=best", "no column 'best' (preference.chosen_key)"),
    (f"{STARTED} preference.loss=bradley_terry train.num_rollouts=2", "and train.num_rollouts=2; set it to 0"),
    (f"{PAIRS} preference.loss=bradley_terry lora.rank=4", "and lora.rank=4; set it to null"),
    (JUDGED, "give both, or neither"),
    (f"{JUDGED} reward.model_path=nowhere", "reward.model_path='nowhere' holds no"),
    (f"{JUDGED} reward.model_path=POLICY", "is no reward model"),
    ("reward.functions=[reward_model,arithmetic] reward.model_path=POLICY reward.num_workers=1",
     "reward.in_process=[reward_model]"),
    ("reward.worker_environment=[NOPE]", "['NOPE'] is for workers, and reward.num_workers=0 starts none"),
    (f"{STARTED} sft.eval_share=0.999", "sft.eval_share=0.999 holds out 180 of 180 rows"),
    (f"{STARTED} sft.eval_path=none.jsonl", "sft.eval_path='none.jsonl' does not exist"),
    (f"{STARTED} sft.eval_every_steps=2", "nothing is held out"),
    (f"{STARTED} sft.eval_share=0.1 sft.eval_path=x.jsonl", "give one of them"),
    (f"{STARTED} sft.warmup_steps=3", "sft.warmup_steps=3 must be below sft.steps=3"),
    (f"{STARTED} sft.schedule=cosin", "sft.schedule='cosin'"),
    (f"{STARTED} sft.epochs=2", "sft.steps=3 and sft.epochs=2 both set the number of steps"),
    (f"{STARTED} data.messages_key=messages", "data.template='chat' and the tokenizer has no chat template"),
]
ARITHMETIC = "reward.functions=arithmetic"


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0].rpartition(" ")[2])
def test_bad_settings_are_named_with_their_value_and_the_way_out(made, arithmetic, case):
    overrides, *words = case
    folder = made.refused(words, *overrides.replace("POLICY", str(arithmetic / "model")).split())
    assert not any(path.read_text() for path in folder.glob("metrics.jsonl"))


@pytest.mark.parametrize(("name", "content", "overrides", "words"), [
    ("d.jsonl", '{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": "1+2="}\n', [], "row 1 (PATH:3) has no column"),
    ("d.csv", "prompt,answer\n1+1=,2\n1+2=,\n", [ARITHMETIC], "row 1 (PATH:3): column 'answer'"),
    ("d.csv", "prompt,gold\n1+1=,2\n", [ARITHMETIC], "its columns are 'prompt', 'gold'"),
    ("d.jsonl", "", [], "has no rows"),
    ("d.jsonl", '{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n', [], "PATH:2"),
    ("d.jsonl", '{"question": "1+1="}\n', [], "question"),
])
def test_a_row_that_cannot_be_trained_ends_the_start(made, tmp_path, name, content, overrides, words):
    path = tmp_path / name
    path.write_text(content)
    folder = made.refused([words.replace("PATH", str(path))], f"data.train={path}", *overrides)
    assert not (folder / "metrics.jsonl").exists()


def test_a_prompt_longer_than_allowed_is_named_or_dropped(made, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "%s=", "answer": "2"}\n' % ("1+" * 20))
    made.refused(["41", "16"], f"data.train={path}")
    made(1, f"data.train={path}", "data.on_long_prompt=drop")
