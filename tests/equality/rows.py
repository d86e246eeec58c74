"""Rows of the tests' tables: a layout and a model by name, and what has to hold on every rank of one."""

from tests.equality.layouts import BF16, GATHER, OVERLAP, PLAIN, RECOMPUTE, SHARDED, SP, TOLERANCE

WORDS: dict[str, tuple[str, ...]] = {
    **{"one": (), "SP": (SP,), "plain": PLAIN, "sharded": SHARDED, "bf16": BF16, "overlap": OVERLAP, "gather": GATHER},
    "selective": tuple(f"megatron.transformer.recompute_{x}" for x in ("granularity=selective", "modules=[moe]")),
    **{"recompute": RECOMPUTE, "permuted": ("megatron.transformer.moe_permute_fusion=true",)},
    **{"shared": ("plan.share_prompts=true",), "dense": ("skip.mode=off",), "frozen": ("skip.ghost=freeze",)},
    "muon": ("optimizer.algorithm=muon",),
    **{"LoRA": ("lora.rank=3", "lora.alpha=5.0"), "attention": ("lora.targets=[linear_qkv,linear_proj]",),
       "linears": ("lora.targets=[linear_qkv,linear_proj,linear_fc1,linear_fc2,in_proj,out_proj]",)},
}
DEGREES = dict(TP="tensor", PP="pipeline", VPP="virtual_pipeline", CP="context", EP="expert", ETP="expert_tensor",
               DP=None)


def row(name: str) -> tuple[int, str, tuple[str, ...]]:
    """Return processes, model and settings of a name: (2, "qwen3", (…)) for ``"TP2-SP-sharded qwen3"``.

    The processes are those that the degrees need: of one stage's dense layers or of its experts, whichever are more.
    """
    layout, family = name.split()
    degrees, settings = dict.fromkeys(DEGREES, 1), []
    for word in layout.split("-"):
        if word in WORDS:
            settings += WORDS[word]
            continue
        kind = word.rstrip("0123456789")
        degrees[kind] = int(word.removeprefix(kind))
        settings += [f"parallel.{DEGREES[kind]}={degrees[kind]}"] if DEGREES[kind] else []
    experts = degrees["EP"] * (degrees["ETP"] if "ETP" in layout else degrees["TP"])
    replica = max(degrees["TP"] * degrees["CP"], experts)
    return degrees["PP"] * degrees["DP"] * replica, family, tuple(settings)


def measured(pool, name: str, function, *more: object) -> list:
    """Return what ``function(rank, world, family, settings, *more)`` gave on each rank of a row."""
    world, family, settings = row(name)
    return pool.run(world, function, family, settings, *more, timeout_s=120)


def assert_close(pool, name: str, function, *more: object, bound: float = TOLERANCE) -> None:
    for found in measured(pool, name, function, *more):
        assert max(found.values()) < bound, found


def assert_all(pool, name: str, function, *more: object) -> None:
    for found in measured(pool, name, function, *more):
        assert all(found.values()), found
