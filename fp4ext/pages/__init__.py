"""The style of all reports: an HTML page without external resources (page.py), and line charts as SVG (chart.py)."""
