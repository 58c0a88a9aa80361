"""Weight-only quantization: constants of `MatMul` and `Gather` in blocks of 2, 4 or 8 bits.

Products become `MatMulNBits`, or read their weight through a blocked `DequantizeLinear`; tables
become `GatherBlockQuantized`. Bodies of `If`, `Loop` and `Scan` are changed, too.

Needs the package `onnx`. `python -m ort_runtime.quantization.matmul_nbits_quantizer --input_model
in.onnx --output_model out.onnx`
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, version_converter

from . import _block_weights as blocks
from ._block_weights import Blocks, Scheme
from ._gptq import Hessians
from ._graph_weights import FLOATS, Found, bodies, constant, remove_unread
from ._output_rank import extend_output_rank, ranks_of
from ._weight_only_configs import DefaultWeightOnlyQuantConfig as DefaultWeightOnlyQuantConfig
from ._weight_only_configs import GPTQWeightOnlyQuantConfig as GPTQWeightOnlyQuantConfig
from ._weight_only_configs import HQQWeightOnlyQuantConfig as HQQWeightOnlyQuantConfig
from ._weight_only_configs import KQuantWeightOnlyQuantConfig as KQuantWeightOnlyQuantConfig
from ._weight_only_configs import NVAWQWeightOnlyQuantConfig as NVAWQWeightOnlyQuantConfig
from ._weight_only_configs import RTNWeightOnlyQuantConfig as RTNWeightOnlyQuantConfig
from ._weight_only_configs import WeightOnlyQuantConfig as WeightOnlyQuantConfig
from ._weight_only_configs import require
from .onnx_model import ONNXModel
from .quant_utils import QuantFormat, codes_to_tensor, get_opset_version

logger = logging.getLogger(__name__)

_MS_DOMAIN = "com.microsoft"
#: The operators that read constants in blocks.
_OPERATORS = ("MatMul", "Gather")
#: What 4-bit types need.
_INT4_OPSET, _INT4_IR_VERSION = 21, 10


@dataclass(frozen=True)
class _Names:
    """What the parts of a quantized weight are called."""

    codes: str
    scales: str
    zero_points: str


class MatMulNBitsQuantizer:
    """Quantizes the weights of a model in place.

    Args:
        model: the model, or its path.
        bits: the bits of a code: 2, 4 or 8.
        block_size: the rows of a column that share a scale: 16, 32, 64, 128 or 256.
        is_symmetric: blocks have no zero point.
        accuracy_level: the precision in which `MatMulNBits` takes its other input: 1 float32, 2
            float16, 3 bfloat16, 4 int8. None or 0 leaves it to the runtime.
        nodes_to_exclude: names of nodes that stay as they are.
        nodes_to_include: names of nodes that are quantized whatever their operator's type.
        quant_format: operators on codes, or floats behind `DequantizeLinear`.
        op_types_to_quantize, quant_axes, channel_wised_quantize: see `DefaultWeightOnlyQuantConfig`.
        algo_config: the method with its options, which win over those here. The default is
            `DefaultWeightOnlyQuantConfig` with them.

    Raises:
        AssertionError: options that do not fit together.
        NotImplementedError: whole columns with `QOperator`, or `nvidia_awq`.
        TypeError: `algo_config` is no configuration.

    Example:
        >>> quantizer = MatMulNBitsQuantizer("model.onnx", block_size=32, is_symmetric=True)
        >>> quantizer.process()
        >>> quantizer.model.save_model_to_file("model_int4.onnx", use_external_data_format=True)
    """

    def __init__(
        self,
        model: ModelProto | str,
        bits: int = 4,
        block_size: int = 128,
        is_symmetric: bool = False,
        accuracy_level: int | None = None,
        nodes_to_exclude: Iterable[str] | None = None,
        nodes_to_include: Iterable[str] | None = None,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
        quant_axes: Sequence[tuple[str, int]] | None = None,
        channel_wised_quantize: bool = False,
        algo_config: WeightOnlyQuantConfig | None = None,
    ) -> None:
        if algo_config is None:
            algo_config = DefaultWeightOnlyQuantConfig(
                block_size,
                is_symmetric,
                accuracy_level,
                quant_format,
                op_types_to_quantize,
                quant_axes,
                bits,
                channel_wised_quantize,
            )
        if not isinstance(algo_config, WeightOnlyQuantConfig):
            raise TypeError(f"algo_config must be a WeightOnlyQuantConfig, not {type(algo_config)}")
        self.model_path = None if isinstance(model, ModelProto) else os.fspath(model)
        loaded = model if isinstance(model, ModelProto) else onnx.load(os.fspath(model))
        self.model = ONNXModel(loaded)
        self.bits = bits
        self.block_size = block_size
        self.is_symmetric = is_symmetric
        self.accuracy_level = accuracy_level
        self.nodes_to_exclude = set(nodes_to_exclude or ())
        self.nodes_to_include = set(nodes_to_include or ())
        self.algo_config = algo_config
        self._method = _method_of(self)
        self._ranks: dict[str, int] | None = None
        self._written: dict[tuple[int, str, str], Any] = {}
        self._added_values: set[str] = set()
        # Alive, so that none of them gets the identity of another.
        self._graphs: list[GraphProto] = []

    def process(self) -> None:
        """Quantizes the weights; `model` has the result.

        Raises:
            ValueError: 4-bit types need a later opset, to which the model cannot be converted, or
                GPTQ has no samples.
        """
        config = self.algo_config
        if config.quant_format == QuantFormat.QDQ or "Gather" in config.op_types_to_quantize:
            self._raise_opset()
        if config.quant_format == QuantFormat.QOperator:
            self._import_domain()
        self._method.prepare(self)
        self._process_graph([self.model.graph()])
        self.model.clean_initializers()

    def int4_quant_algo(self) -> None:
        """Quantizes the weights, as `process` does."""
        self.process()

    def products(self) -> Iterator[tuple[str, int]]:
        """Yields what weights are multiplied with, and the length of its last axis."""
        yield from self._products([self.model.graph()])

    def _products(self, stack: list[GraphProto]) -> Iterator[tuple[str, int]]:
        for node in stack[-1].node:
            for body in bodies(node):
                yield from self._products([*stack, body])
            if node.op_type == "MatMul" and self._is_chosen(node):
                found = constant(node.input[1], stack)
                if found is not None and len(found.tensor.dims) >= 2:
                    yield node.input[0], found.tensor.dims[-2]

    # Graphs.

    def _process_graph(self, stack: list[GraphProto]) -> None:
        """Replaces the nodes of a graph and of the bodies in it."""
        graph = stack[-1]
        self._graphs.append(graph)
        nodes: list[NodeProto] = []
        for node in graph.node:
            for body in bodies(node):
                self._process_graph([*stack, body])
                remove_unread(body)
            nodes.extend(self._replaced(node, stack) or [node])
        del graph.node[:]
        graph.node.extend(nodes)

    def _is_chosen(self, node: NodeProto) -> bool:
        if node.op_type not in _OPERATORS or node.domain not in ("", "ai.onnx"):
            return False
        if node.name in self.nodes_to_exclude:
            logger.info("node '%s' is excluded", node.name)
            return False
        is_listed = node.op_type in self.algo_config.op_types_to_quantize
        return is_listed or node.name in self.nodes_to_include

    def _replaced(self, node: NodeProto, stack: list[GraphProto]) -> list[NodeProto] | None:
        """Returns what stands for a node, None if that stays as it is."""
        if not self._is_chosen(node):
            return None
        found = constant(node.input[1 if node.op_type == "MatMul" else 0], stack)
        if found is None or found.tensor.data_type not in FLOATS:
            return None
        make = self._table if node.op_type == "Gather" else self._product
        made = make(node, found)
        if made is not None:
            logger.info("node '%s': the weight '%s' is quantized", node.name, found.tensor.name)
        return made

    def _product(self, node: NodeProto, found: Found) -> list[NodeProto] | None:
        """Returns the nodes for a product with a constant matrix."""
        shape = tuple(found.tensor.dims)
        leading = len(shape) - 2
        if leading < 0 or any(size != 1 for size in shape[:leading]):
            logger.info("node '%s' is left: its weight is no matrix", node.name)
            return None
        scheme = self._method.scheme(self, node)
        is_qdq = self.algo_config.quant_format == QuantFormat.QDQ
        if is_qdq and scheme.bits != 4:
            require(scheme.bits != 2, "QDQ format only supports 4 bits quantization")
            logger.error("MatMul only supports QOperator format for %d bits quantization.", scheme.bits)
            return None
        rank: int | None = leading + 2
        if leading:
            if self._ranks is None:
                self._ranks = ranks_of(self.model.model)
            rank = self._ranks.get(node.input[0])
        if rank is None and get_opset_version(self.model.model) < 13:
            logger.warning("node '%s' is left: the rank of its input is not known", node.name)
            return None
        output = node.output[0]
        needs_rank = rank is None or rank < leading + 2
        result = f"{output}_pre_reshape" if needs_rank else output
        make = self._dequantized_product if is_qdq else self._blocked_product
        nodes = make(node, found, scheme, result)
        if needs_rank:
            prefix = f"{node.name}_{'DQ_' if is_qdq else ''}Q{scheme.bits}_{output}"
            nodes += extend_output_rank(
                self.model.model, prefix, (node.input[0], result, output), rank, len(shape), found.graph
            )
        return nodes

    def _blocked_product(
        self, node: NodeProto, found: Found, scheme: Scheme, output: str
    ) -> list[NodeProto]:
        shape = found.tensor.dims
        names, made = self._quantized(found, scheme, node.input[0])
        attributes = {
            "K": shape[-2],
            "N": shape[-1],
            "bits": scheme.bits,
            "block_size": scheme.block_size,
        }
        if self._accuracy_level:
            attributes["accuracy_level"] = self._accuracy_level
        inputs = [node.input[0], names.codes, names.scales]
        if made.zero_points is not None:
            inputs.append(names.zero_points)
        is_named = bool(node.name) or self._method.names_nameless_nodes
        name = f"{node.name}_Q{scheme.bits}" if is_named else ""
        return [
            helper.make_node("MatMulNBits", inputs, [output], name, domain=_MS_DOMAIN, **attributes)
        ]

    @property
    def _accuracy_level(self) -> int:
        own = getattr(self.algo_config, "accuracy_level", self.accuracy_level)
        return own or 0

    def _quantized(self, found: Found, scheme: Scheme, other: str) -> tuple[_Names, Blocks]:
        """Returns the parts of a weight for `MatMulNBits`, which are added once."""
        tensor = found.tensor
        # What GPTQ makes of a weight depends on what it is multiplied with.
        form = f"{scheme} {other if self.algo_config.algorithm == 'GPTQ' else ''}"
        known = self._written.get((id(found.graph), tensor.name, form))
        if known is not None:
            return known
        matrix = numpy_helper.to_array(tensor).reshape(tensor.dims[-2:])
        made = self._method.quantize(tensor.name, matrix, scheme, other)
        taken = {weight.name for weight in found.graph.initializer}
        names = _unused(self._method.names(tensor.name, scheme), taken)
        parts = [(names.codes, made.codes), (names.scales, made.scales)]
        if made.zero_points is not None:
            parts.append((names.zero_points, made.zero_points))
        found.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in parts)
        self._written[(id(found.graph), tensor.name, form)] = names, made
        return names, made

    def _dequantized_product(
        self, node: NodeProto, found: Found, scheme: Scheme, output: str
    ) -> list[NodeProto]:
        tensor = found.tensor
        if getattr(self.algo_config, "channel_wised_quantize", False):
            scheme = Scheme(scheme.bits, max(tensor.dims[-2], 1), scheme.is_symmetric)
        prefix = f"{tensor.name}_DQ"
        key = id(found.graph), tensor.name, f"{scheme} DQ"
        names, has_points = self._written.get(key) or (None, False)
        if names is None:
            matrix = numpy_helper.to_array(tensor).reshape(tensor.dims[-2:])
            made = blocks.min_max_qdq(np.ascontiguousarray(matrix), scheme)
            bits = scheme.bits
            wanted = _Names(f"{prefix}_Q{bits}", f"{prefix}_scales", f"{prefix}_zero_points")
            names = _unused(wanted, {weight.name for weight in found.graph.initializer})
            has_points = self._add_four_bits(found.graph, names, made)
            self._written[key] = names, has_points
        inputs = [names.codes, names.scales] + [names.zero_points] * has_points
        # A node of its own for each product, so that each may be moved or fused alone.
        value = _unused_value(f"{names.codes}_output", self._added_values)
        dequantize = helper.make_node(
            "DequantizeLinear",
            inputs,
            [value],
            f"{node.name}_DQ_Q{scheme.bits}" if node.name else "",
            axis=0,
            block_size=scheme.block_size,
        )
        name = f"{node.name}_matmul_Q{scheme.bits}" if node.name else ""
        return [dequantize, helper.make_node("MatMul", [node.input[0], value], [output], name)]

    def _add_four_bits(self, graph: GraphProto, names: _Names, made: Blocks) -> bool:
        """Adds a weight of 4-bit types. Returns whether it has zero points."""
        kind = TensorProto.INT4 if made.zero_points is None else TensorProto.UINT4
        parts = [codes_to_tensor(made.codes, kind, names.codes)]
        parts.append(numpy_helper.from_array(made.scales, names.scales))
        if made.zero_points is not None:
            parts.append(codes_to_tensor(made.zero_points, kind, names.zero_points))
        graph.initializer.extend(parts)
        return made.zero_points is not None

    def _table(self, node: NodeProto, found: Found) -> list[NodeProto] | None:
        """Returns the node for rows of a constant table."""
        scheme = self._method.scheme(self, node)
        is_operator = self.algo_config.quant_format == QuantFormat.QOperator
        require(is_operator, "Gather only supports QOperator format currently.")
        if scheme.bits != 4 or self.algo_config.algorithm != "DEFAULT":
            logger.error("Gather only supports 4 bits quantization.")
            return None
        tensor, rank = found.tensor, len(found.tensor.dims)
        asked = self.algo_config.quant_axes.get("Gather", 1)
        require(-rank <= asked < rank, f"Invalid quantize axis {asked} for Gather node '{node.name}'.")
        size = scheme.block_size
        is_power = size >= 16 and size & (size - 1) == 0
        require(is_power, f"Invalid block size {size} for Gather node '{node.name}': 16, 32, 64, ...")
        axis = asked % rank
        gather_axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        key = id(found.graph), tensor.name, f"{scheme} {axis}"
        names, has_points = self._written.get(key) or (None, False)
        if names is None:
            made = blocks.rows_of_table(numpy_helper.to_array(tensor), axis, scheme)
            wanted = _Names(*(f"{tensor.name}_{part}" for part in ("Q4", "scales", "zero_points")))
            names = _unused(wanted, {weight.name for weight in found.graph.initializer})
            has_points = self._add_four_bits(found.graph, names, made)
            self._written[key] = names, has_points
        inputs = [names.codes, node.input[1], names.scales] + [names.zero_points] * has_points
        return [
            helper.make_node(
                "GatherBlockQuantized",
                inputs,
                [node.output[0]],
                f"{node.name}_Q4" if node.name else "",
                domain=_MS_DOMAIN,
                quantize_axis=axis,
                gather_axis=gather_axis,
                block_size=size,
            )
        ]

    # Versions.

    def _import_domain(self) -> None:
        if all(opset.domain != _MS_DOMAIN for opset in self.model.opset_import()):
            self.model.set_opset_import(_MS_DOMAIN, 1)

    def _raise_opset(self) -> None:
        """Converts the model to the opset of 4-bit types."""
        model = self.model.model
        if get_opset_version(model) < _INT4_OPSET:
            try:
                converted = version_converter.convert_version(model, _INT4_OPSET)
            except Exception as problem:
                raise ValueError(
                    f"4-bit types need opset {_INT4_OPSET}, and the model of opset "
                    f"{get_opset_version(model)} cannot be converted: {problem}"
                ) from problem
            model.CopyFrom(converted)
        model.ir_version = max(model.ir_version, _INT4_IR_VERSION)


def _unused(names: _Names, taken: set[str]) -> _Names:
    """Returns names that no weight has, with a number if they must differ."""
    number = 0
    made = names
    while taken & {made.codes, made.scales, made.zero_points}:
        number += 1
        made = _Names(*(f"{name}_{number}" for name in vars(names).values()))
    return made


def _unused_value(name: str, taken: set[str]) -> str:
    number, made = 0, name
    while made in taken:
        number += 1
        made = f"{name}_{number}"
    taken.add(made)
    return made


class _Method:
    """How the default method quantizes and names; the others change parts of it."""

    names_nameless_nodes = False

    def prepare(self, quantizer: MatMulNBitsQuantizer) -> None:
        """Collects what the method needs of the whole model."""

    def scheme(self, quantizer: MatMulNBitsQuantizer, node: NodeProto) -> Scheme:
        """Returns the scheme of a node's weight."""
        config: Any = quantizer.algo_config
        symmetric = getattr(config, "is_symmetric", False)
        return Scheme(config.bits, config.block_size, symmetric)

    def names(self, weight: str, scheme: Scheme) -> _Names:
        """Returns the names of a weight's parts."""
        return _Names(f"{weight}_Q{scheme.bits}", f"{weight}_scales", f"{weight}_zero_points")

    def quantize(self, name: str, weight: np.ndarray, scheme: Scheme, other: str) -> Blocks:
        """Returns the blocks of a weight that is multiplied with the value `other`."""
        return blocks.min_max(np.ascontiguousarray(weight), scheme)


class _HalfQuadratic(_Method):
    def quantize(self, name: str, weight: np.ndarray, scheme: Scheme, other: str) -> Blocks:
        return blocks.by_method(weight, scheme, "hqq")


class _Grouped(_Method):
    """Methods whose schemes may differ between nodes."""

    names_nameless_nodes = True
    is_always_asymmetric = False

    def scheme(self, quantizer: MatMulNBitsQuantizer, node: NodeProto) -> Scheme:
        own = dict((quantizer.algo_config.customized_weight_config or {}).get(node.name, {}))
        bits = own.pop("bits", quantizer.bits)
        size = own.pop("group_size", quantizer.block_size)
        name = own.pop("scheme", "sym" if quantizer.is_symmetric else "asym")
        text = f"node '{node.name}': no options {list(own)}; known are bits, group_size and scheme"
        require(not own, text)
        require(name in ("sym", "asym"), f"node '{node.name}': scheme {name!r} is not sym or asym")
        require(bits in (2, 4, 8), f"Only support 2, 4 or 8 bits quantization, not {bits!r}")
        return Scheme(bits, size, name == "sym" and not self.is_always_asymmetric)

    def names(self, weight: str, scheme: Scheme) -> _Names:
        codes = f"{weight}_Q{scheme.bits}G{scheme.block_size}"
        return _Names(codes, f"{weight}_scale", f"{weight}_zp")


class _RoundToNearest(_Grouped):
    def __init__(self, ratios: dict[str, float]) -> None:
        self.ratios = ratios

    def quantize(self, name: str, weight: np.ndarray, scheme: Scheme, other: str) -> Blocks:
        return blocks.round_to_nearest(weight, scheme, self.ratios.get(name, 1.0))


class _KQuant(_Grouped):
    is_always_asymmetric = True

    def quantize(self, name: str, weight: np.ndarray, scheme: Scheme, other: str) -> Blocks:
        return blocks.by_method(weight, scheme, "k_quant")


class _Gptq(_Grouped):
    def __init__(self, config: GPTQWeightOnlyQuantConfig) -> None:
        self.config = config
        self.hessians: Hessians | None = None

    def prepare(self, quantizer: MatMulNBitsQuantizer) -> None:
        channels = dict(quantizer.products())
        source = quantizer.model_path or quantizer.model.model
        self.hessians = Hessians(source, self.config.calibration_data_reader, channels)

    def quantize(self, name: str, weight: np.ndarray, scheme: Scheme, other: str) -> Blocks:
        config, method = self.config, "mse" if self.config.mse else "minmax"
        assert self.hessians is not None
        hessian = self.hessians.of(other)
        if hessian is None:
            return blocks.by_method(weight, scheme, method)
        return blocks.by_method(
            weight,
            scheme,
            method,
            hessian=(hessian, other),
            damping=config.percdamp,
            act_order=config.actorder,
        )


def _method_of(quantizer: MatMulNBitsQuantizer) -> _Method:
    config: Any = quantizer.algo_config
    methods: dict[str, Callable[[], _Method]] = {
        "DEFAULT": _Method,
        "HQQ": _HalfQuadratic,
        "RTN": lambda: _RoundToNearest(config.ratios),
        "k_quant": _KQuant,
        "GPTQ": lambda: _Gptq(config),
    }
    make = methods.get(config.algorithm)
    if make is None:
        raise NotImplementedError(f"there is no algorithm {config.algorithm!r}: {', '.join(methods)}")
    return make()


# The command line.


def _boolean(text: str) -> bool:
    """Returns what a flag with a value says."""
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is not True or False")
    return text.lower() in ("true", "1", "yes")


def _axis(text: str) -> tuple[str, int]:
    """Returns an operator and its axis: `MatMul:0`."""
    operator, _, axis = text.partition(":")
    try:
        return operator, int(axis)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not operator:axis") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "matmul_nbits_quantizer",
        description="Quantizes the constants of MatMul and Gather in blocks of 2, 4 or 8 bits.",
    )
    add = parser.add_argument
    add("--input_model", required=True, help="model to read")
    add("--output_model", required=True, help="model to write")
    add("--block_size", type=int, default=32, help="rows that share a scale, default 32")
    add(
        "--quant_method",
        type=str.lower,
        choices=["default", "hqq", "rtn", "k_quant", "gptq", "nvidia_awq"],
        default="default",
        help="how weights become codes; gptq and nvidia_awq need samples, which only programs give",
    )
    add("--bits", type=int, choices=[2, 4, 8], default=4, help="bits of a code, default 4")
    add(
        "--symmetric",
        type=_boolean,
        default=True,
        const=True,
        nargs="?",
        choices=[True, False],
        help="blocks have no zero point, default True",
    )
    add("--accuracy_level", type=int, help="precision of the other input: 1 float32 to 4 int8")
    add("-v", "--verbose", action="store_true", help="logs more")
    add("--nodes_to_exclude", nargs="+", default=[], help="names of nodes that stay as they are")
    add("--nodes_to_include", nargs="+", default=[], help="names of nodes that are quantized")
    add(
        "--quant_format",
        type=QuantFormat.from_string,
        choices=list(QuantFormat),
        default=QuantFormat.QOperator,
        help="operators on codes, or DequantizeLinear before MatMul",
    )
    add(
        "--op_types_to_quantize",
        nargs="+",
        choices=list(_OPERATORS),
        help="operators whose constants are quantized, default MatMul",
    )
    add("--quant_axes", type=_axis, nargs="+", help="axes of blocks, default MatMul:0 Gather:1")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line, that of the process if None.

    Raises:
        SystemExit: code 2 if the arguments are wrong or the method needs samples.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING)
    config: WeightOnlyQuantConfig | None = None
    if args.quant_method in ("gptq", "nvidia_awq"):
        parser.error(f"{args.quant_method} needs samples: `ort quantize --mode int4 --data SAMPLES`")
    elif args.quant_method == "hqq":
        config = HQQWeightOnlyQuantConfig(args.block_size, args.bits)
    elif args.quant_method == "rtn":
        config = RTNWeightOnlyQuantConfig()
    elif args.quant_method == "k_quant":
        config = KQuantWeightOnlyQuantConfig()
    quantizer = MatMulNBitsQuantizer(
        args.input_model,
        bits=args.bits,
        block_size=args.block_size,
        is_symmetric=args.symmetric,
        accuracy_level=args.accuracy_level,
        nodes_to_exclude=args.nodes_to_exclude,
        nodes_to_include=args.nodes_to_include,
        quant_format=args.quant_format,
        op_types_to_quantize=args.op_types_to_quantize,
        quant_axes=args.quant_axes,
        algo_config=config,
    )
    quantizer.process()
    quantizer.model.save_model_to_file(args.output_model, True)


if __name__ == "__main__":
    main()
