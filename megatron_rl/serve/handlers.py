"""The handlers of clients' requests: look up names and numbers, check fields, and queue operations.

An operation is a request in its model's queue. A model's operations run in the order of the numbers
that its client gives them. A request for a known model with a valid number may still be impossible
to serve. Then it becomes an operation that fails in its turn. So the requests behind it do not wait
for its number.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from dataclasses import dataclass

from megatron_rl.errors import quoted
from megatron_rl.rollout.engines.sampling import SampleRequest, request_seed
from megatron_rl.serve import bodies, naming
from megatron_rl.serve.codec import parse_message, size_of, training_call
from megatron_rl.serve.losses import check_inputs, served_loss
from megatron_rl.serve.operation import OPERATION_BYTES, Operation, digest_of
from megatron_rl.serve.operations import Operations
from megatron_rl.serve.registry import Registry, spec_facts
from megatron_rl.serve.values import AdapterSpec, Fault, RequestError

MOST_TOP_LOGPROBS = 2**22  # most likely tokens in one answer; each is two numbers in JSON between ranks
NUMBER_BYTES = 36  # bytes of a token in a Python tuple


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Holds the description of the model that is served.

    name: the name by which clients request the model.
    tokenizer_id: the name by which clients load its tokenizer.
    family: the name of the model's architecture, such as "qwen3".
    context_tokens: the model's context length, which limits the sequences of training requests.
    longest: the maximum of tokens of a prompt and its sample together; at most ``context_tokens``.
    lora_rank: the largest rank of adapters; None if every weight is trained.
    stop_ids: the model's end-of-sequence tokens.
    lora_targets: the layers that may have adapters.
    top_logprobs: whether the engine can return the log-probs of the most likely tokens.
    seed: the seed for adapters and samples if a client gives none.
    """

    name: str
    tokenizer_id: str
    family: str
    vocab_size: int
    context_tokens: int
    longest: int
    lora_rank: int | None
    stop_ids: tuple[int, ...]
    lora_targets: tuple[str, ...]
    top_logprobs: bool
    seed: int


class RequestHandlers:
    """Makes queued operations from requests whose bodies have passed their schemas, one method per kind of request.

    Such a method takes ``owner``, a digest of the client's key, and the body. It returns the queued
    operation unless it says otherwise.

    max_samples: the maximum of samples of one request, ``serve.max_batch_samples``.
    """

    def __init__(self, served: ServedModel, registry: Registry, operations: Operations, *, max_samples: int) -> None:
        self.served, self.registry, self.operations = served, registry, operations
        self.max_samples = max_samples
        self._beginning = threading.Lock()

    # ---- models -----------------------------------------------------------------------------------------------------

    def create_model(self, owner: str, body: bodies.CreateModel) -> Operation:
        """Queue the creation of a model, as operation 0 of the model's queue."""
        self.registry.session(body.session_id, owner)
        self._check_base(body.base_model)
        spec = self._spec(body.lora_config or bodies.LoraConfig())
        _check_optimizer(body.optimizer_config)
        facts = {
            "spec": spec_facts(spec),
            "saved": {"seq": 0, "folder": None, "with_adam": False},
            "base_model": self.served.name,
            "metadata": body.user_metadata or {},
        }
        header = {"do": "create", "spec": spec_facts(spec)}
        return self._begin(owner, body.session_id, body.model_seq_id, "create_model", header, facts)

    def _begin(self, owner: str, session: str, seq: int, kind: str, header: dict, facts: dict) -> Operation:
        """Open the queue of a model's operations, and put operation 0 into it.

        A repeated request opens no second queue.

        seq: the model's number in its session.
        kind: the kind of request, such as "create_model".
        header: the work that every rank is to run, as in Operation.
        facts: the values that the registry keeps of the model.
        """
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
        with self._beginning:  # the row comes before the queue, so that a client can repeat after a full disk
            if self.registry.store.get("models", model) is None:
                self.registry.open_model(model, owner, session, facts)
            self.operations.open_line(model)
        return self._add(operation)

    def load_weights(self, owner: str, body: bodies.LoadWeights) -> Operation:
        """Queue the loading of a checkpoint into the model ``model_id``, or into a new model.

        A new model is requested by ``session_id`` and ``model_seq_id``.
        """
        checkpoint = self.registry.checkpoint(body.path, owner)
        folder = checkpoint.facts["folder"]
        header = {"do": "load", "folder": folder, "with_adam": body.optimizer, "path": body.path}
        _check_optimizer(body.optimizer_config)
        if body.session_id is None:
            if body.model_id is None or body.seq_id is None:
                raise RequestError("give model_id and seq_id, or session_id and model_seq_id for a new model")
            numbered = bodies.Numbered(model_id=body.model_id, seq_id=body.seq_id)
            return self._ordered(owner, numbered, "load_weights", header, digest_of(_content(body)), depends=True)
        if body.model_seq_id is None:
            raise RequestError("the body has session_id and no model_seq_id; give the new model's number")
        self.registry.session(body.session_id, owner)
        if body.base_model is not None:
            self._check_base(body.base_model)
        facts = {
            "spec": checkpoint.facts["spec"],
            "saved": {"seq": 0, "folder": folder, "with_adam": body.optimizer},
            "base_model": self.served.name,
            "metadata": body.user_metadata or {},
        }
        return self._begin(owner, body.session_id, body.model_seq_id, "load_weights", header, facts)

    def _check_base(self, name: str) -> None:
        if name != self.served.name:
            raise RequestError(
                f"base_model={quoted(name)} is not served; this server has {self.served.name!r} (serve.base_model "
                "names it)"
            )

    def _spec(self, lora: bodies.LoraConfig) -> AdapterSpec | None:
        """Return the adapters that a client requests; None if the server trains every weight.

        Raises RequestError for adapters that the server does not train.
        """
        most = self.served.lora_rank
        if most is None:
            return None
        rank = most if lora.rank is None else lora.rank
        if rank > most:
            raise RequestError(
                f"lora_config.rank={rank} must be a whole number from 1 to {most}, the server's lora.rank"
            )
        spec = AdapterSpec(
            rank=rank,
            seed=self.served.seed if lora.seed is None else lora.seed,
            attention=lora.train_attn,
            mlp=lora.train_mlp,
        )
        if not set(spec.targets) & set(self.served.lora_targets):
            raise RequestError(
                "lora_config leaves nothing to train: train_attn and train_mlp ask for none of the server's "
                f"lora.targets={list(self.served.lora_targets)}"
            )
        return spec

    # ---- a model's operations ---------------------------------------------------------------------------------------

    def forward_backward(self, owner: str, body: bytes) -> Operation:
        """Queue a training request. If its data cannot be read or served, it is queued too, and fails in its turn."""
        message = parse_message(body)
        self._model(message.model_id, owner)
        kind = "forward" if message.forward_only else "forward_backward"
        if message.seq_id < 1:
            raise RequestError(f"seq_id={message.seq_id} must be at least 1")
        operation = self._operation(
            owner, message.model_id, message.seq_id, kind, {"do": "forward_backward"}, digest_of(body), depends=True
        )
        try:
            call = training_call(message)
            loss = served_loss(call.loss, call.settings)
            check_inputs(loss, call.data, self.served.vocab_size, self.served.context_tokens - 1)
        except RequestError as error:
            return self._add(dataclasses.replace(operation, header={**_fault(error), "model": operation.line}))
        return self._add(
            dataclasses.replace(operation, body=body, parsed=call, held=OPERATION_BYTES + len(body) + size_of(call))
        )

    def optim_step(self, owner: str, body: bodies.OptimStep) -> Operation:
        """Queue an optimizer step of a model."""
        adam = body.adam_params or body.optimizer_params or body.optim_params or bodies.AdamParams()
        if adam.type != "adamw":
            raise RequestError(f"optimizer {quoted(adam.type)} is not served; send AdamParams")
        header = {"do": "optim_step", "adam": adam.model_dump(exclude={"type"})}
        return self._ordered(owner, body, "optim_step", header, digest_of(_content(body)), depends=True)

    def save_weights(self, owner: str, body: bodies.SaveWeights) -> Operation:
        """Queue the saving of a model with its optimizer state."""
        return self._save(owner, body, naming.STATE, "save_weights", with_adam=True)

    def save_weights_for_sampler(self, owner: str, body: bodies.SaveWeightsForSampler) -> Operation:
        """Queue the saving of a model's weights under a name, or a snapshot of them for a new sampling session."""
        if body.path is not None:
            return self._save(owner, body, naming.SAMPLER, "save_weights_for_sampler", with_adam=False)
        model, seq = body.model_id, body.sampling_session_seq_id
        if seq is None:
            raise RequestError("give path, a name for the weights, or sampling_session_seq_id, for a new session")
        sampler = naming.sampler_name(model.partition(":")[0], seq)
        weights = f"{model}:inflight" if body.kind == "inflight" else sampler
        header = {"do": "snapshot", "weights": weights, "sampler": sampler}
        return self._ordered(owner, body, "save_weights_for_sampler", header, digest_of(_content(body)))

    def _save(self, owner: str, body: bodies.SaveWeights, kind: str, what: str, *, with_adam: bool) -> Operation:
        name = naming.checked_name(body.path or f"{body.seq_id:06d}")
        path = naming.CheckpointPath(model=body.model_id, kind=kind, name=name)
        header = {
            "do": "save",
            "folder": str(path.folder(self.registry.root).absolute()),
            "with_adam": with_adam,
            "path": str(path),
            "overwrite": bool(body.overwrite) or kind == naming.SAMPLER,
            "ttl_s": body.ttl_seconds,
            "metadata": body.user_metadata,
        }
        return self._ordered(owner, body, what, header, digest_of(_content(body)))

    def fail(self, owner: str, body: bodies.Numbered, kind: str, error: RequestError, content: bytes) -> Operation:
        """Queue a request that cannot be served, so that its number is used. In its turn it fails with ``error``.

        kind: the kind of request, such as "optim_step".
        content: the request's body.
        """
        depends = kind in ("optim_step", "load_weights")
        return self._ordered(owner, body, kind, _fault(error), digest_of(content), depends=depends)

    def _model(self, model: str, owner: str) -> None:
        self.registry.model(model, owner)
        self.registry.hear(model.partition(":")[0])

    def _ordered(
        self, owner: str, body: bodies.Numbered, kind: str, header: dict, digest: str, *, depends: bool = False
    ) -> Operation:
        self._model(body.model_id, owner)
        return self._add(self._operation(owner, body.model_id, body.seq_id, kind, header, digest, depends=depends))

    def _operation(
        self, owner: str, model: str, seq: int, kind: str, header: dict, digest: str, *, depends: bool
    ) -> Operation:
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
        """Queue an operation and return it. If it repeats one that is in the store but not in memory, do not queue it.

        The server's restart lost the earlier one, or its answer was dropped. A client that asks for the
        answer is told so.
        """
        known = self.registry.store.operation(operation.id)
        if known is not None and self.operations.find(operation.id) is None and known.digest == operation.digest:
            return operation
        return self.operations.add(
            operation,
            accept=lambda x: self.registry.accept(x.id, x.owner, x.line, x.seq, x.kind, x.digest),
        )

    # ---- sampling ---------------------------------------------------------------------------------------------------

    def create_sampling_session(self, owner: str, body: bodies.CreateSamplingSession) -> str:
        """Open a sampling session of the base model or of named weights; return the session's name."""
        session, seq = body.session_id, body.sampling_session_seq_id
        self.registry.session(session, owner)
        facts = self._weights(owner, body)
        sampler = naming.sampler_name(session, seq)
        if (known := self.registry.store.get("samplers", sampler)) is not None and known.facts != facts:
            raise RequestError(f"number {seq} of session {session} was used for another sampling session", status=422)
        self.registry.open_sampler(sampler, owner, session, facts)
        self.operations.open_line(sampler, ordered=False)
        return sampler

    def _weights(self, owner: str, body: bodies.CreateSamplingSession) -> dict[str, object]:
        path = body.model_path
        if path is None:
            self._check_base(body.base_model or "")
            return {"weights": naming.BASE, "folder": None, "path": None, "base_model": self.served.name}
        checkpoint = self.registry.checkpoint(path, owner)
        return {
            "weights": path,
            "folder": checkpoint.facts["folder"],
            "path": path,
            "base_model": checkpoint.facts["base_model"],
        }

    def sample(self, owner: str, body: bodies.Sample) -> Operation:
        """Queue a sampling request. Raises RequestError if it cannot be served."""
        sampler, seq = body.sampling_session_id, body.seq_id
        row = self.registry.sampler(sampler, owner)
        self.registry.hear(sampler.partition(":")[0])
        self.operations.open_line(sampler, ordered=False)
        request, content = self._request(body, f"{sampler}:{seq}"), _content(body)
        operation = Operation(
            id=naming.operation_name(sampler, seq),
            owner=owner,
            line=sampler,
            seq=seq,
            kind="sample",
            header={"do": "sample", "weights": row.facts["weights"], "folder": row.facts["folder"]},
            parsed=request,
            weight=request.num_samples,
            held=OPERATION_BYTES + len(content) + NUMBER_BYTES * len(request.token_ids),
            digest=digest_of(content),
        )
        return self.operations.add(operation)

    def _request(self, body: bodies.Sample, id: str) -> SampleRequest:
        # Refuse requests that cannot be served.
        tokens, params, served = self._prompt(body.prompt), body.sampling_params, self.served
        room = served.longest - len(tokens)
        if room < 1:
            raise RequestError(
                f"the prompt of {len(tokens)} tokens leaves no room for a sample: {served.longest} is the most that "
                "both may have together"
            )
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
            if getattr(body, name):
                raise RequestError(f"{name} is not served; leave it out")
        if body.record_stability_info:
            raise RequestError(
                "record_stability_info belongs to loss_fn='stable_reinforce', which is not served; choose "
                "another loss_fn, such as 'importance_sampling'"
            )
        if 0 < params.temperature < bodies.LEAST_TEMPERATURE:
            raise RequestError(
                f"sampling_params.temperature={params.temperature!r} must be 0, for the most likely tokens, or from "
                f"{bodies.LEAST_TEMPERATURE} to 100"
            )
        # Fill in the model's own limits and stops.
        max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        self._check_size(body, len(tokens), max_tokens)
        stop_ids, stop_texts = bodies.stop_conditions(params.stop, served.stop_ids, served.vocab_size)
        return SampleRequest(
            request_id=id,
            token_ids=tokens,
            num_samples=body.num_samples,
            max_tokens=max_tokens,
            seed=request_seed(served.seed, *((id,) if params.seed is None else ("client", params.seed))),
            temperature=params.temperature,
            top_k=max(0, params.top_k),
            top_p=params.top_p,
            stop_ids=stop_ids,
            stop_texts=stop_texts,
            prompt_logprobs=bool(body.prompt_logprobs),
            prompt_top=body.topk_prompt_logprobs or 0,
            top=body.topk_sample_logprobs or 0,
        )

    def _prompt(self, prompt: bodies.Prompt) -> tuple[int, ...]:
        """Return a prompt's tokens. Raises RequestError for chunks that are not text, and for unknown tokens."""
        for number, chunk in enumerate(prompt.chunks):
            if chunk.type != "encoded_text":
                raise RequestError(
                    f"prompt.chunks[{number}] is of type {quoted(chunk.type)}; only encoded_text is served here"
                )
        tokens = tuple(itertools.chain.from_iterable(chunk.tokens for chunk in prompt.chunks))
        if not tokens:
            raise RequestError("prompt has no token")
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self.served.vocab_size:
                raise RequestError(
                    f"prompt holds token {quoted(token)}, and the vocabulary has {self.served.vocab_size} tokens"
                )
        return tokens

    def _check_size(self, body: bodies.Sample, prompt: int, max_tokens: int) -> None:
        """Raise RequestError if a request wants more samples or log-probs than the server makes at once.

        prompt: the number of the prompt's tokens.
        max_tokens: the maximum of tokens of a sample.
        """
        most, count = self.max_samples, body.num_samples
        if count > most:
            raise RequestError(f"num_samples={count} is above serve.max_batch_samples={most}; ask in several requests")
        top, of_prompt = body.topk_sample_logprobs or 0, body.topk_prompt_logprobs or 0
        if max(top, of_prompt) > self.served.vocab_size:
            name = "topk_sample_logprobs" if top > self.served.vocab_size else "topk_prompt_logprobs"
            raise RequestError(f"{name}={max(top, of_prompt)}, and the vocabulary has {self.served.vocab_size} tokens")
        if (top or of_prompt) and not self.served.top_logprobs:
            name = "topk_sample_logprobs" if top else "topk_prompt_logprobs"
            raise RequestError(
                f"{name}={top or of_prompt} is not served by rollout.engine=vllm; leave it out, or ask the server's "
                "operator for rollout.engine=transformers"
            )
        if (wanted := top * count * max_tokens + of_prompt * prompt) > MOST_TOP_LOGPROBS:
            raise RequestError(
                f"topk_sample_logprobs={top} of {count} samples of {max_tokens} tokens and topk_prompt_logprobs="
                f"{of_prompt} of {prompt} are {wanted:,} log-probs, and {MOST_TOP_LOGPROBS:,} are given in one answer; "
                "ask for fewer"
            )


def _check_optimizer(config: bodies.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise RequestError(f"optimizer_config.type={quoted(config.type)} is not served; AdamW is, as 'adamw'")


def _content(body: bodies.Body) -> bytes:
    """Return a body as JSON. Bodies with equal fields give equal bytes, so a repeated request is recognised."""
    return body.model_dump_json().encode()


def _fault(error: RequestError) -> dict[str, object]:
    """Return the header of an operation that waits for its turn like any other, and then fails with ``error``."""
    return {"do": "fail", "error": str(error), "fault": (error.fault or Fault.USER).value}
