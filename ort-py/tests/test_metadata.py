"""What a session tells about its model."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import models
import numpy as np
from harness import C, Gives, Raises, case, check, ort, session, table


def kinds(held: Any) -> list[str]:
    return [a.type for a in (*held.get_inputs(), *held.get_outputs())]


@table(
    "element, expected",
    [
        case(e, e, Gives([f"tensor({e})"] * 2))
        for e in models.ELEMENT_TYPES
        if e not in ("int4", "uint4")
    ],
)
def test_element_type(element: str, expected: Any) -> None:
    """Type strings of tensors."""
    check(expected, lambda: kinds(session("identity", element)))


@table(
    "name, arguments, expected",
    [
        case("int4", "cast", ("int4", "float"), Gives(["tensor(int4)", "tensor(float)"])),
        case("uint4", "cast", ("float", "uint4"), Gives(["tensor(float)", "tensor(uint4)"])),
        case("sequence", "sequence_identity", (), Gives(["seq(tensor(float))"] * 2)),
        case("sequence_int64", "sequence_identity", ("int64",), Gives(["seq(tensor(int64))"] * 2)),
        case(
            "sequence_string",
            "sequence_identity",
            ("string",),
            Gives(["seq(tensor(string))"] * 2),
        ),
        case("sequence_bool", "sequence_identity", ("bool",), Gives(["seq(tensor(bool))"] * 2)),
        case(
            "sequence_float16",
            "sequence_identity",
            ("float16",),
            Gives(["seq(tensor(float16))"] * 2),
        ),
        case(
            "map_string_float",
            "dict_vectorizer",
            ("string", "float"),
            Gives(["map(string,tensor(float))", "tensor(float)"]),
        ),
        case(
            "map_string_int64",
            "dict_vectorizer",
            ("string", "int64"),
            Gives(["map(string,tensor(int64))", "tensor(int64)"]),
        ),
        case(
            "map_string_double",
            "dict_vectorizer",
            ("string", "double"),
            Gives(["map(string,tensor(double))", "tensor(double)"]),
        ),
        case(
            "map_int64_float",
            "dict_vectorizer",
            ("int64", "float"),
            Gives(["map(int64,tensor(float))", "tensor(float)"]),
        ),
        case(
            "map_int64_double",
            "dict_vectorizer",
            ("int64", "double"),
            Gives(["map(int64,tensor(double))", "tensor(double)"]),
        ),
        case(
            "map_int64_string",
            "dict_vectorizer",
            ("int64", "string"),
            Gives(["map(int64,tensor(string))", "tensor(string)"]),
        ),
        case("zip_map", "zip_map", (), Gives(["tensor(float)", "seq(map(string,tensor(float)))"])),
        case(
            "zip_map_int64",
            "zip_map",
            ("int64",),
            Gives(["tensor(float)", "seq(map(int64,tensor(float)))"]),
        ),
        case("optional", "optional_identity", (), Gives(["optional(tensor(float))"] * 2)),
        case(
            "optional_int64",
            "optional_tensor",
            ("int64",),
            Gives(["optional(tensor(int64))", "tensor(bool)", "tensor(int64)"]),
        ),
        case(
            "optional_sequence",
            "optional_sequence",
            (),
            Gives(["optional(seq(tensor(float)))", "tensor(bool)"]),
        ),
    ],
)
def test_type(name: str, arguments: tuple[Any, ...], expected: Any) -> None:
    """Type strings of all kinds."""
    check(expected, lambda: kinds(session(name, *arguments)))


SHAPES = {
    "numbers": [2, 3],
    "symbols": ["batch", "length"],
    "mixed": ["batch", 3],
    "unknown": [None, 3],
    "empty_symbol": [None, 3],
    "scalar": [],
    "no_shape": [],
    "zero": [0, 3],
}


def shape_of(name: str, outputs: bool) -> Any:
    held = session("shapes")
    args = held.get_outputs() if outputs else held.get_inputs()
    return next(a.shape for a in args if a.name == (name + "_out" if outputs else name))


@table("name, expected", [case(n, n, Gives(s)) for n, s in SHAPES.items()])
def test_input_shape(name: str, expected: Any) -> None:
    """Dimensions: numbers, symbols, None."""
    check(expected, lambda: shape_of(name, False))


@table("name, expected", [case(n, n, Gives(s)) for n, s in SHAPES.items()])
def test_output_shape(name: str, expected: Any) -> None:
    """The same for outputs."""
    check(expected, lambda: shape_of(name, True))


def overridden(add: Callable[[Any], None], name: str = "add_one") -> list[Any]:
    given = ort.SessionOptions()
    add(given)
    held = ort.InferenceSession(models.path(name), given)
    return [a.shape for a in (*held.get_inputs(), *held.get_outputs())]


def run_overridden(rows: int) -> Any:
    given = ort.SessionOptions()
    given.add_free_dimension_override_by_name("batch", 4)
    held = ort.InferenceSession(models.path("add_one"), given)
    return held.run(None, {"x": np.zeros((rows, 3), np.float32)})


def set_twice(given: Any) -> None:
    given.add_free_dimension_override_by_name("batch", 4)
    given.add_free_dimension_override_by_name("batch", 5)


@table(
    "read, expected",
    [
        case("sequence", lambda: session("sequence_identity").get_inputs()[0].shape, Gives([])),
        case("map", lambda: session("dict_vectorizer").get_inputs()[0].shape, Gives([])),
        case("sequence_of_maps", lambda: session("zip_map").get_outputs()[0].shape, Gives([])),
        case("optional", lambda: session("optional_identity").get_inputs()[0].shape, Gives(["n"])),
        case(
            "optional_sequence",
            lambda: session("optional_sequence").get_inputs()[0].shape,
            Gives([]),
        ),
        case(
            "declared_inputs",
            lambda: [a.shape for a in session("declared_sizes").get_inputs()],
            Gives([["?", "past + length", None, "n"]]),
        ),
        case(
            "declared_outputs",
            lambda: [a.shape for a in session("declared_sizes").get_outputs()],
            Gives([["any", "past + length", None, "other"], [4], [4, "hits"]]),
        ),
        case(
            "inferred_rank",
            lambda: session("wrong_declared").get_outputs()[0].shape,
            Gives([2, 3]),
        ),
        case(
            "override",
            lambda: overridden(lambda o: o.add_free_dimension_override_by_name("batch", 4)),
            Gives([[4, 3], [4, 3]]),
        ),
        case(
            "override_unknown",
            lambda: overridden(lambda o: o.add_free_dimension_override_by_name("zzz", 4)),
            Gives([["batch", 3], ["batch", 3]]),
        ),
        case("override_twice", lambda: overridden(set_twice), Gives([[4, 3], [4, 3]])),
        case(
            "override_denotation",
            lambda: overridden(
                lambda o: o.add_free_dimension_override_by_denotation("DATA_BATCH", 4), "denoted"
            ),
            Gives([[4, 3], [4, 3]]),
        ),
        case(
            "override_other_denotation",
            lambda: overridden(
                lambda o: o.add_free_dimension_override_by_denotation("OTHER", 4), "denoted"
            ),
            Gives([["d", 3], ["d", 3]]),
        ),
        case(
            "override_str",
            lambda: overridden(lambda o: o.add_free_dimension_override_by_name("batch", "4")),
            Raises("TypeError"),
        ),
        case(
            "override_float",
            lambda: overridden(lambda o: o.add_free_dimension_override_by_name("batch", 4.5)),
            Raises("TypeError"),
        ),
        case(
            "override_numpy",
            lambda: overridden(
                lambda o: o.add_free_dimension_override_by_name("batch", np.int64(4))
            ),
            Gives([[4, 3], [4, 3]]),
        ),
        case("override_runs", lambda: run_overridden(4), Gives([np.ones((4, 3), np.float32)])),
        case(
            "override_other_size",
            lambda: run_overridden(1),
            Raises(
                "InvalidArgument",
                "Got invalid dimensions for input: x .* index: 0 Got: 1 Expected: 4",
            ),
        ),
    ],
)
def test_shape(read: Callable[[], Any], expected: Any) -> None:
    """Shapes that are not simply declared."""
    check(expected, read)


def node_arg() -> Any:
    return session("shapes").get_inputs()[2]


def written_shape() -> Any:
    held = node_arg()
    held.shape.append(5)
    return held.shape


def outlives() -> list[Any]:
    args = ort.InferenceSession(models.path("add_one")).get_inputs()
    return [args[0].name, args[0].type, args[0].shape]


@table(
    "read, expected",
    [
        case(
            "str",
            lambda: str(node_arg()),
            Gives("NodeArg(name='mixed', type='tensor(float)', shape=['batch', 3])"),
        ),
        case(
            "str_none",
            lambda: str(session("shapes").get_inputs()[3]),
            Gives("NodeArg(name='unknown', type='tensor(float)', shape=[None, 3])"),
        ),
        case(
            "str_scalar",
            lambda: str(session("shapes").get_inputs()[5]),
            Gives("NodeArg(name='scalar', type='tensor(float)', shape=[])"),
        ),
        case("kind", lambda: type(node_arg()) is ort.NodeArg, Gives(True)),
        case("shape_is_a_list", lambda: type(node_arg().shape) is list, Gives(True)),
        case("shape_is_a_copy", written_shape, Gives(["batch", 3])),
        case("outlives_the_session", outlives, Gives(["x", "tensor(float)", ["batch", 3]])),
        case(
            "name_is_read_only",
            lambda: setattr(node_arg(), "name", "q"),
            Raises("AttributeError"),
        ),
        case(
            "type_is_read_only",
            lambda: setattr(node_arg(), "type", "q"),
            Raises("AttributeError"),
        ),
        case(
            "shape_is_read_only",
            lambda: setattr(node_arg(), "shape", [1]),
            Raises("AttributeError"),
        ),
        case(
            "no_other_attribute",
            lambda: setattr(node_arg(), "foo", 1),
            Raises("AttributeError", "foo"),
        ),
        case("no_constructor", lambda: ort.NodeArg(), Raises("TypeError")),
        case("weak_reference", lambda: (lambda a: weakref.ref(a)() is a)(node_arg()), Gives(True)),
        case("equal_to_itself", lambda: node_arg() == node_arg(), Gives(True)),
        case("hashable", lambda: (lambda a: {a: 1}[a])(node_arg()), Gives(1)),
        case(
            "pickle",
            lambda: str(pickle.loads(pickle.dumps(node_arg()))),
            Gives("NodeArg(name='mixed', type='tensor(float)', shape=['batch', 3])"),
        ),
        case("deep_copy", lambda: copy.deepcopy(node_arg()).shape, Gives(["batch", 3])),
    ],
)
def test_node_arg(read: Callable[[], Any], expected: Any) -> None:
    """NodeArg as an object."""
    check(expected, read)


def names(args: Any) -> list[str]:
    return [a.name for a in args]


@table(
    "read, expected",
    [
        case("inputs_is_a_list", lambda: type(session("two").get_inputs()) is list, Gives(True)),
        case("outputs_is_a_list", lambda: type(session("two").get_outputs()) is list, Gives(True)),
        case(
            "overridable_is_a_list",
            lambda: type(session("two").get_overridable_initializers()) is list,
            Gives(True),
        ),
        case("inputs_in_order", lambda: names(session("two").get_inputs()), Gives(["a", "b"])),
        case(
            "outputs_in_order",
            lambda: names(session("two").get_outputs()),
            Gives(["sum", "difference"]),
        ),
        case("no_inputs", lambda: names(session("no_inputs").get_inputs()), Gives([])),
        case("no_initializers", lambda: names(session("add_one").get_inputs()), Gives(["x"])),
        case(
            "overridable_is_no_input",
            lambda: names(session("overridable").get_inputs()),
            Gives(["x"]),
        ),
        case(
            "overridable",
            lambda: [str(a) for a in session("overridable").get_overridable_initializers()],
            Gives(["NodeArg(name='w', type='tensor(float)', shape=[2])"]),
        ),
        case(
            "constant_is_not_overridable",
            lambda: names(session("add_one").get_overridable_initializers()),
            Gives([]),
        ),
        case(
            "input_is_output",
            lambda: names(session("input_output").get_outputs()),
            Gives(["x", "y"]),
        ),
    ],
)
def test_lists(read: Callable[[], Any], expected: Any) -> None:
    """Inputs, outputs, overridable initializers."""
    check(expected, read)


def described() -> Any:
    return session("described").get_modelmeta()


def plain() -> Any:
    return session("add_one").get_modelmeta()


def meta_outlives() -> str:
    held = ort.InferenceSession(models.path("described"))
    meta = held.get_modelmeta()
    del held
    return meta.producer_name


@table(
    "read, expected",
    [
        case("producer_name", lambda: described().producer_name, Gives("maker")),
        case("domain", lambda: described().domain, Gives("org.example")),
        case("description", lambda: described().description, Gives("what the model does")),
        case("graph_name", lambda: described().graph_name, Gives("the graph")),
        case(
            "graph_description",
            lambda: described().graph_description,
            Gives("what the graph does"),
        ),
        case("version", lambda: described().version, Gives(7)),
        case(
            "map_keys",
            lambda: sorted(described().custom_metadata_map),
            Gives(["author", "empty", "long", "words"]),
        ),
        case("map_is_a_dict", lambda: type(described().custom_metadata_map) is dict, Gives(True)),
        case("map_text", lambda: described().custom_metadata_map["words"], Gives("é 猫")),
        case("map_empty_value", lambda: described().custom_metadata_map["empty"], Gives("")),
        case(
            "map_long_value",
            lambda: len(described().custom_metadata_map["long"]),
            Gives(300_000),
        ),
        case(
            "map_missing_key",
            lambda: described().custom_metadata_map["zz"],
            Raises("KeyError", "zz"),
        ),
        case("no_producer", lambda: plain().producer_name, Gives("")),
        case("no_domain", lambda: plain().domain, Gives("")),
        case("no_description", lambda: plain().description, Gives("")),
        case("default_graph_name", lambda: plain().graph_name, Gives("graph")),
        case("no_graph_description", lambda: plain().graph_description, Gives("")),
        case("no_version", lambda: plain().version, Gives(9223372036854775807)),
        case("no_map", lambda: plain().custom_metadata_map, Gives({})),
        case("kind", lambda: type(plain()) is ort.ModelMetadata, Gives(True)),
        case("native_kind", lambda: ort.ModelMetadata is C.ModelMetadata, Gives(True)),
        case("outlives_the_session", meta_outlives, Gives("maker")),
        case(
            "no_other_attribute",
            lambda: setattr(plain(), "foo", 1),
            Raises("AttributeError", "foo"),
        ),
        case("no_constructor", lambda: ort.ModelMetadata(), Raises("TypeError")),
        case(
            "pickle",
            lambda: pickle.loads(pickle.dumps(described())).producer_name,
            Gives("maker"),
        ),
    ],
)
def test_model_metadata(read: Callable[[], Any], expected: Any) -> None:
    """ModelMetadata."""
    check(expected, read)
