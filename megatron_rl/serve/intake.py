"""Requests of clients become operations: names and numbers are looked up, fields are checked, the rest is queued.

A request whose line and number are right but which cannot be served becomes an operation all the same, one that has
failed: its number is used, so that those after it do not wait for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.rollout.sampling import SampleRequest, request_seed
from megatron_rl.serve import naming
from megatron_rl.serve.books import Books, spec_facts
from megatron_rl.serve.losses import check_inputs, served_loss
from megatron_rl.serve.operations import Operation, Operations, digest_of
from megatron_rl.serve.stops import stops_of
from megatron_rl.serve.values import AdapterSpec, Fault, RequestError
from megatron_rl.serve.wire import parse_training, prompt_tokens

MOST_SAMPLES, MOST_TOP = 4096, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Describes the model that is served.

    name: by which clients ask for it. tokenizer_id: by which they load its tokenizer.
    lora_rank: the largest rank of adapters; None where every weight is trained. stop_ids: its ends of sequence.
    longest: the most tokens of a prompt and its sample.
    """

    name: str
    tokenizer_id: str
    family: str
    vocab_size: int
    context_tokens: int
    longest: int
    lora_rank: int | None
    stop_ids: tuple[int, ...]


class Intake:
    """Makes operations of requests. Bodies are JSON objects whose fields the front has checked for their types."""

    def __init__(self, config: Config, served: ServedModel, books: Books, operations: Operations) -> None:
        self.config, self.served, self.books, self.operations = config, served, books, operations

    # ---- models -----------------------------------------------------------------------------------------------------

    def create_model(self, owner: str, body: Mapping) -> Operation:
        """Queue the making of a model, as operation 0 of its line."""
        session, seq = body["session_id"], body["model_seq_id"]
        self.books.session(session, owner)
        self._check_base(body["base_model"])
        spec = self._spec(body.get("lora_config"))
        self._check_optimizer(body.get("optimizer_config"))
        facts = {
            "spec": spec_facts(spec),
            "saved": {"seq": 0, "folder": None, "with_adam": False},
            "base_model": self.served.name,
            "metadata": body.get("user_metadata") or {},
        }
        header = {"do": "create", "spec": spec_facts(spec)}
        return self._begin(owner, session, seq, "create_model", header, facts)

    def _begin(self, owner: str, session: str, seq: int, kind: str, header: dict, facts: dict) -> Operation:
        """Open a model's line by its operation 0; one that repeats an earlier request opens nothing."""
        model = naming.model_name(session, seq)
        operation = Operation(
            id=naming.operation_name(model, 0),
            owner=owner,
            line=model,
            seq=0,
            kind=kind,
            header={**header, "model": model},
            depends=True,
            digest=digest_of(repr(sorted(header.items())).encode()),
        )
        if not self.operations.has_line(model):
            self.operations.open_line(model)
            self.books.open_model(model, owner, session, facts)
        return self._add(operation)

    def load_weights(self, owner: str, body: Mapping) -> Operation:
        """Queue the loading of a checkpoint into a model, or into a new one (``session_id``, ``model_seq_id``)."""
        checkpoint = self.books.checkpoint(body["path"], owner)
        with_adam = bool(body["optimizer"])
        header = {"do": "load", "folder": checkpoint.facts["folder"], "with_adam": with_adam, "path": body["path"]}
        if body.get("session_id") is None:
            self._check_optimizer(body.get("optimizer_config"))
            return self._ordered(owner, body, "load_weights", header, depends=True)
        self.books.session(body["session_id"], owner)
        if body.get("base_model") is not None:
            self._check_base(body["base_model"])
        facts = {
            "spec": checkpoint.facts["spec"],
            "saved": {"seq": 0, "folder": checkpoint.facts["folder"], "with_adam": with_adam},
            "base_model": self.served.name,
            "metadata": body.get("user_metadata") or {},
        }
        return self._begin(owner, body["session_id"], body["model_seq_id"], "load_weights", header, facts)

    def _check_base(self, name: str) -> None:
        if name != self.served.name:
            raise RequestError(
                f"base_model={name!r} is not served; this server has {self.served.name!r} (serve.base_model names it)"
            )

    def _check_optimizer(self, config: Mapping | None) -> None:
        kind = (config or {}).get("type", "adamw")
        if kind != "adamw":
            raise RequestError(f"optimizer_config.type={kind!r} is not served; AdamW is, as 'adamw'")

    def _spec(self, config: Mapping | None) -> AdapterSpec | None:
        """Return the adapters that a client asks for; where every weight is trained it gets those."""
        most, lora = self.served.lora_rank, config or {}
        if most is None:
            return None
        rank = lora.get("rank", most)
        if type(rank) is not int or not 1 <= rank <= most:
            raise RequestError(
                f"lora_config.rank={rank!r} must be a whole number from 1 to {most}, the server's lora.rank"
            )
        seed = lora.get("seed")
        spec = AdapterSpec(
            rank=rank,
            seed=self.config.run.seed if seed is None else int(seed),
            attention=bool(lora.get("train_attn", True)),
            mlp=bool(lora.get("train_mlp", True)),
        )
        if not set(spec.targets) & set(self.config.lora.targets):
            raise RequestError(
                "lora_config leaves nothing to train: train_attn and train_mlp ask for none of the server's "
                f"lora.targets={list(self.config.lora.targets)}"
            )
        return spec

    # ---- a model's operations ---------------------------------------------------------------------------------------

    def forward_backward(self, owner: str, body: bytes) -> Operation:
        """Queue a training request."""
        call = parse_training(body)
        self._model(call.model_id, owner)
        kind = "forward" if call.forward_only else "forward_backward"
        operation = self._operation(
            owner, call.model_id, call.seq_id, kind, {"do": "forward_backward"}, digest_of(body), depends=True
        )
        operation = dataclasses.replace(operation, body=body, parsed=call)
        try:
            loss = served_loss(call.loss, call.settings)
            check_inputs(loss, call.data, self.served.vocab_size, self.served.context_tokens - 1)
        except RequestError as error:
            operation = dataclasses.replace(operation, header=_fault(error), body=b"", parsed=None)
        return self._add(operation)

    def optim_step(self, owner: str, body: Mapping) -> Operation:
        """Queue an optimizer step."""
        adam = body.get("adam_params")
        if adam is None:
            given = body.get("optimizer_params") or body.get("optim_params") or {}
            if given.get("type", "adamw") != "adamw":
                return self._ordered(
                    owner,
                    body,
                    "optim_step",
                    _fault(RequestError(f"optimizer {given['type']!r} is not served; send AdamParams")),
                    depends=True,
                )
            adam = given
        defaults = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}
        header = {"do": "optim_step", "adam": {**defaults, "grad_clip_norm": 0.0, **adam}}
        try:
            _check_adam(header["adam"])
        except RequestError as error:
            header = _fault(error)
        return self._ordered(owner, body, "optim_step", header, depends=True)

    def save_weights(self, owner: str, body: Mapping) -> Operation:
        """Queue the saving of a model with its optimizer state."""
        return self._save(owner, body, naming.STATE, "save_weights", with_adam=True)

    def save_weights_for_sampler(self, owner: str, body: Mapping) -> Operation:
        """Queue the saving of weights under a name, or a snapshot of them for a new sampling session."""
        if body.get("path") is not None:
            return self._save(owner, body, naming.SAMPLER, "save_weights_for_sampler", with_adam=False)
        model = body["model_id"]
        self._model(model, owner)
        seq = body.get("sampling_session_seq_id")
        if type(seq) is not int:
            raise RequestError("give path, a name for the weights, or sampling_session_seq_id, for a new session")
        sampler = naming.sampler_name(model.partition(":")[0], seq)
        weights = f"{model}:inflight" if body.get("kind") == "inflight" else sampler
        header = {"do": "snapshot", "weights": weights, "sampler": sampler}
        return self._ordered(owner, body, "save_weights_for_sampler", header)

    def _save(self, owner: str, body: Mapping, kind: str, what: str, *, with_adam: bool) -> Operation:
        self._model(body["model_id"], owner)
        header: dict[str, object]
        try:
            name = naming.checked_name(body.get("path") or f"{body['seq_id']:06d}")
            path = naming.CheckpointPath(model=body["model_id"], kind=kind, name=name)
            header = {
                "do": "save",
                "folder": str(path.folder(self.books.root).absolute()),
                "with_adam": with_adam,
                "path": str(path),
                "overwrite": bool(body.get("overwrite", False)) or kind == naming.SAMPLER,
                "ttl_s": body.get("ttl_seconds"),
                "metadata": body.get("user_metadata"),
            }
        except RequestError as error:
            header = _fault(error)
        return self._ordered(owner, body, what, header)

    def _model(self, model: str, owner: str) -> None:
        self.books.model(model, owner)
        self.books.hear(model.partition(":")[0])

    def _ordered(self, owner: str, body: Mapping, kind: str, header: dict, *, depends: bool = False) -> Operation:
        model, seq = body["model_id"], body.get("seq_id")
        self._model(model, owner)
        if type(seq) is not int or seq < 1:
            raise RequestError(f"seq_id={seq!r} must be a whole number of at least 1")
        digest = digest_of(repr(sorted(body.items())).encode())
        return self._add(self._operation(owner, model, seq, kind, header, digest, depends=depends))

    def _operation(
        self, owner: str, model: str, seq: int, kind: str, header: dict, digest: str, *, depends: bool
    ) -> Operation:
        if seq < 1:
            raise RequestError(f"seq_id={seq} must be at least 1")
        return Operation(
            id=naming.operation_name(model, seq),
            owner=owner,
            line=model,
            seq=seq,
            kind=kind,
            header={**header, "model": model},
            depends=depends,
            digest=digest,
        )

    def _add(self, operation: Operation) -> Operation:
        """Queue an operation; one that a crash has lost is handed back as it was, so that its client learns of it."""
        known = self.books.store.operation(operation.id)
        if known is not None and self.operations.find(operation.id) is None and known.digest == operation.digest:
            return operation
        return self.operations.add(
            operation,
            accept=lambda x: self.books.accept(x.id, x.owner, x.line, x.seq, x.kind, x.digest),
        )

    # ---- sampling ---------------------------------------------------------------------------------------------------

    def create_sampling_session(self, owner: str, body: Mapping) -> str:
        """Open a sampling session of the base model or of named weights; return its name."""
        session, seq = body["session_id"], body["sampling_session_seq_id"]
        self.books.session(session, owner)
        facts = self._weights(owner, body)
        sampler = naming.sampler_name(session, seq)
        if (known := self.books.store.get("samplers", sampler)) is not None and known.facts != facts:
            raise RequestError(f"number {seq} of session {session} was used for another sampling session", status=422)
        self.books.open_sampler(sampler, owner, session, facts)
        self._open_line(sampler)
        return sampler

    def _weights(self, owner: str, body: Mapping) -> dict[str, object]:
        path = body.get("model_path")
        if path is None:
            self._check_base(body.get("base_model") or "")
            return {"weights": naming.BASE, "folder": None, "path": None, "base_model": self.served.name}
        checkpoint = self.books.checkpoint(path, owner)
        return {
            "weights": path,
            "folder": checkpoint.facts["folder"],
            "path": path,
            "base_model": checkpoint.facts["base_model"],
        }

    def _open_line(self, sampler: str) -> None:
        if not self.operations.has_line(sampler):
            self.operations.open_line(sampler, ordered=False)

    def sample(self, owner: str, body: Mapping) -> Operation:
        """Queue a sampling request."""
        sampler, seq = body.get("sampling_session_id"), body.get("seq_id")
        if sampler is None or type(seq) is not int:
            raise RequestError("give sampling_session_id and seq_id; a request without a session is not served")
        row = self.books.sampler(sampler, owner)
        self.books.hear(sampler.partition(":")[0])
        self._open_line(sampler)
        request = self._request(body, f"{sampler}:{seq}")
        operation = Operation(
            id=naming.operation_name(sampler, seq),
            owner=owner,
            line=sampler,
            seq=seq,
            kind="sample",
            header={"do": "sample", "weights": row.facts["weights"], "folder": row.facts["folder"]},
            parsed=request,
            weight=request.num_samples,
            digest=digest_of(repr(dataclasses.astuple(request)).encode()),
        )
        return self.operations.add(operation)

    def _request(self, body: Mapping, id: str) -> SampleRequest:
        tokens, given = prompt_tokens(body["prompt"]), body["sampling_params"]
        served = self.served
        for token in tokens:
            if not 0 <= token < served.vocab_size:
                raise RequestError(f"prompt holds token {token}, and the vocabulary has {served.vocab_size} tokens")
        room = served.longest - len(tokens)
        if room < 1:
            raise RequestError(
                f"the prompt of {len(tokens)} tokens leaves no room for a sample: {served.longest} is the most that "
                "both may have together"
            )
        asked = given.get("max_tokens")
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
            if body.get(name):
                raise RequestError(f"{name} is not served; leave it out")
        if body.get("record_stability_info"):
            raise RequestError(
                "record_stability_info belongs to loss_fn='stable_reinforce', which is not served; choose "
                "another loss_fn, such as 'importance_sampling'"
            )
        stop_ids, stop_texts = stops_of(given.get("stop"), served.stop_ids, served.vocab_size)
        seed = given.get("seed")
        return SampleRequest(
            request_id=id,
            token_ids=tokens,
            num_samples=_whole("num_samples", body.get("num_samples", 1), 1, MOST_SAMPLES),
            max_tokens=room if asked is None else min(room, _whole("max_tokens", asked, 1, 2**31)),
            seed=request_seed(self.config.run.seed, *((id,) if seed is None else ("client", seed))),
            temperature=_number("temperature", given.get("temperature", 1.0), 0.0, 100.0),
            top_k=max(0, _whole("top_k", given.get("top_k", -1), -1, 2**31)),
            top_p=_number("top_p", given.get("top_p", 1.0), 1e-6, 1.0),
            stop_ids=stop_ids,
            stop_texts=stop_texts,
            prompt_logprobs=bool(body.get("prompt_logprobs")),
            prompt_top=_whole("topk_prompt_logprobs", body.get("topk_prompt_logprobs") or 0, 0, MOST_TOP),
            top=_whole("topk_sample_logprobs", body.get("topk_sample_logprobs") or 0, 0, MOST_TOP),
        )


def _fault(error: RequestError) -> dict[str, object]:
    """Return the header of an operation that fails when its turn comes."""
    return {"do": "fail", "error": str(error), "fault": (error.fault or Fault.USER).value}


def _whole(name: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise RequestError(f"{name}={value!r} must be a whole number from {least} to {most}")
    return value


def _number(name: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise RequestError(f"{name}={value!r} must be a number from {least:g} to {most:g}")
    return float(value)


def _check_adam(adam: Mapping[str, object]) -> None:
    ranges = {
        "learning_rate": (0.0, 1e3),
        "beta1": (0.0, 1.0 - 1e-12),
        "beta2": (0.0, 1.0 - 1e-12),
        "eps": (0.0, 1e3),
        "weight_decay": (0.0, 1e3),
        "grad_clip_norm": (0.0, float("inf")),
    }
    for name, (least, most) in ranges.items():
        adam[name] = _number(f"adam_params.{name}", adam[name], least, most)
    if unknown := sorted(set(adam) - set(ranges) - {"type"}):
        raise RequestError(f"adam_params.{unknown[0]} is not known; it has {', '.join(ranges)}")
