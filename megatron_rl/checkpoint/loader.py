"""The loading of a checkpoint: model, critic, random states, and the run's other state in its saved form."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.checkpoint import model_state
from megatron_rl.checkpoint.folder import DamagedCheckpoint, verify
from megatron_rl.checkpoint.pickled import check_torch_files
from megatron_rl.checkpoint.random_state import set_random_state
from megatron_rl.checkpoint.resume import CRITIC, damaged_words, none_good_words
from megatron_rl.checkpoint.run_state import RestoredRun, ResumePoint, changed_settings, own_file
from megatron_rl.checkpoint.state_file import read_model_state, read_state
from megatron_rl.distributed.collectives import gather_json
from megatron_rl.errors import CheckpointError, StoreError, shortened

log = logging.getLogger(__name__)


class CheckpointLoader:
    """Loads one of a run's checkpoints. Methods are collectives unless they say otherwise.

    root: the folder of the policy's checkpoints.
    on_damage: ``checkpoint.on_damage``. If a checkpoint is damaged, ``fail`` raises, and
        ``previous`` tries the checkpoint before it.
    """

    def __init__(self, backend, critic, root: pathlib.Path, *, on_damage: str) -> None:
        self.backend, self.critic, self.on_damage = backend, critic, on_damage
        self.root, self.critic_root = root, root / CRITIC

    def load_newest(
        self,
        folders: Sequence[pathlib.Path],
        prepare: Callable[[ResumePoint, bool], None],
        check_rows: Callable[[bytes], None],
    ) -> ResumePoint:
        """Load model and critic from the first good checkpoint of ``folders``, newest first; return that checkpoint.

        Raises CheckpointError if a checkpoint is damaged under ``checkpoint.on_damage=fail``, or if
        all are damaged. The same error is raised if a checkpoint has an unknown format or is of
        another model.

        prepare: a function that is called before each load with the checkpoint and a bool. The bool
            is True if an earlier load of this call failed halfway.
        check_rows: a function that gets the bytes of a ``rollouts_<rank>.npz``, and raises an
            exception if they are damaged.
        """
        broke_off = False
        for folder in folders:
            has_critic = self.critic is not None and folder.parent == self.root
            try:
                state = self._verify(folder, check_rows)
                if has_critic:
                    self._verify(self.critic_root / folder.name, None)
                model_state.check_model(self.backend, folder, state["model"])
                if has_critic:
                    self.critic.check(self.critic_root / folder.name)
                point = ResumePoint(folder=folder, state=state)
                prepare(point, broke_off)
                broke_off = True
                model_state.load(self.backend, folder, state["backend"], state["model"])
                if has_critic:
                    self.critic.load(self.critic_root / folder.name)
            except DamagedCheckpoint as error:
                if self.on_damage == "fail":
                    raise DamagedCheckpoint(damaged_words(error)) from error
                log.error("%s; THE CHECKPOINT BEFORE IT IS USED", error)
                continue
            return point
        raise CheckpointError(none_good_words(folders, self.root))

    def _verify(self, folder: pathlib.Path, check_rows: Callable[[bytes], None] | None) -> dict:
        """Verify a checkpoint and return the content of its state.json. An error of one rank is raised on every rank.

        Each rank digests a part of the files. The main rank also runs ``check_torch_files``.

        check_rows: a function that raises for a damaged ``rollouts_<rank>.npz``; None for a
            critic's checkpoint, which has no such file.
        """
        topology, error, state = self.backend.topology, None, {}
        try:
            verify(folder, share=(topology.rank, topology.world_size))
            state = read_model_state(folder) if check_rows is None else read_state(folder)
            if topology.is_main:
                check_torch_files(folder)
            if check_rows is not None:
                self._check_rows(folder, state, check_rows)
        except (CheckpointError, StoreError) as raised:
            error = raised
        damaged = isinstance(error, DamagedCheckpoint)
        errors = [x for x in gather_json([str(error), damaged] if error else None) if x]
        if errors:
            message, damaged = errors[0]
            raise (DamagedCheckpoint if damaged else CheckpointError)(message) from error
        return state

    def _own_files(self, folder: pathlib.Path, state: Mapping) -> list[pathlib.Path]:
        """Return the paths of the checkpoint's ``rollouts_<rank>.npz`` files that this rank reads.

        Rank r of n ranks reads the files r, r + n, r + 2n, …: the saving run may have had more ranks.

        state: the content of the checkpoint's state.json.
        """
        topology = self.backend.topology
        return [folder / own_file(rank) for rank in range(topology.rank, state["world_size"], topology.world_size)]

    def _check_rows(self, folder: pathlib.Path, state: Mapping, check_rows: Callable[[bytes], None]) -> None:
        for path in self._own_files(folder, state):
            try:
                check_rows(path.read_bytes())
            except StoreError:
                raise
            except Exception as error:
                raise DamagedCheckpoint(
                    f"{path} cannot be read: {type(error).__name__}: {shortened(str(error), 500)}"
                ) from error

    def restore(self, point: ResumePoint, config: Mapping[str, object]) -> RestoredRun:
        """Set the random generators to the loaded checkpoint's states; return the run's other saved state.

        config: this run's settings, as ``config_to_dict`` gives them. Each setting that differs from
            the checkpoint's is logged.
        """
        state = point.state
        self._restore_random(state)
        for key, (before, now) in changed_settings(state["config"], config).items():
            log.warning("resumed with %s=%s; it was %s when the checkpoint was taken", key, now, before)
        log.info(
            "resumed from %s: %d rollouts trained, %d optimizer steps",
            point.folder,
            point.rollouts,
            self.backend.step_index,
        )
        return RestoredRun(
            rollouts=point.rollouts if point.supervised_steps is None else None,
            supervised_steps=point.supervised_steps,
            queue=state["feed"],
            queue_rows=[path.read_bytes() for path in self._own_files(point.folder, state)],
            prompts=state["prompts"],
            reference=state.get("reference", {"coefficient": None}),  # older checkpoints lack it: β was fixed
            trace_rollouts=state["trace_rollouts"],
        )

    def _restore_random(self, state: Mapping) -> None:
        topology = self.backend.topology
        if len(state["random"]) != topology.world_size:
            log.warning(
                "the checkpoint's random states are of %d ranks and there are %d: left as they are",
                len(state["random"]),
                topology.world_size,
            )
            return
        set_random_state(state["random"][topology.rank])
