"""Processes that share a model: how they meet, their connections and orders, and how a lost one is found."""
