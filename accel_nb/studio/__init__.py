"""The panel: a thin view over Plan and Run, in core ipywidgets that are the same in versions 7.7 and 8."""

from accel_nb.studio.view import Studio

__all__ = ["Studio"]
