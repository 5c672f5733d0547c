"""The picture that stays in a saved notebook when the panel is gone."""

from __future__ import annotations

from typing import Any

from accel_nb.curves import static_bundle
from accel_nb.studio.style import esc

LIMIT = 150_000  # bytes of one bundle; the picture is in it twice, for viewers with HTML and for those without


class Kept:
    """An output beneath the panel: hidden by the panel's own style while that lives, visible anywhere else."""

    def __init__(self, identity: str) -> None:
        self.css_class = f"anb-kept-{identity}"
        self._display_id = f"accel_nb-{identity}"
        self._shown = False

    def display(self) -> None:
        """Put the output, still empty, into the cell that runs now."""
        from IPython.display import display

        empty = {"text/html": f'<div class="{self.css_class}"></div>', "text/plain": ""}
        display(empty, raw=True, display_id=self._display_id)
        self._shown = True

    def update(self, run: Any, line: str, **how: Any) -> str:
        """Put in the final curve of a run and one line of text; the picture as base64, "" if none was made.

        From any thread.
        """
        if not self._shown:
            return ""
        from IPython.display import display

        picture = static_bundle(run.history, **how)["image/png"]
        bundle = self.bundle(f"{run.name}: {line}", run.history.summary(), picture)
        display(bundle, raw=True, display_id=self._display_id, update=True)
        return picture

    def bundle(self, text: str, summary: str, picture: str) -> dict[str, str]:
        html = (
            f'<div class="{self.css_class}"><img alt="{esc(summary)}" '
            f'style="max-width:100%;background:#fff" src="data:image/png;base64,{picture}">'
            f"<p>{esc(text)}</p></div>"
        )
        bundle = {"text/html": html, "image/png": picture, "text/plain": text}
        if sum(map(len, bundle.values())) > LIMIT:
            del bundle["image/png"]
        return bundle
