"""Every tool says how to call it, with an example, and refuses by exit code 2 what it does not know or cannot do."""

import contextlib
import importlib
import io
import json
import os
import pathlib
import shlex
import sys

import pytest
from gpu_report_steps.parts import STEPS

from megatron_rl.commands import check_own_parts
from megatron_rl.commands.command import VERBS
from tests.tools import TOOLS
from tests.workers.nursery import HANG_S, Nursery, patient, run_program

OURS = ("convert", "verify", "simulate", "check", "serve-vllm")
COMMANDS = {VERBS[name].module: f"megatron-rl {name}" for name in OURS}
CALLED = {str(path): path.stem for path in sorted(TOOLS.rglob("*.py")) if "__main__" in path.read_text()} | COMMANDS
UNKNOWN = "--no-such-option"


def call_all(out: str, *programs: str) -> None:
    """Call each file or module with --help and an unknown option, in one process; write [exit code, text] of each call.

    What a file imports from tools/ is forgotten before the next: two folders hold modules of one name.
    """
    found, search = {}, sys.path[:]
    for program in programs:
        for option in ("--help", UNKNOWN):
            sys.argv[1:] = [option]
            with io.StringIO() as printed, contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                try:
                    run_program(program)
                    code = 0
                except SystemExit as ended:
                    code = ended.code
                found[f"{program} {option}"] = [code, printed.getvalue()]
            sys.path[:] = search
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", None)).startswith(str(TOOLS)):
                    del sys.modules[name]
    pathlib.Path(out).write_text(json.dumps(found))


@pytest.fixture(scope="module")
def answers(nursery: Nursery, tmp_path_factory) -> dict[str, tuple[int, str]]:
    """Return the exit code and the text of each tool's calls, by its program and the option."""
    folder = tmp_path_factory.mktemp("answers")
    given = [str(folder / "found.json"), *CALLED]
    fork = nursery.start("tests.tools.test_tools_help:call_all", given, printed=folder / "printed")
    try:
        assert fork.wait(patient(5 * HANG_S)) == 0, (folder / "printed").read_text()
    finally:
        fork.kill()
    return json.loads((folder / "found.json").read_text())


def test_every_help_has_an_example_and_an_unknown_option_ends_with_2(answers) -> None:
    helps = {tool: answers[f"{tool} --help"] for tool in CALLED}
    wrong = {x: y for x, y in helps.items() if y[0] != 0 or "example" not in y[1].lower() or CALLED[x] not in y[1]}
    assert len(helps) > 30 and not wrong
    ends = {tool: answers[f"{tool} {UNKNOWN}"] for tool in CALLED}
    assert not {x: y for x, y in ends.items() if y[0] != 2 or (UNKNOWN not in y[1] and "required" not in y[1])}


def test_every_option_of_the_gpu_reports_steps_is_known_to_its_script(answers) -> None:
    wrong, met = [], set()
    for words in (shlex.split(command) for step in STEPS for command in (step.command, step.cpu) if ".py" in command):
        place = next(i for i, word in enumerate(words) if word.endswith(".py"))
        script = words[place].format(tools=TOOLS)
        met.add(script)
        wrong += [(script, x) for x in words[place:] if x.startswith("--") and x not in answers[f"{script} --help"][1]]
    assert len(met) > 10 and not wrong


# A tool, its arguments, and what its refusal says.
REFUSED = f"""
acceptance | --jobs 0 | --jobs 0 must be at least 1
acceptance | --only none | --only none names no cell
gpu_report | --only 'no such step' | names no step
gpu_report | --minutes 0 | --minutes 0 must be above 0
gpu_report | --wheels {os.devnull} | holds none of base
logprob | --tokens 0 | --tokens [0]
logprob | --kernel triton | --kernel triton needs a GPU
policies | --dp 2 | --dp 2 is 2 and 1 processes
policies | --max-tokens-per-microbatch 64 128 64 | [64, 128, 64] must name at least 3
policies | --groups 10 --mini-batches 4 | --groups 10 must be a multiple of --mini-batches 4
policies | --dead-share 1.5 | --dead-share [1.5]
policies | --repeats 0 | --repeats 0 must be at least 1
reward_pool | --samples 0 | --samples 0 must be at least 1
reward_pool | --group-size 0 | --group-size 0
reward_pool | --deadline 0 | --deadline 0.0 must be above 0
reward_pool | --hanging 0.6 --killing 0.5 | all together at most 1
reward_pool | --raising -0.1 | at least 0
reward_pool | --data /nowhere | --data /nowhere has no test.jsonl
shared_prompts | --ratio 4/1 | --ratio 4/1 is not of the form PROMPT:RESPONSE
shared_prompts | --groups 2 | --dead-share 0.75 of --groups 2 leaves no group with signal
skip | --dp 3 | --tp 1 x --pp 1 x --dp 3 is 3 and 1 processes were started
update | --trl-samples 4 8 8 | at least three
update | --groups 5 --trl-samples 2 4 8 | --trl-samples 8 must divide the batch's 20 samples
update | --dead-share 1.0 | --dead-share 1.0 leaves no signal in 40 groups
update | --groups 4 --dead-share 0.9 | --dead-share 0.9 leaves no signal in 4 groups
update | --dead-share -0.1 | --dead-share -0.1
update | --hidden 100 | --hidden 100 must be a multiple of 64
update | --group-size 1 | --group-size 1 must be at least 2
update | --max-tokens-per-microbatch 4 | --max-tokens-per-microbatch 4
update | --threads 0 | --threads 0 must be at least 1
update | --repeats 0 | --repeats 0 must be at least 1
megatron_rl.commands.verify.command | --inject-layer 1 | --inject-layer 1 belongs to --inject tp_all_reduce
megatron_rl.commands.verify.command | --layers-per-stage 0 | --layers-per-stage 0 must be at least 1
megatron_rl.commands.verify.command | --tolerance 0 | --tolerance 0.0 must be above 0
megatron_rl.commands.verify.command | --inject gremlin | invalid choice
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_arguments_that_cannot_work_are_refused_by_name(line: str, capsys, monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    tool, given, said = line.split(" | ")
    module = importlib.import_module(tool)
    if tool == "logprob" and "triton" in given and module.device_type() == "cuda":
        pytest.skip("this host has a GPU")
    with pytest.raises(SystemExit) as ended:
        module.parse(shlex.split(given))
    assert ended.value.code == 2 and said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("arguments", "code", "said"), [
    ("--loss tests.own_parts:clipped --arguments low=0.1", 0, "equal: the loss stops no gradient"),
    ("--loss tests.own_parts:quadratic", 1, "FAILS  a zero advantage"),
    ("--loss tests.own_parts:quadratic", 1, "skip.mode=exact refuses it"),
    ("--loss tests.own_parts:mean", 1, "FAILS  one finite loss per token"),
    ("--loss tests.own_parts:none", 2, "has no 'none'"),
    ("--estimator tests.own_parts:centred", 0, "holds  the order of the samples"),
    ("--estimator tests.own_parts:by_batch", 1, "all rewards of its group are equal"),
    ("--estimator tests.own_parts:by_batch --moves-equal-rewards", 0, "holds"),
])
def test_each_part_gets_its_properties_and_its_exit_code(capsys, arguments, code, said):
    assert check_own_parts.main(arguments.split()) == code and said in "".join(capsys.readouterr())
