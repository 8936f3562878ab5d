"""Figures of benches: whole, and shown on the page of their report."""

from __future__ import annotations

from cluster.measure.options import present
from cluster.measure.report import as_markdown, figure_at


def test_a_legend_wider_than_its_axes_is_whole(tmp_path):
    """The border of the picture is blank: nothing is cut off there."""
    from matplotlib import image

    with figure_at(tmp_path / "wide.png", 1, 2, 7.0, 3.0) as (axes,):
        for axis in axes:
            for part in ("draft", "verify", "queue", "hop"):
                axis.barh(["off"], [1.0], label=part)
            axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=12)
    pixels = image.imread(tmp_path / "wide.png")[:, :, :3]
    border = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
    assert all((edge == 1.0).all() for edge in border)
    assert (pixels != 1.0).any()


REPORT = {"bench": "speed", "aims": []}


def test_a_report_shows_its_plot_by_the_way_from_its_page(tmp_path):
    def draw(report, path):
        path.write_text("drawn")

    present(REPORT, ["fact"], [], None, tmp_path / "docs/speed.md", tmp_path / "docs/plots/speed.png", draw)
    assert "\n- fact\n\n![The figures of these tables](plots/speed.png)\n" in (tmp_path / "docs/speed.md").read_text()


def test_a_report_without_a_plot_shows_none():
    assert "![" not in as_markdown(REPORT, ["fact"], [])
