"""The engine thread: the step loop, the request table and the commands between steps."""
