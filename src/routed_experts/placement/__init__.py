"""Where experts should live: plans from captured routing, and what a plan would do, before a server is touched. Knows no engine."""
