"""No files are fetched: an adapter's folder is a name."""

from compat_peers.placeholders import missing

__getattr__ = missing("vllm.transformers_utils.repo_utils")


class hf_api:  # the name that tests call
    """A hub that gives names."""

    def snapshot_download(self, repo_id: str, **kwargs: object) -> str:
        """The name."""
        return repo_id
