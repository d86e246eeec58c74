"""The families by name: those built here, and beside them those that NVIDIA's Megatron-Bridge described."""

from __future__ import annotations

from megatron_rl.weights.families.family import Family

PREFIX = "bridge:"  # before a model_type: the family as Megatron-Bridge describes it, beside one of ours


class Families(dict[str, Family]):
    """Holds the families built here, and finds by its name one that was described since (``describe``).

    A described family is none of the items: what is listed, counted or asked for with ``in`` is built here.
    """

    def __init__(self, built: dict[str, Family]) -> None:
        super().__init__(built)
        self._described: dict[str, Family] = {}

    def describe(self, family: Family) -> None:
        """Keep a family of Megatron-Bridge's, under its name with ``PREFIX``; the last description counts."""
        assert family.model_type.startswith(PREFIX), family.model_type
        self._described[family.model_type] = family

    def __missing__(self, name: str) -> Family:
        return self._described[name]
