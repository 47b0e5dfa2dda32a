"""What rich would show at a wide terminal, as plain text."""

from io import StringIO

from rich.console import Console, RenderableType


def shown(renderable: RenderableType) -> str:
    """Without colours."""
    out = StringIO()
    Console(file=out, width=200, color_system=None).print(renderable)
    return out.getvalue()
