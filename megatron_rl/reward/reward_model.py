"""A trained reward model as a reward function: a sequence classifier with one label scores prompt and response."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
import torch

from megatron_rl.distributed.platform import HOST
from megatron_rl.errors import ConfigError, quoted

ROWS_PER_PASS = 16
MOST_PER_BYTE = 4  # parameters per byte of the weights' files; files of four bits hold two per byte


class RewardModelScore:
    """Scores responses by a reward model of transformers, which every rank holds whole.

    The score is the model's number at a response's last token. The response's token ids come from
    the policy, so the reward model must have the policy's tokenizer. A prompt's text is tokenized
    by the tokenizer in the reward model's directory, without special tokens, like the policy's
    prompts.

    Example: ``RewardModelScore("runs/judge/checkpoints/step_200/hf")(prompts=["2+2="],
    completions=["4"], completion_ids=[[7, 2]])`` → ``[1.3]``.
    """

    def __init__(self, path: str | pathlib.Path, device: torch.device | None = None) -> None:
        """Load the model. Raises ConfigError for a directory without a reward model of one label."""
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        setting, self._device = f"reward.model_path={quoted(str(path), 300)}", device or HOST.device
        if not (pathlib.Path(path) / "config.json").is_file():
            raise ConfigError(f"{setting} holds no config.json; give a reward model's directory")
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            # transformers would allocate weights that the files lack, so sizes are compared before it loads.
            with torch.device("meta"):
                asked = AutoModelForSequenceClassification.from_config(config).num_parameters()
            held = sum(x.stat().st_size for x in pathlib.Path(path).iterdir() if x.suffix in (".safetensors", ".bin"))
            if asked > MOST_PER_BYTE * held:
                raise ValueError(f"config.json asks for {asked:,} parameters, and the weights have {held:,} bytes")
            self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            model, report = AutoModelForSequenceClassification.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
        except Exception as error:  # transformers and its readers raise errors of many classes
            raise ConfigError(f"{setting} cannot be loaded ({type(error).__name__}: {error!s:.300})") from error
        if config.num_labels != 1 or "score.weight" in report["missing_keys"]:
            raise ConfigError(
                f"{setting} is no reward model: it has num_labels={config.num_labels}"
                f"{', and no score.weight' if report['missing_keys'] else ''}; train one by "
                "preference.loss=bradley_terry"
            )
        self._model = model.to(self._device).eval()
        self._longest, self._vocabulary = config.max_position_embeddings, config.vocab_size

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: object
    ) -> list[float]:
        """Return one score per response. Raises ValueError for a sample beyond the model's context or vocabulary."""
        asked = self._tokenizer(list(prompts), add_special_tokens=False).input_ids
        rows = [[*prompt, *response] for prompt, response in zip(asked, completion_ids, strict=True)]
        for row in rows:
            if not 0 < len(row) <= self._longest or max(row) >= self._vocabulary:
                raise ValueError(
                    f"a sample of {len(row)} tokens, up to {max(row, default=0)}, does not fit in the reward model's "
                    f"context of {self._longest} and vocabulary of {self._vocabulary}"
                )
        scores = np.zeros(len(rows))
        by_length = np.argsort([len(row) for row in rows], kind="stable")
        for first in range(0, len(rows), ROWS_PER_PASS):
            part = by_length[first : first + ROWS_PER_PASS]
            scores[part] = self._scores([rows[i] for i in part])
        return scores.tolist()

    def _scores(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        longest = max(map(len, rows))
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self._device)
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        inside = torch.arange(longest, device=self._device) < lengths[:, None]
        # The layers are called alone: the classifier's own pooling reads a response's end as a pad if
        # both are the same token.
        hidden = self._model.base_model(input_ids=tokens, attention_mask=inside.long()).last_hidden_state
        last = hidden[torch.arange(len(rows), device=self._device), lengths - 1]
        return self._model.score(last)[:, 0].float().cpu().numpy()
