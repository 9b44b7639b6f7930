"""The rule of Megatron's fine-grained activation offloading, as a policy."""

from __future__ import annotations

from tiered_mem.policies.actions import Action, Offload, Release, Reload
from tiered_mem.policies.by_layer import Graph, LayerPolicy


class MegatronPolicy(LayerPolicy[Graph]):
    """Offloads the first `groups` of a forward's layers; a user turns groups off from the back, by a fraction.

    A group's copy begins when it ends, and its memory is given up at the end of the next one. When a group begins
    its backward, the one before it is reloaded. No times, no budget. In Megatron a group is a module of
    a layer that the user names; here it is all that the layer saves.
    """

    def __init__(self, groups: int) -> None:
        super().__init__()
        self._groups = groups

    def check(self, num_layers: int) -> None:
        if self._groups >= num_layers:
            raise ValueError(f"of {num_layers} layers the last stays, so that at most {num_layers - 1} leave")

    def _graph(self, number: int, num_layers: int) -> Graph:
        return Graph(number)

    def _begin(self, graph: Graph, layer: int, backward: bool) -> list[Action]:
        if not backward or layer in graph.reloaded:
            return []
        due = [each for each in (layer, layer - 1) if 0 <= each < self._groups and each not in graph.reloaded]
        graph.reloaded.update(due)
        return [Reload(key) for key in graph.keys(due)]

    def _offload(self, graph: Graph) -> list[Action]:
        leaving = [(key, layer) for key, layer in graph.take_leaving() if layer < self._groups]
        last = max(graph.ended, default=0)
        ended = graph.keys(range(min(last, self._groups)))
        return [*(Offload(key) for key, _ in leaving), *map(Release, ended)]

    def _end(self, graph: Graph) -> list[Action]:
        return [*self._offload(graph), *map(Release, graph.keys(range(self._groups)))]

    def _returns(self, layer: int) -> int:
        return layer
