"""Expressions in CEL as the API server takes them: Google's evaluator, with the types and rules of a MutatingAdmissionPolicy.

Compiled is what Kubernetes 1.34 has of the language: optional values, and the functions on texts in their version 2
(https://kubernetes.io/docs/reference/using-api/cel/). Costs are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings
from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, json_format, message, message_factory, struct_pb2

Types = Mapping[str, cel.Type]


class CelError(Exception):
    """The expression is none, or gives no value; the text says why."""


class Expression:
    """An expression over `object`, and over variables `variables.<name>` of which the types are given."""

    def __init__(self, text: str, variables: Types) -> None:
        environment = cel.NewEnv(
            _PATCHES,
            variables={"object": cel.Type.DYN, **_qualified(variables)},
            extensions=[ext_strings.ExtStrings(version=2), ext_optional.ExtOptional()],
        )
        try:
            self._compiled = environment.compile(text)
        except RuntimeError as error:
            raise CelError(f"{error}\n{text}") from None
        for literal in _mixed_literals(self._compiled.serialize()):
            raise CelError(f"a {literal} has values of more than one type, which the API server refuses\n{text}")

    @property
    def type(self) -> cel.Type:
        """The type of its value."""
        return self._compiled.return_type()

    def value(self, manifest: Mapping[str, Any], variables: Mapping[str, Any]) -> Any:
        """Its value as it would be in JSON, for a manifest as `object`. Raises CelError, also where a variable is missing."""
        value = self._compiled.eval(data={"object": manifest, **_qualified(variables)})
        if value.type() == cel.Type.ERROR:
            raise CelError(str(value.plain_value()))
        return _as_json(value.plain_value())


def _qualified(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {f"variables.{name}": value for name, value in variables.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, message.Message):
        return _as_json(json_format.MessageToDict(value))
    if isinstance(value, Mapping):
        return {key: _as_json(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_as_json(one) for one in value]
    # The patch is a message of Protocol Buffers, which has no numbers but floats.
    return int(value) if isinstance(value, float) and value.is_integer() else value


_STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_BYTES = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_INT64 = descriptor_pb2.FieldDescriptorProto.TYPE_INT64
_BOOL = descriptor_pb2.FieldDescriptorProto.TYPE_BOOL


def _pool(name: str, messages: Mapping[str, Mapping[str, tuple[int, int | str]]], *needs: str) -> descriptor_pool.DescriptorPool:
    """Message types by name, each with its fields: number and type. A name that ends in an `s` is that of a repeated field."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", syntax="proto3", dependency=needs)
    for message_name, fields in messages.items():
        descriptor = file.message_type.add(name=message_name)
        for field_name, (number, kind) in fields.items():
            field = descriptor.field.add(name=field_name, number=number)
            field.label = field.LABEL_REPEATED if field_name.endswith("s") else field.LABEL_OPTIONAL
            if isinstance(kind, str):
                field.type, field.type_name = field.TYPE_MESSAGE, f".{kind}"
            else:
                field.type = descriptor_pb2.FieldDescriptorProto.Type.ValueType(kind)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return pool


_PATCHES = _pool(
    "patches",
    {"JSONPatch": {"op": (1, _STRING), "path": (2, _STRING), "from": (3, _STRING), "value": (4, "google.protobuf.Value")}},
    "google/protobuf/struct.proto",
)

# What is needed of https://github.com/google/cel-spec/tree/master/proto/cel/expr (checked.proto and syntax.proto). Types are
# left as bytes, which are the same for the same type.
_CHECKED = _pool(
    "checked",
    {
        "CheckedExpr": {"types": (3, "TypeEntry"), "expr": (4, "Expr")},
        "TypeEntry": {"key": (1, _INT64), "value": (2, _BYTES)},
        "Type": {"abstract_type": (14, "AbstractType")},
        "AbstractType": {"parameter_types": (2, _BYTES)},
        "Expr": {
            "id": (2, _INT64),
            "select": (5, "Select"),
            "call": (6, "Call"),
            "list": (7, "List"),
            "struct": (8, "Struct"),
            "comprehension": (9, "Comprehension"),
        },
        "Select": {"operand": (1, "Expr")},
        "Call": {"target": (1, "Expr"), "args": (3, "Expr")},
        "List": {"elements": (1, "Expr")},
        "Struct": {"message_name": (1, _STRING), "entries": (2, "Entry")},
        "Entry": {"map_key": (3, "Expr"), "value": (4, "Expr"), "optional": (5, _BOOL)},
        "Comprehension": {
            "range": (2, "Expr"),
            "init": (4, "Expr"),
            "condition": (5, "Expr"),
            "step": (6, "Expr"),
            "result": (7, "Expr"),
        },
    },
)


def _parsed(name: str, content: bytes) -> Any:
    return message_factory.GetMessageClass(_CHECKED.FindMessageTypeByName(name)).FromString(content)


def _mixed_literals(serialized: bytes) -> Iterator[str]:
    """The literals in a compiled expression that the API server would not take, each as `list` or `map`.

    Its environment has `HomogeneousAggregateLiterals`, which the evaluator here has not: all elements are of one type, all dyn()
    at most. (k8s.io/apiserver/pkg/cel/environment/base.go)
    """
    checked = _parsed("CheckedExpr", any_pb2.Any.FromString(serialized).value)
    types = {entry.key: entry.value for entry in checked.types}
    for expression in _expressions(checked.expr):
        entries = [] if expression.struct.message_name else list(expression.struct.entries)
        if len({types[element.id] for element in expression.list.elements}) > 1:
            yield "list"
        if len({_type_of(entry, types) for entry in entries}) > 1 or len({types[entry.map_key.id] for entry in entries}) > 1:
            yield "map"


def _type_of(entry: Any, types: Mapping[int, bytes]) -> bytes:
    """The type of an entry's value; an optional one is an optional value."""
    stated = types[entry.value.id]
    return _parsed("Type", stated).abstract_type.parameter_types[0] if entry.optional else stated


def _expressions(tree: message.Message) -> Iterator[Any]:
    if tree.DESCRIPTOR.name == "Expr":
        yield tree
    for field, value in tree.ListFields():
        if field.message_type is not None:
            for child in value if field.is_repeated else (value,):
                yield from _expressions(child)
