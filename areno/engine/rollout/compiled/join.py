"""Products of the same rows become one call: queries, keys and values of a layer; its gate and its way up."""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch.fx import Graph, GraphModule, Node

from areno.engine.kernels.row_product import OF_SEVERAL

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def join_products(module: GraphModule) -> None:
    """Replace row products of one tensor by products with several weights, in place; the numbers stay the same."""
    by_source: dict[tuple[Node, int], list[Node]] = defaultdict(list)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.areno.row_product.default):
        rows = _argument(node, 0)
        by_source[_source(rows), rows.meta["val"].shape[-1]].append(node)
    most = max(OF_SEVERAL)
    for products in by_source.values():
        for first in range(0, len(products), most):
            _join(module.graph, products[first : first + most])
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()


def _argument(node: Node, index: int) -> Node:
    value = node.args[index]
    assert isinstance(value, Node)
    return value


def _source(rows: Node) -> Node:
    """What the rows are a view of: every layer that multiplies them makes a view of its own."""
    while rows.op == "call_function" and rows.target in _VIEWS:
        rows = _argument(rows, 0)
    return rows


def _join(graph: Graph, products: list[Node]) -> None:
    """At the place of the first product; weights are inputs of the graph, and so there already."""
    weights = [_argument(product, 1) for product in products]
    if len(products) not in OF_SEVERAL or any(weight.op != "placeholder" for weight in weights):
        return
    with graph.inserting_before(products[0]):
        joined = graph.call_function(OF_SEVERAL[len(products)].default, (_argument(products[0], 0), *weights))
        parts = [graph.call_function(operator.getitem, (joined, i)) for i in range(len(products))]
    joined.meta["val"] = tuple(product.meta["val"] for product in products)
    for product, part in zip(products, parts, strict=True):
        part.meta = dict(product.meta)
        product.replace_all_uses_with(part)
        graph.erase_node(product)
