"""The tree of phases within an episode, and the stopwatch that walks it."""

from __future__ import annotations

from collections.abc import Iterator


class Children(dict[str, "Node"]):
    """The phases seen inside one phase; looking up a new name makes its node."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node

    def __missing__(self, name: str) -> Node:
        child = self[name] = Node(name, self._node)
        return child


class Node:
    """One phase at one place in the tree. ``seconds`` includes the phases inside it.

    To enter it: set ``started`` and make it the open node; to leave it: add to ``seconds`` and
    make ``parent`` the open node. ``marked`` says that a context manager has it open, not a hook.
    """

    __slots__ = ("children", "marked", "name", "parent", "path", "seconds", "started")

    def __init__(self, name: str, parent: Node | None) -> None:
        self.name = name
        # The root is its own parent, so that the hooks need no check for None.
        self.parent: Node = self if parent is None else parent
        self.path: str = name if parent is None or not parent.path else f"{parent.path}/{name}"
        self.seconds = 0.0
        self.started = 0.0
        self.marked = False
        self.children = Children(self)

    def walk(self) -> Iterator[Node]:
        """Yield every node below this one, each before the nodes inside it."""
        for child in self.children.values():
            yield child
            yield from child.walk()
