"""The protobuf messages of Tinker's API, declared by their field numbers (tinker 0.25 to 0.38, ``tinker_public``).

The SDK's own generated module is not imported, since it would import the whole client. Also, a
server must read messages of clients whose version is not the installed one. protobuf keeps fields
that are not declared here as unknown fields, and they are ignored.
"""

from __future__ import annotations

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "megatron_rl_tinker"
_SCALARS = {
    "double": descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
    "float": descriptor_pb2.FieldDescriptorProto.TYPE_FLOAT,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "uint32": descriptor_pb2.FieldDescriptorProto.TYPE_UINT32,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
}
# message → its fields (name, number, type). Types: ``repeated T``; ``optional T``, whose presence is known;
# ``map T``, with texts as keys; ``one T``, a member of a oneof. Enumerations are sent as int32.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "SampleResponse": (
        ("sequences", 1, "repeated SampledSequence"),
        ("prompt_logprobs", 2, "optional bytes"),
        ("topk_prompt_logprobs", 3, "optional TopkLogprobs"),
        ("prompt_cache_hit_tokens", 4, "int32"),
        ("target_prompt_logprobs", 5, "optional Tensor"),
    ),
    "SampledSequence": (
        ("stop_reason", 1, "int32"),
        ("tokens", 2, "bytes"),
        ("logprobs", 3, "optional bytes"),
        ("topk_sampled_logprobs", 4, "optional TopkLogprobs"),
    ),
    "TopkLogprobs": (("token_ids", 1, "bytes"), ("logprobs", 2, "bytes"), ("k", 3, "uint32"), ("length", 4, "uint32")),
    "SparseCsr": (("values", 1, "bytes"), ("crow_indices", 2, "bytes"), ("col_indices", 3, "bytes")),
    "Tensor": (
        ("dense", 1, "one bytes"),
        ("sparse_csr", 2, "one SparseCsr"),
        ("dtype", 3, "int32"),
        ("shape", 4, "repeated int64"),
    ),
    "BatchedTensor": (
        ("data", 1, "bytes"),
        ("offsets", 2, "bytes"),
        ("dtype", 3, "int32"),
        ("trailing_shape", 4, "repeated int64"),
    ),
    "ArrayRecord": (("type_tag", 1, "string"), ("fields", 2, "map BatchedTensor"), ("num_datums", 3, "int64")),
    "ForwardBackwardOutput": (
        ("loss_fn_output_type", 1, "string"),
        ("loss_fn_outputs", 2, "repeated ArrayRecord"),
        ("metrics", 3, "map double"),
    ),
    "ForwardBackwardRequest": (
        ("model_id", 1, "string"),
        ("seq_id", 2, "int32"),
        ("data", 3, "repeated Datum"),
        ("loss_fn", 4, "string"),
        ("loss_fn_config", 5, "map double"),
        ("forward_only", 6, "bool"),
        ("loss_fn_config_v2", 7, "map LossConfigValue"),
    ),
    "LossConfigValue": (("number", 1, "one double"), ("text", 2, "one string")),
    "Datum": (("model_input", 1, "repeated Chunk"), ("loss_fn_inputs", 2, "map Tensor")),
    "Chunk": (("encoded_text", 1, "one EncodedTextChunk"), ("image", 2, "one Other"), ("dmel", 3, "one Other")),
    "EncodedTextChunk": (("tokens", 1, "bytes"),),
    "Other": (),
}
FLOAT32, INT64 = 1, 2  # values of a tensor's ``dtype``
STOP, LENGTH = 0, 1  # values of a sequence's ``stop_reason``


def _entry_name(field: str) -> str:
    return "".join(part.capitalize() for part in field.split("_")) + "Entry"


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


def _add_field(message: descriptor_pb2.DescriptorProto, name: str, number: int, form: str) -> None:
    label, _, kind = form.rpartition(" ")
    field = message.field.add(name=name, number=number)
    field.label = getattr(field, "LABEL_REPEATED" if label in ("repeated", "map") else "LABEL_OPTIONAL")
    if label == "map":
        entry = message.nested_type.add(name=_entry_name(name))
        entry.options.map_entry = True
        for part, (part_name, part_kind) in enumerate((("key", "string"), ("value", kind)), start=1):
            of_entry = entry.field.add(name=part_name, number=part, label=field.LABEL_OPTIONAL)
            _set_type(of_entry, part_kind)
        field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{message.name}.{entry.name}"
        return
    _set_type(field, kind)
    if label == "optional":
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    elif label == "one":
        if not message.oneof_decl:
            message.oneof_decl.add(name="kind")
        field.oneof_index = 0


def _classes() -> dict[str, type]:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, form in fields:
            _add_field(message, field_name, number, form)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _classes()
SampleResponse = _CLASSES["SampleResponse"]
ForwardBackwardOutput = _CLASSES["ForwardBackwardOutput"]
ForwardBackwardRequest = _CLASSES["ForwardBackwardRequest"]
