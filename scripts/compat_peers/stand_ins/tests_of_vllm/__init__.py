"""Stand-ins for the helpers of vLLM's tests."""
