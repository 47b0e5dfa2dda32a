"""The colours of everything we draw, in plots, pictures and pages."""

INK, MUTED, GRID, PAPER = "#1f2933", "#66727f", "#e4e7eb", "#ffffff"
"""Text and axes; notes; lines between; the ground."""
BLUE, RED, AMBER, TEAL, GREEN = "#4a78b5", "#d1404f", "#e3a33a", "#6fa8a0", "#2f855a"
"""What is as it should be; what is wrong; what was left out; what is next to it; what passed."""
SUPERVISED = ("#b7e4c7", "#95d5ab")
"""Behind supervised tokens, in turn, so that they can be told apart."""
