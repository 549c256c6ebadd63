"""The one style of reports: an HTML frame that loads nothing (page.py), line charts as inline SVG (chart.py)."""
