"""Grammars: which tokens may follow, so that the output of a request has the form that it asks for. By llguidance."""
