"""Interpolation gives what OmegaConf itself gives; a cycle, a bomb and an unsafe resolver end in one sentence."""

import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from megatron_rl.config import Config, config_to_dict, config_to_yaml, load_config
from megatron_rl.errors import ConfigError
from tests.pairwise import quick

ROOT = pathlib.Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*/*.yaml"))


def arguments_of(values: dict[str, object]) -> dict[str, object]:
    return load_config({"environment": {"arguments": values}}).environment.arguments


@pytest.mark.parametrize("path", quick(EXAMPLES, *EXAMPLES[:: len(EXAMPLES) // 5]), ids=lambda path: path.name)
def test_a_file_becomes_what_omegaconf_makes_of_it(path: pathlib.Path) -> None:
    """There OmegaConf reads, types, merges and resolves alone, the sections being its structured configs."""
    overrides = ["run.name=s${run.seed}", "critic.lr=${optimizer.lr}", "train.num_rollouts=3", "train.epochs=null"]
    layers = [OmegaConf.load(path), OmegaConf.from_dotlist(overrides)]
    for key in ("data.train", "reward.functions"):
        if isinstance(text := OmegaConf.select(layers[0], key), str):  # a list of one, here alone
            OmegaConf.update(layers[0], key, [text])
    assert load_config(path, overrides) == OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), *layers))


@st.composite
def referring(draw: st.DrawFn) -> dict[str, object]:
    """Draw values that refer to those before them, in an order of their own, by all of OmegaConf's ways."""
    count = draw(st.integers(2, 7))
    found: list[tuple[str, object]] = [("v0", draw(st.sampled_from([1, 0.5, "text", True, None, [1, 2], {"x": 3}])))]
    for i in range(1, count):
        j = draw(st.integers(0, i - 1))
        form = draw(
            st.sampled_from(
                (f"${{environment.arguments.v{j}}}", f"${{.v{j}}}", "a ${.v0} b", f"${{oc.select:no.such,{j}}}",
                 f"${{oc.select:environment.arguments.v{j}}}", f"${{oc.decode:'[{j}, x]'}}", "${oc.env:NO_SUCH,7}",
                 f"${{oc.create:{{x: {j}, y: [1]}}}}", "${oc.dict.keys:optimizer}", "${oc.dict.values:plan}",
                 rf"\${{.v{j}}} as it is", f"${{.${{.name{j}}}}}")
            )
        )
        found += [(f"v{i}", form), (f"name{i - 1}", f"v{j}")]
    found.append((f"name{count - 1}", "v0"))
    return dict(draw(st.permutations(found)))


@settings(max_examples=25, deadline=None)
@given(referring())
def test_values_are_those_that_omegaconf_resolves(values: dict[str, object]) -> None:
    settings_ = OmegaConf.merge(config_to_dict(Config()), {"environment": {"arguments": values}})
    try:
        wanted = OmegaConf.to_container(settings_, resolve=True)["environment"]["arguments"]
    except ValueError:  # a list within a text, and the like
        with pytest.raises(ConfigError):
            arguments_of(values)
        return
    assert arguments_of(values) == wanted


@settings(max_examples=8, deadline=None)
@given(st.dictionaries(st.text("abc", min_size=1), st.text("a\\${}?:.'\"#\n é1-") | st.floats(-9, 9), min_size=5))
def test_whatever_texts_hold_the_yaml_loads_to_the_same(tmp_path_factory, values: dict[str, object]) -> None:
    given_ = {name: text.replace("${", "$ {") if isinstance(text, str) else text for name, text in values.items()}
    given_ |= {"kept": r"\${.x} \\\${y}"}
    config = load_config({"environment": {"arguments": given_}})
    assert config.environment.arguments == {**given_, "kept": r"${.x} \${y}"}
    path = tmp_path_factory.getbasetemp() / "run.yaml"
    path.write_text(config_to_yaml(config), encoding="utf-8")
    assert load_config(path) == config


def test_a_layer_is_a_file_a_mapping_or_a_dictconfig(tmp_path: pathlib.Path) -> None:
    tree = {"run": {"name": "s${run.seed}", "dir": pathlib.Path("/x")}, "data": {"train": ("a", "b")}}
    tree["eval"] = {"sets": {"a.b": "${.c}", "c": "d"}}
    config = load_config(tree, ["run.seed=3"])
    assert (config.run.name, config.run.dir, config.data.train) == ("s3", "/x", ("a", "b"))
    assert config.eval.sets == {"a.b": "d", "c": "d"}
    tree["run"]["dir"] = "/x"
    assert load_config(OmegaConf.create(tree), ["run.seed=3"]) == config == load_config(config_to_dict(config))
    assert load_config(OmegaConf.structured(Config)) == Config() == load_config({})
    assert load_config(OmegaConf.create({"base": "/b", "rl": {"run": {"dir": "${base}/y"}}}).rl).run.dir == "/b/y"
    for odd, words in (
        (3, "the configuration is 3; give a file's path, a mapping or a DictConfig"),
        ({1: {}}, "the key 1 of the configuration is not a text"),
        ({"environment": {"arguments": {"a": {2: 3}}}}, "the key 2 of environment.arguments.a is not a text"),
        ({"run": {"name": len}}, "run.name=<built-in function len> must be a text, a number"),
        ({"run": {"seed": pathlib.Path("x")}}, "run.seed='x' must be a whole number"),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(odd)
        assert words in str(error.value), str(error.value)
    tree["run"] = tree
    with pytest.raises(ConfigError, match="is nested deeper than 20 levels"):
        load_config(tree)


def test_a_program_registers_resolvers_of_its_own_which_may_read_a_configuration() -> None:
    def seed_of(seed: int) -> int:
        return load_config(None, [f"run.seed=${{oc.decode:'{seed}'}}"]).run.seed

    OmegaConf.register_new_resolver("tests.seed", seed_of)
    try:
        before = [OmegaConf.has_resolver(name) for name in ("oc.env", "oc.coerce", "megatron_rl.pending")]
        assert load_config(None, ["run.seed=${tests.seed:4}", "critic.lr=${oc.decode:'1e-3'}"]).run.seed == 4
        assert before == [OmegaConf.has_resolver(name) for name in ("oc.env", "oc.coerce", "megatron_rl.pending")]
    finally:
        OmegaConf.clear_resolver("tests.seed")


def bomb(first: object, link: str, count: int) -> dict[str, object]:
    """Return values of which each repeats the one before, the last first; written out they are count to the ninth."""
    found = {f"a{i}": link.replace("#", str(i - 1)) * count for i in range(9, 0, -1)}
    return found | {"a0": first}


HOSTILE = {
    "a text that doubles": (bomb("xxxxxxxxxx", "${.a#}", 50), "becomes a text of more than 100000 characters"),
    "lists that double": ({f"a{i}": [f"${{..a{i - 1}}}"] * 50 for i in range(9, 0, -1)} | {"a0": list(range(10))},
                          "interpolations bring more than 10000 values"),
    "texts that are decoded again": (bomb("x", r"\${oc.decode:\${oc.select:environment.arguments.a#}}", 20)
                                     | {"b": "${oc.decode:${.a9}}"}, "more than 1000 calls of resolvers"),
    "many": ({f"a{i}": "${run.seed}" for i in range(1001)}, "there are more than 1000 interpolations"),
    "decoded for ever": ({"a": r"\${oc.decode:${.a}}", "b": "${oc.decode:${.a}}"}, "refers to itself"),
    "a circle": (
        {"a": "${.b}", "b": "x${.c}", "c": "${oc.select:environment.arguments.a}"},
        "environment.arguments.a='${.b}' refers to itself: environment.arguments.a → environment.arguments.b → "
        "environment.arguments.c → environment.arguments.a; write one of them out",
    ),
    "its own section": ({"a": "${environment}"}, "refers to itself or to its own section"),
    "a marker of ours": ({"a": "${megatron_rl.pending:9}"}, "there is no resolver 'megatron_rl.pending'"),
    "no resolver": ({"a": "${eval:1}"}, "there is no resolver 'eval'; those known are oc."),
    "a module": ({"a": "${oc.coerce:tests.unit.config.no_module.X,1}"}, "oc.coerce"),
    "a module by a way round": ({"a": "${oc.${.b}:os.X,1}", "b": "coerce"}, "oc.coerce"),
    "no grammar": ({"a": "${run.seed"}, r"is not a valid interpolation"),
    "no variable": ({"a": "${oc.env:NO_SUCH}"}, "the environment has no variable 'NO_SUCH'; set it, or give a default"),
    "no neighbour": ({"a": "${.b}"}, "names no setting; write ${section.key}"),
    "a place to fill": ({"a": "${.b}", "b": "???"}, "environment.arguments.b"),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_fault_of_interpolation_is_one_sentence_with_its_key(fault: str) -> None:
    values, words = HOSTILE[fault]
    with pytest.raises(ConfigError) as error:
        arguments_of(values)
    message = str(error.value)
    assert words in message and "\n" not in message and len(message) < 500, message
    assert message.startswith("environment.arguments.") or fault == "many", message


def test_a_section_that_is_taken_as_a_whole_is_not_set_beside_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.yaml").write_text("run: {name: x}\neval: {sets: '${oc.create:{a: b}}'}\n")
    assert load_config(tmp_path / "run.yaml").eval.sets == {"a": "b"}
    assert load_config(None, ["eval.sets= ${oc.create:{c: d}}"]).eval.sets == {"c": "d"}  # which YAML takes for keys
    wanted = r"run\.yaml, line 2 and the command line: eval\.sets is set by the interpolation .*, and eval\.sets\.c on "
    wanted += r"its own; write the keys of eval\.sets out"
    for override in ("eval.sets.c=d", "eval.sets={c: d}"):
        with pytest.raises(ConfigError, match=wanted):
            load_config(tmp_path / "run.yaml", [override])


def test_lists_and_keys_do_not_meet(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.yaml").write_text("run: {name: x}\ndata: {weights: {a: 1}}\n")
    for overrides, words in (
        (["data.weights=[1]"], "data.weights is {'a': 1} in one place and [1] in another; write it once"),
        (["run.name=s${run.seed}"], "run.yaml, line 2: data.weights={'a': 1} must be a list"),
        (["run.name=s${run.seed}", "advantage.arguments=[1]"], "advantage.arguments=[1] must be keys with values"),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(tmp_path / "run.yaml" if "data" in words else None, overrides)
        assert words in str(error.value), str(error.value)
